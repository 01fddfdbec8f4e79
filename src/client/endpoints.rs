//! Which member to talk to: pure, so that every rotation can be tested without a network.
//!
//! The choice is sticky, since a connection that works is worth keeping, and rotates as soon as
//! the chosen member is reported bad. Bad members come back after a pause that doubles.

use std::time::Duration;

use crate::clock::Instant;
use crate::error::{Error, Result};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

#[derive(Debug)]
struct Health {
    bad_until: Option<Instant>,
    pause: Duration,
}

/// The members in the order they were given, and what is known of their health.
#[derive(Debug)]
pub(crate) struct Endpoints {
    health: Vec<Health>,
    sticky: usize,
}

impl Endpoints {
    pub(crate) fn new(count: usize) -> Endpoints {
        let health = (0..count).map(|_| Health { bad_until: None, pause: FIRST_PAUSE }).collect();
        Endpoints { health, sticky: 0 }
    }

    pub(crate) fn count(&self) -> usize {
        self.health.len()
    }

    /// The member to use now: the sticky one, or the next that is not known to be bad.
    pub(crate) fn pick(&mut self, now: Instant) -> usize {
        self.sticky = self.from(self.sticky, now);
        self.sticky
    }

    /// The member to try after `member`, for a call that just failed there or is overdue.
    pub(crate) fn after(&self, member: usize, now: Instant) -> usize {
        self.from((member + 1) % self.count(), now)
    }

    fn from(&self, start: usize, now: Instant) -> usize {
        let count = self.count();
        let order = (0..count).map(|step| (start + step) % count);
        order
            .clone()
            .find(|member| !self.is_bad(*member, now))
            // All are bad: the one whose pause ends first, so that none is given up for good.
            .or_else(|| order.min_by_key(|member| self.health[*member].bad_until))
            .unwrap_or(0)
    }

    fn is_bad(&self, member: usize, now: Instant) -> bool {
        self.health[member].bad_until.is_some_and(|until| now < until)
    }

    /// A transport failure or an overdue answer: avoid this member for a while.
    pub(crate) fn report_bad(&mut self, member: usize, now: Instant) {
        let health = &mut self.health[member];
        if health.bad_until.is_some_and(|until| now < until) {
            return;
        }
        health.bad_until = Some(now + health.pause);
        health.pause = (health.pause * 2).min(LONGEST_PAUSE);
    }

    /// The member answered. Returns whether that ends a silence.
    pub(crate) fn report_good(&mut self, member: usize) -> bool {
        let was_silent = self.is_silent();
        self.health[member] = Health { bad_until: None, pause: FIRST_PAUSE };
        was_silent
    }

    /// Whether every member has failed us since its last answer, be it long ago.
    pub(crate) fn is_silent(&self) -> bool {
        self.health.iter().all(|health| health.bad_until.is_some())
    }
}

/// Checks one endpoint before any I/O and gives it the form that etcd-client takes.
pub(crate) fn checked_url(endpoint: &str, tls: bool) -> Result<String> {
    let refuse = |why: &str| Err(Error::invalid(format!("endpoint `{endpoint}`: {why}")));
    let (scheme, rest) = match endpoint.split_once("://") {
        Some((scheme, rest)) => (scheme, rest),
        None if tls => ("https", endpoint),
        None => ("http", endpoint),
    };
    match scheme {
        "http" if tls => return refuse("a plain http URL cannot be used with TLS options"),
        "http" => {}
        "https" if cfg!(any(feature = "tls", feature = "tls-aws-lc")) => {}
        "https" => return refuse("https needs the crate feature `tls` (or `tls-aws-lc`)"),
        _ => return refuse("the scheme must be http or https"),
    }
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    if authority.is_empty() {
        return refuse("the host is missing");
    }
    if authority.contains(['/', '?', '#', '@']) || authority.chars().any(char::is_whitespace) {
        return refuse("expected scheme://host:port and nothing more");
    }
    let port = match authority.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && !port.contains(']') => port,
        _ => return refuse("the port is missing"),
    };
    if port.parse::<u16>().is_err() || port == "0" {
        return refuse("the port is not a number from 1 to 65535");
    }
    Ok(format!("{scheme}://{authority}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn the_choice_is_sticky_and_rotates_at_the_first_report() {
        let mut endpoints = Endpoints::new(3);
        assert_eq!(endpoints.pick(at(0)), 0);
        endpoints.report_bad(0, at(0));
        assert_eq!(endpoints.pick(at(1)), 1);
        assert_eq!(endpoints.pick(at(5_000)), 1, "a recovered member does not win back by itself");
        assert_eq!(endpoints.after(1, at(5)), 2);
        assert_eq!(endpoints.after(2, at(5)), 1, "the bad one is skipped");
    }

    #[test]
    fn with_all_bad_the_earliest_to_return_is_tried_and_pauses_grow() {
        let mut endpoints = Endpoints::new(2);
        endpoints.report_bad(1, at(0));
        endpoints.report_bad(0, at(500));
        assert_eq!(endpoints.pick(at(600)), 1);
        endpoints.report_bad(1, at(1_001));
        assert_eq!(endpoints.pick(at(1_400)), 0, "the second pause of 1 is longer");
        endpoints.report_good(1);
        assert_eq!(endpoints.after(0, at(1_400)), 1);
    }

    #[test]
    fn a_silence_is_of_all_members_and_ends_with_the_first_answer() {
        let mut endpoints = Endpoints::new(2);
        assert!(!endpoints.report_good(0), "nothing was wrong");
        endpoints.report_bad(0, at(0));
        assert!(!endpoints.is_silent());
        assert!(!endpoints.report_good(1), "one member is not etcd");
        endpoints.report_bad(1, at(10));
        assert!(endpoints.is_silent());
        assert_eq!(endpoints.pick(at(60_000)), 0, "both may be tried again");
        assert!(endpoints.is_silent(), "which is no answer");
        assert!(endpoints.report_good(1));
        assert!(!endpoints.report_good(0), "the silence was over");
    }

    #[test]
    fn endpoints_are_checked_by_name() {
        assert_eq!(checked_url("127.0.0.1:2379", false).unwrap(), "http://127.0.0.1:2379");
        assert_eq!(checked_url("http://[::1]:2379/", false).unwrap(), "http://[::1]:2379");
        for bad in
            ["", "http://", "http://host", "ftp://h:1", "http://h:0", "http://h:99999", "h:1/x"]
        {
            let error = checked_url(bad, false).expect_err(bad);
            assert!(error.is_invalid_argument());
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
        assert!(checked_url("http://h:1", true).is_err());
    }
}
