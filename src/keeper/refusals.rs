//! Counts refusals by reason and limits their log lines, for each reason separately. Pure.

use crate::net::log_limit::LogLimit;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The access list of a znode does not grant the right.
    Rights,
    /// A frame that is too long, negative, or cannot be decoded.
    BadFrame,
    /// Too many connections, in total or from one address.
    Connection,
    /// No identity of the connection has a right in the tree, and its time to authenticate is up.
    Unauthenticated,
    /// Too many identities, or one that is too long.
    Identity,
    /// Too many watches, or paths that are too long together.
    Watch,
    /// A reply that does not fit into a frame.
    Answer,
    /// The buffers of all connections together are full.
    Buffers,
    /// Plain text to a TLS listener, or a certificate that was not accepted.
    Tls,
}

const REASONS: usize = Reason::Tls as usize + 1;

#[derive(Debug, Default)]
pub struct Refusals([LogLimit; REASONS]);

impl Refusals {
    /// Counts a refusal. Returns the number of unlogged refusals before it if this one is to be
    /// logged.
    pub fn note(&mut self, reason: Reason, now_ms: i64) -> Option<u64> {
        self.0[reason as usize].note(now_ms)
    }

    pub fn count(&self, reason: Reason) -> u64 {
        self.0[reason as usize].total()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_rate_limited_independently() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.note(Reason::Rights, 0), Some(0));
        assert_eq!(refusals.note(Reason::BadFrame, 0), Some(0));
        assert_eq!((refusals.count(Reason::BadFrame), refusals.count(Reason::Watch)), (1, 0));
    }
}
