//! Decides which new connections are accepted: a total limit, a limit for each remote address, and
//! a part of the total that is reserved for loopback, so that remote clients cannot lock out an
//! operator on this machine. Pure.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub total: usize,
    /// For each remote address, or each /64 network of IPv6; 0 is no limit. Loopback has none of its own:
    /// the agents, hooks and operators of `portcullis up` all come from there.
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
pub enum Full {
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

/// The key by which an address is counted: the whole /64 network of an IPv6 client, which can use
/// any address in it.
pub fn counted(addr: IpAddr) -> IpAddr {
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
    pub fn check(&self, addr: IpAddr, limits: &ConnectionLimits) -> Result<(), Full> {
        if self.loopback + self.remote_total >= limits.total {
            return Err(Full::Total);
        }
        if is_loopback(addr) {
            return Ok(());
        }
        if self.remote_total >= limits.total - limits.loopback_reserve() {
            return Err(Full::Total);
        }
        let held = self.remote.get(&counted(addr)).copied().unwrap_or(0);
        if limits.per_address > 0 && held >= limits.per_address { Err(Full::Address) } else { Ok(()) }
    }

    pub fn opened(&mut self, addr: IpAddr) {
        if is_loopback(addr) {
            self.loopback += 1;
        } else {
            self.remote_total += 1;
            *self.remote.entry(counted(addr)).or_default() += 1;
        }
    }

    pub fn closed(&mut self, addr: IpAddr) {
        if is_loopback(addr) {
            self.loopback -= 1;
            return;
        }
        self.remote_total -= 1;
        let addr = counted(addr);
        match self.remote.get_mut(&addr) {
            Some(held) if *held > 1 => *held -= 1,
            _ => _ = self.remote.remove(&addr),
        }
    }

    /// Whether closing a connection from `held` makes room for one from `addr` that was refused with `full`.
    pub fn makes_room(full: Full, held: IpAddr, addr: IpAddr) -> bool {
        match full {
            Full::Address => counted(held) == counted(addr),
            // A remote client cannot use a connection from the loopback reserve.
            Full::Total => is_loopback(addr) || !is_loopback(held),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// How many connections from `from` are accepted one after the other, and why the next is not.
    fn fill(admission: &mut Admission, limits: &ConnectionLimits, from: &str) -> (usize, Full) {
        for count in 0.. {
            match admission.check(addr(from), limits) {
                Ok(()) => admission.opened(addr(from)),
                Err(full) => return (count, full),
            }
        }
        unreachable!("there is a limit")
    }

    #[test]
    fn one_address_gets_its_share_and_others_are_accepted() {
        let limits = ConnectionLimits { total: 1_000, per_address: 60 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "10.0.0.1"), (60, Full::Address));
        assert_eq!(admission.check(addr("10.0.0.2"), &limits), Ok(()));
        assert_eq!(admission.check(addr("127.0.0.1"), &limits), Ok(()));
        // The same client as an IPv4-mapped address, and another address in the same IPv6 network.
        assert_eq!(admission.check(addr("::ffff:10.0.0.1"), &limits), Err(Full::Address));
        assert_eq!(fill(&mut admission, &limits, "2001:db8::1"), (60, Full::Address));
        assert_eq!(admission.check(addr("2001:db8::2"), &limits), Err(Full::Address));
        assert_eq!(admission.check(addr("2001:db8:0:1::2"), &limits), Ok(()));
        admission.closed(addr("10.0.0.1"));
        assert_eq!(admission.check(addr("10.0.0.1"), &limits), Ok(()));
    }

    #[test]
    fn remote_clients_leave_the_reserve_to_loopback() {
        let limits = ConnectionLimits { total: 1_000, per_address: 0 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "10.0.0.1"), (900, Full::Total));
        assert_eq!(fill(&mut admission, &limits, "::1"), (100, Full::Total));
        admission.closed(addr("::1"));
        assert_eq!(admission.check(addr("10.0.0.2"), &limits), Err(Full::Total));
        assert_eq!(admission.check(addr("127.0.0.1"), &limits), Ok(()));
    }

    #[test]
    fn loopback_may_use_all_connections() {
        let limits = ConnectionLimits { total: 200, per_address: 60 };
        let mut admission = Admission::default();
        assert_eq!(fill(&mut admission, &limits, "127.0.0.1"), (200, Full::Total));
    }

    #[test]
    fn closed_connections_leave_no_entry_behind() {
        let mut admission = Admission::default();
        for _ in 0..2 {
            admission.opened(addr("10.0.0.1"));
        }
        (0..2).for_each(|_| admission.closed(addr("10.0.0.1")));
        assert!(admission.remote.is_empty() && admission.remote_total == 0);
    }

    #[test]
    fn connections_are_closed_only_where_that_makes_room() {
        for (full, held, new, helps) in [
            (Full::Address, "10.0.0.1", "10.0.0.1", true),
            (Full::Address, "10.0.0.2", "10.0.0.1", false),
            (Full::Total, "10.0.0.2", "10.0.0.1", true),
            (Full::Total, "127.0.0.1", "10.0.0.1", false),
            (Full::Total, "10.0.0.2", "127.0.0.1", true),
            (Full::Total, "127.0.0.1", "127.0.0.1", true),
        ] {
            assert_eq!(Admission::makes_room(full, addr(held), addr(new)), helps, "{full:?} {held} {new}");
        }
    }
}
