//! Where the programs `etcd` and `etcdctl` are.

use std::env;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::testing::failed;

const INSTALL: &str = "install it with `apt-get install etcd-server etcd-client`, `brew install \
                       etcd` or from https://github.com/etcd-io/etcd/releases";

pub(super) fn etcd(chosen: Option<&Path>) -> Result<PathBuf> {
    match chosen {
        Some(path) => existing(path, "the path given to the builder"),
        None => match from_env("ETCD_BIN") {
            Some(path) => existing(&path, "ETCD_BIN"),
            None => on_path("etcd").ok_or_else(|| {
                failed(format!("no etcd: ETCD_BIN is not set and no `etcd` is on PATH; {INSTALL}"))
            }),
        },
    }
}

pub(super) fn etcdctl(etcd: &Path) -> Result<PathBuf> {
    if let Some(path) = from_env("ETCDCTL_BIN") {
        return existing(&path, "ETCDCTL_BIN");
    }
    let beside = etcd.with_file_name("etcdctl");
    if beside.is_file() {
        return Ok(beside);
    }
    on_path("etcdctl").ok_or_else(|| {
        failed(format!(
            "no etcdctl: ETCDCTL_BIN is not set, there is none beside {} and none on PATH; \
             {INSTALL}",
            etcd.display()
        ))
    })
}

fn from_env(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn existing(path: &Path, origin: &str) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    Err(failed(format!("{origin} names {}, which is not a file; {INSTALL}", path.display())))
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_path_is_named_and_so_is_the_way_out() {
        let error = etcd(Some(Path::new("/nowhere/etcd"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/etcd"), "{error}");
        assert!(error.to_string().contains("install"), "{error}");
    }
}
