//! Knows whether this process is still the one that made a client.
//!
//! After a `fork` the child has the parent's memory but none of its threads, so a client would
//! hang for ever in it. A generation number that the child raises as its first act tells the two
//! apart for the price of one atomic load, where asking for the process id would cost a system
//! call at each use. This is the crate's only unsafe code.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The number of forks between the process that loaded this library and the current one.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

#[cfg(unix)]
unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> std::ffi::c_int;
}

#[cfg(unix)]
unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Registers the handler, once per process image.
pub(crate) fn watch() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        #[cfg(unix)]
        // SAFETY: `in_child` has the signature that pthread_atfork asks for, lives as long as the
        // program, and does one atomic addition, which is async-signal-safe.
        let refused = unsafe { pthread_atfork(None, None, Some(in_child)) };
        #[cfg(unix)]
        if refused != 0 {
            log::warn!("fork detection is off: pthread_atfork answered {refused}");
        }
    });
}
