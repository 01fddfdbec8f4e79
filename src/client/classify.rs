//! What a failed RPC says about the request: whether it can have been applied, and whether it is
//! worth another try.
//!
//! gRPC codes alone do not say it: one cause comes as `Unavailable`, `Unknown` or `Cancelled`
//! depending on where it struck. Code and text together do, and the table below is what etcd 3.4
//! and 3.5 and etcd-client 0.21 were seen to send.

use crate::error::ErrorKind;

/// The gRPC status codes this table speaks of.
mod code {
    pub(super) const CANCELLED: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const DEADLINE_EXCEEDED: i32 = 4;
    pub(super) const NOT_FOUND: i32 = 5;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const OUT_OF_RANGE: i32 = 11;
    pub(super) const UNAVAILABLE: i32 = 14;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

/// The class of one failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Never left this machine, or was turned away at the door: certainly not applied.
    NotSent,
    /// May have been applied.
    Unknown,
    /// The login is out of date; certainly not applied, and a fresh token may pass.
    StaleLogin,
    /// etcd answered no, with a reason that another try does not change.
    Refused(ErrorKind),
}

/// Sorts one gRPC failure.
pub(crate) fn classify(grpc_code: i32, message: &str) -> Class {
    let says = |part: &str| message.contains(part);
    match grpc_code {
        code::UNAUTHENTICATED => Class::StaleLogin,
        _ if says("invalid auth token")
            || says("revision of auth store is old")
            || says("auth: revision in header is old") =>
        {
            Class::StaleLogin
        }
        // No token came with the request: it has none yet, or there is no user to log in as.
        code::INVALID_ARGUMENT if says("user name is empty") => Class::StaleLogin,
        code::INVALID_ARGUMENT if says("authentication failed") => {
            Class::Refused(ErrorKind::AuthenticationFailed)
        }
        code::PERMISSION_DENIED => Class::Refused(ErrorKind::PermissionDenied),
        code::NOT_FOUND if says("lease not found") => Class::Refused(ErrorKind::LeaseGone),
        code::OUT_OF_RANGE if says("compacted") => Class::Refused(ErrorKind::Compacted),
        code::UNAVAILABLE if says("tcp connect error") || says("dns error") => Class::NotSent,
        code::UNAVAILABLE if says("invalid peer certificate") => Class::NotSent,
        code::UNAVAILABLE if says("etcdserver: no leader") => Class::NotSent,
        code::UNAVAILABLE if says("etcdserver: too many requests") => Class::NotSent,
        code::UNAVAILABLE | code::CANCELLED | code::DEADLINE_EXCEEDED => Class::Unknown,
        code::UNKNOWN if says("Service was not ready") => Class::NotSent,
        code::UNKNOWN if says("transport error") || says("h2 protocol error") => Class::Unknown,
        code::UNKNOWN if says("context deadline exceeded") || says("context canceled") => {
            Class::Unknown
        }
        code::UNKNOWN if !says("etcdserver:") => Class::Unknown,
        _ => Class::Refused(ErrorKind::Rejected),
    }
}

/// Sorts a failure as etcd-client reports it, with its text.
pub(crate) fn classify_error(error: &etcd_client::Error) -> (Class, String) {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            let mut text = status.message().to_owned();
            // A connection refused arrives as "transport error" with the cause behind it.
            let mut source = std::error::Error::source(status);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            (classify(i32::from(status.code()), &text), text)
        }
        etcd_client::Error::LeaseKeepAliveError(text) if text.contains("lease not found") => {
            (Class::Refused(ErrorKind::LeaseGone), text.clone())
        }
        etcd_client::Error::InvalidArgs(text) => {
            (Class::Refused(ErrorKind::InvalidArgument), text.clone())
        }
        etcd_client::Error::InvalidUri(e) => {
            (Class::Refused(ErrorKind::InvalidArgument), e.to_string())
        }
        other => (Class::Unknown, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_texts_seen() {
        let rows: &[(i32, &str, Class)] = &[
            (14, "tcp connect error", Class::NotSent),
            (14, "etcdserver: no leader", Class::NotSent),
            (14, "transport error: invalid peer certificate: UnknownIssuer", Class::NotSent),
            (14, "http2 error", Class::Unknown),
            (14, "etcdserver: request timed out", Class::Unknown),
            (
                14,
                "etcdserver: request timed out, possibly due to previous leader failure",
                Class::Unknown,
            ),
            (1, "operation was canceled", Class::Unknown),
            (1, "Timeout expired", Class::Unknown),
            (2, "transport error", Class::Unknown),
            (2, "h2 protocol error: error reading a body from connection", Class::Unknown),
            (2, "Service was not ready: transport error", Class::NotSent),
            (2, "context deadline exceeded", Class::Unknown),
            (4, "context deadline exceeded", Class::Unknown),
            (5, "etcdserver: requested lease not found", Class::Refused(ErrorKind::LeaseGone)),
            (
                11,
                "etcdserver: mvcc: required revision has been compacted",
                Class::Refused(ErrorKind::Compacted),
            ),
            (16, "etcdserver: invalid auth token", Class::StaleLogin),
            (2, "etcdserver: invalid auth token", Class::StaleLogin),
            (3, "etcdserver: revision of auth store is old", Class::StaleLogin),
            // 3.5.1, of a write under a JWT.
            (2, "auth: revision in header is old", Class::StaleLogin),
            (
                3,
                "etcdserver: authentication failed, invalid user ID or password",
                Class::Refused(ErrorKind::AuthenticationFailed),
            ),
            (3, "etcdserver: user name is empty", Class::StaleLogin),
            (7, "etcdserver: permission denied", Class::Refused(ErrorKind::PermissionDenied)),
            (3, "etcdserver: request is too large", Class::Refused(ErrorKind::Rejected)),
            (
                3,
                "etcdserver: too many operations in txn request",
                Class::Refused(ErrorKind::Rejected),
            ),
            (9, "etcdserver: lease already exists", Class::Refused(ErrorKind::Rejected)),
        ];
        for (code, text, class) in rows {
            assert_eq!(classify(*code, text), *class, "{code} {text}");
        }
    }
}
