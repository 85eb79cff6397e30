//! Decides which new connections are accepted: a total limit, a limit for each remote address, and
//! a part of the total that is reserved for loopback, so that remote clients cannot lock out an
//! operator on this machine. Pure.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub total: usize,
    /// For each remote address, or each /64 network of IPv6; 0 is no limit. Loopback has no limit
    /// of its own, because the agents, hooks and operators of `portcullis up` all connect from
    /// there.
    pub per_address: usize,
}

impl ConnectionLimits {
    /// Connections that are reserved for loopback.
    fn loopback_reserve(&self) -> usize {
        const MOST: usize = 100;
        (self.total / 10).min(MOST)
    }
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitReached {
    /// The total limit is reached, or only the loopback reserve is left.
    Total,
    /// The limit for the client's address is reached.
    Address,
}

#[derive(Debug, Default)]
pub struct Admission {
    remote: HashMap<IpAddr, usize>,
    remote_total: usize,
    loopback: usize,
}

/// Returns the key by which an address is counted: the whole /64 network of an IPv6 client, because
/// the client can use any address in it.
pub fn counting_key(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(addr) => {
            let [a, b, c, d, ..] = addr.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        addr @ IpAddr::V4(_) => addr,
    }
}

fn is_loopback(addr: IpAddr) -> bool {
    addr.to_canonical().is_loopback()
}

impl Admission {
    pub fn check(&self, addr: IpAddr, limits: &ConnectionLimits) -> Result<(), LimitReached> {
        if self.loopback + self.remote_total >= limits.total {
            return Err(LimitReached::Total);
        }
        if is_loopback(addr) {
            return Ok(());
        }
        if self.remote_total >= limits.total - limits.loopback_reserve() {
            return Err(LimitReached::Total);
        }
        let held = self.remote.get(&counting_key(addr)).copied().unwrap_or(0);
        if limits.per_address > 0 && held >= limits.per_address { Err(LimitReached::Address) } else { Ok(()) }
    }

    pub fn opened(&mut self, addr: IpAddr) {
        if is_loopback(addr) {
            self.loopback += 1;
        } else {
            self.remote_total += 1;
            *self.remote.entry(counting_key(addr)).or_default() += 1;
        }
    }

    pub fn closed(&mut self, addr: IpAddr) {
        if is_loopback(addr) {
            self.loopback -= 1;
            return;
        }
        self.remote_total -= 1;
        let addr = counting_key(addr);
        match self.remote.get_mut(&addr) {
            Some(held) if *held > 1 => *held -= 1,
            _ => _ = self.remote.remove(&addr),
        }
    }

    /// Returns whether closing a connection from `held` allows one from `addr` that was refused
    /// with `full`.
    pub fn frees_slot(full: LimitReached, held: IpAddr, addr: IpAddr) -> bool {
        match full {
            LimitReached::Address => counting_key(held) == counting_key(addr),
            // A remote client cannot use a connection from the loopback reserve.
            LimitReached::Total => is_loopback(addr) || !is_loopback(held),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Opens connections from `from` until one is refused; returns their number and the reason.
    fn fill(admission: &mut Admission, limits: &ConnectionLimits, from: &str) -> (usize, LimitReached) {
        for count in 0.. {
            match admission.check(addr(from), limits) {
                Ok(()) => admission.opened(addr(from)),
                Err(full) => return (count, full),
            }
        }
        unreachable!("there is a limit")
    }

    #[test]
    fn limit_per_address_does_not_affect_other_addresses() {
        let limits = ConnectionLimits { total: 1_000, per_address: 60 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "10.0.0.1"), (60, LimitReached::Address));
        assert_eq!(admission.check(addr("10.0.0.2"), &limits), Ok(()));
        assert_eq!(admission.check(addr("127.0.0.1"), &limits), Ok(()));
        // The same client as an IPv4-mapped address, and another address in the same IPv6 network.
        assert_eq!(admission.check(addr("::ffff:10.0.0.1"), &limits), Err(LimitReached::Address));
        assert_eq!(fill(&mut admission, &limits, "2001:db8::1"), (60, LimitReached::Address));
        assert_eq!(admission.check(addr("2001:db8::2"), &limits), Err(LimitReached::Address));
        assert_eq!(admission.check(addr("2001:db8:0:1::2"), &limits), Ok(()));
        admission.closed(addr("10.0.0.1"));
        assert_eq!(admission.check(addr("10.0.0.1"), &limits), Ok(()));
    }

    #[test]
    fn loopback_reserve_is_not_available_to_remote_clients() {
        let limits = ConnectionLimits { total: 1_000, per_address: 0 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "10.0.0.1"), (900, LimitReached::Total));
        assert_eq!(fill(&mut admission, &limits, "::1"), (100, LimitReached::Total));
        admission.closed(addr("::1"));
        assert_eq!(admission.check(addr("10.0.0.2"), &limits), Err(LimitReached::Total));
        assert_eq!(admission.check(addr("127.0.0.1"), &limits), Ok(()));
    }

    #[test]
    fn loopback_can_use_all_connections() {
        let limits = ConnectionLimits { total: 200, per_address: 60 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "127.0.0.1"), (200, LimitReached::Total));
    }

    #[test]
    fn closed_connections_leave_no_entry() {
        let mut admission = Admission::default();
        for _ in 0..2 {
            admission.opened(addr("10.0.0.1"));
        }
        (0..2).for_each(|_| admission.closed(addr("10.0.0.1")));
        assert!(admission.remote.is_empty() && admission.remote_total == 0);
    }

    #[test]
    fn only_a_connection_that_frees_a_slot_is_closed() {
        for (full, held, new, helps) in [
            (LimitReached::Address, "10.0.0.1", "10.0.0.1", true),
            (LimitReached::Address, "10.0.0.2", "10.0.0.1", false),
            (LimitReached::Total, "10.0.0.2", "10.0.0.1", true),
            (LimitReached::Total, "127.0.0.1", "10.0.0.1", false),
            (LimitReached::Total, "10.0.0.2", "127.0.0.1", true),
            (LimitReached::Total, "127.0.0.1", "127.0.0.1", true),
        ] {
            assert_eq!(Admission::frees_slot(full, addr(held), addr(new)), helps, "{full:?} {held} {new}");
        }
    }
}
