//! Who this client is, for the eyes of others: in key names, in values, in log lines.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::resilience::random_unit;

const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// `length` random characters that are safe in any key.
pub(crate) fn random_text(length: usize) -> String {
    (0..length)
        .map(|_| {
            ALPHABET[(random_unit() * ALPHABET.len() as f64) as usize % ALPHABET.len()] as char
        })
        .collect()
}

/// A number that no other recipe of this process has had.
pub(crate) fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    if name.is_empty() { "unknown".to_owned() } else { name }
}

/// Host name, process id and six random characters. Ids stand inside keys, where `/` and `:`
/// separate.
pub(crate) fn default_client_id() -> String {
    let host = host_name().replace(['/', ':'], "-");
    format!("{host}-{}-{}", std::process::id(), random_text(6))
}

pub(crate) fn checked_client_id(id: String) -> Result<String> {
    if id.is_empty() || id.contains(['/', ':', '\0']) {
        return Err(Error::invalid(format!(
            "client id `{}`: it must not be empty or contain `/`, `:` or NUL",
            id.escape_debug()
        )));
    }
    Ok(id)
}

/// Checks a recipe's path: what follows it in etcd begins with `/`, so an ending `/` or a doubled
/// one would make two names of one place.
pub(crate) fn checked_path(path: String) -> Result<String> {
    let refuse = |why| Err(Error::invalid(format!("path `{}` {why}", path.escape_debug())));
    if path.is_empty() {
        return refuse("is empty");
    }
    if path.contains('\0') {
        return refuse("contains a NUL");
    }
    if path.ends_with('/') {
        return refuse("ends with `/`");
    }
    if path.contains("//") {
        return refuse("contains `//`");
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_paths_are_refused_by_name() {
        for bad in ["", "a/", "a//b", "/", "a\0b"] {
            let error = checked_path(bad.to_owned()).expect_err(bad);
            assert!(error.is_invalid_argument());
            assert!(error.to_string().contains(&bad.escape_debug().to_string()), "{error}");
        }
        for good in ["a", "/a", "a/b", "job/x", "/locks/orders"] {
            assert_eq!(checked_path(good.to_owned()).unwrap(), good);
        }
        assert!(checked_client_id("a:b".to_owned()).is_err());
        let id = default_client_id();
        assert_eq!(checked_client_id(id.clone()).unwrap(), id);
    }
}
