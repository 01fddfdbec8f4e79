//! Links that die without a word, as when a packet filter forgets its connections: what was open
//! at a cut never carries a byte again, and neither does what is opened before the mending.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Odd: cut.
type Epoch = Arc<AtomicU64>;

pub(crate) struct DeadLinks {
    endpoint: String,
    epoch: Epoch,
}

impl DeadLinks {
    pub(crate) fn start(target: &str) -> DeadLinks {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (epoch, target) = (Epoch::default(), target.trim_start_matches("http://").to_owned());
        let now = epoch.clone();
        // The threads end with the process of the test.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let born = now.load(Ordering::SeqCst);
                let server = TcpStream::connect(&target).unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let now = now.clone();
                    std::thread::spawn(move || carry(from, to, born, &now));
                }
            }
        });
        DeadLinks { endpoint, epoch }
    }

    pub(crate) fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    pub(crate) fn cut(&self) {
        assert!(self.epoch.fetch_add(1, Ordering::SeqCst).is_multiple_of(2));
    }

    pub(crate) fn mend(&self) {
        assert!(!self.epoch.fetch_add(1, Ordering::SeqCst).is_multiple_of(2));
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, born: u64, epoch: &Epoch) {
    let mut buffer = [0; 16 * 1024];
    to.set_nodelay(true).unwrap();
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let lives = born.is_multiple_of(2) && epoch.load(Ordering::SeqCst) == born;
        if lives && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    if born.is_multiple_of(2) && epoch.load(Ordering::SeqCst) == born {
        let _ = to.shutdown(std::net::Shutdown::Both);
    } else {
        // The other side hears nothing of the end either.
        std::thread::sleep(Duration::from_secs(60));
    }
}
