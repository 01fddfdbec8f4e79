//! A store that others write to all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use crate::measure::Outcome;

/// Writes other keys, one after the other and without a pause, until it is dropped.
pub(crate) struct Noise {
    over: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
}

impl Noise {
    pub(crate) fn start(endpoint: &str) -> Outcome<Noise> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut client = runtime.block_on(etcd_client::Client::connect([endpoint], None))?;
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let writer = thread::spawn(move || {
            runtime.block_on(async {
                for number in 0_u64.. {
                    let key = format!("/noise/{}", number % 100);
                    let put = client.put(key, [b'x'; 64], None).await;
                    if put.is_err() || seen.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        });
        Ok(Noise { over, writer: Some(writer) })
    }
}

impl Drop for Noise {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(writer) = self.writer.take() {
            // It ends with the put that is under way, whatever comes of it.
            let _ = writer.join();
        }
    }
}
