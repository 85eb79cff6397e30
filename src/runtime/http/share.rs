//! What the connections of a door have together: room in number, and in bytes for large bodies. How much of it one address
//! may have is limited, so that one client cannot keep everybody else out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Limits;

/// Half of everything is the most that one address gets. More would leave too little for the others; less would be too little
/// where a whole site comes through one translated address. Loopback is an address like others: a relay that runs wild beside
/// the tracker is as bad as one elsewhere.
fn share_of_one(all: usize) -> usize {
    all.div_ceil(2)
}

/// Who counts as one. Whoever has an IPv6 address has 2^64 of them.
fn client(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// Places for what lasts, a stream say. One address gets some of them, and nobody more than there are.
#[derive(Debug)]
pub struct Places {
    all: usize,
    of_one: usize,
    /// Only of those who have any.
    taken: Mutex<HashMap<IpAddr, usize>>,
}

/// There is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// For anybody.
    Full,
    /// For this address, which has its share.
    Share,
}

impl Places {
    pub fn new(all: usize, of_one: usize) -> Arc<Self> {
        Arc::new(Self { all, of_one, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// Says for whom there is none.
    pub fn take(self: &Arc<Self>, peer: IpAddr) -> Result<Place, NoPlace> {
        let client = client(peer);
        let mut taken = self.taken();
        if taken.get(&client).is_some_and(|count| *count >= self.of_one) {
            return Err(NoPlace::Share);
        }
        if taken.values().sum::<usize>() >= self.all {
            return Err(NoPlace::Full);
        }
        *taken.entry(client).or_default() += 1;
        Ok(Place { of: Arc::clone(self), client })
    }
}

/// Goes back when it is dropped.
#[derive(Debug)]
pub struct Place {
    of: Arc<Places>,
    client: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.of.taken();
        if let Some(count) = taken.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.client);
            }
        }
    }
}

/// Buffered bytes of an unfinished request that do not count towards the limit: most requests are
/// smaller.
pub(super) const FREE_BYTES: usize = 1024;

/// Buffers are counted in steps of this size.
const STEP_BYTES: usize = 4 * 1024;

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    connections: usize,
    /// Of large bodies.
    bytes: usize,
    /// Of other unfinished requests.
    pending: usize,
}

#[derive(Debug, Default)]
struct Book {
    /// Only addresses that hold anything.
    of: HashMap<IpAddr, Held>,
    bytes: usize,
    pending: usize,
}

#[derive(Debug)]
pub(super) struct Shared {
    connections_of_one: usize,
    bytes: usize,
    pending: usize,
    book: Mutex<Book>,
}

impl Shared {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            connections_of_one: share_of_one(limits.connections),
            bytes: limits.large_bytes,
            pending: limits.pending_bytes,
            book: Mutex::default(),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for another connection of this peer; none if it has its share.
    pub(super) fn connection(self: &Arc<Self>, peer: IpAddr) -> Option<Share> {
        let client = client(peer);
        let mut book = self.book();
        let held = book.of.entry(client).or_default();
        if held.connections >= self.connections_of_one {
            return None;
        }
        held.connections += 1;
        Some(Share { of: Arc::clone(self), client, what: Held { connections: 1, ..Held::default() } })
    }

    /// Room for a large body from this peer; none if that is too much now, for it or for all.
    pub(super) fn bytes(self: &Arc<Self>, peer: IpAddr, bytes: usize) -> Option<Share> {
        let client = client(peer);
        let mut book = self.book();
        let held = book.of.get(&client).copied().unwrap_or_default();
        if book.bytes + bytes > self.bytes || held.bytes + bytes > share_of_one(self.bytes) {
            return None;
        }
        book.bytes += bytes;
        book.of.entry(client).or_default().bytes += bytes;
        Some(Share { of: Arc::clone(self), client, what: Held { bytes, ..Held::default() } })
    }

    /// The share of a request that is being read, which grows with it.
    pub(super) fn pending(self: &Arc<Self>, peer: IpAddr) -> Share {
        Share { of: Arc::clone(self), client: client(peer), what: Held::default() }
    }
}

/// Goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    of: Arc<Shared>,
    client: IpAddr,
    what: Held,
}

impl Share {
    /// Whether so many bytes of an unfinished request may be buffered, for this address and for all of them.
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        let needed = bytes.saturating_sub(FREE_BYTES);
        if needed <= self.what.pending {
            return true;
        }
        let more = (needed - self.what.pending).next_multiple_of(STEP_BYTES);
        let mut book = self.of.book();
        let held = book.of.get(&self.client).copied().unwrap_or_default();
        if book.pending + more > self.of.pending || held.pending + more > share_of_one(self.of.pending) {
            return false;
        }
        book.pending += more;
        book.of.entry(self.client).or_default().pending += more;
        self.what.pending += more;
        true
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut book = self.of.book();
        book.bytes -= self.what.bytes;
        book.pending -= self.what.pending;
        if let Some(held) = book.of.get_mut(&self.client) {
            held.connections -= self.what.connections;
            held.bytes -= self.what.bytes;
            held.pending -= self.what.pending;
            if held.connections == 0 && held.bytes == 0 && held.pending == 0 {
                book.of.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Arc<Shared> {
        Shared::new(&Limits { connections: 4, large_bytes: 100, ..Limits::default() })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_leaves_room_for_others() {
        let shared = shared();
        let first = shared.connection(ip("10.0.0.1")).unwrap();
        let _second = shared.connection(ip("10.0.0.1")).unwrap();
        assert!(shared.connection(ip("10.0.0.1")).is_none());
        assert!(shared.connection(ip("::ffff:10.0.0.1")).is_none(), "the same in other words");
        assert!(shared.connection(ip("10.0.0.2")).is_some());
        drop(first);
        assert!(shared.connection(ip("10.0.0.1")).is_some());
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let shared = shared();
        let held = ["2001:db8::1", "2001:db8::2"].map(|peer| shared.connection(ip(peer)).unwrap());
        assert!(shared.connection(ip("2001:db8::3")).is_none());
        assert!(shared.connection(ip("2001:db8:0:1::1")).is_some());
        drop(held);
    }

    #[test]
    fn bytes_are_limited_for_one_and_for_all() {
        let shared = shared();
        let first = shared.bytes(ip("10.0.0.1"), 50).unwrap();
        assert!(shared.bytes(ip("10.0.0.1"), 1).is_none(), "has its half");
        let _second = shared.bytes(ip("10.0.0.2"), 50).unwrap();
        assert!(shared.bytes(ip("10.0.0.3"), 1).is_none(), "nothing is left");
        drop(first);
        assert!(shared.bytes(ip("10.0.0.3"), 50).is_some());
    }

    #[test]
    fn unfinished_requests_are_limited_for_one_address_and_for_all() {
        let limits = Limits { pending_bytes: 4 * STEP_BYTES, ..Limits::default() };
        let shared = Shared::new(&limits);
        let mut small = shared.pending(ip("10.0.0.1"));
        assert!(small.hold(FREE_BYTES), "small requests are not counted");
        assert!(shared.book().of.is_empty());
        let mut first = shared.pending(ip("10.0.0.1"));
        assert!(first.hold(FREE_BYTES + 1) && first.hold(FREE_BYTES + 2 * STEP_BYTES));
        assert!(first.hold(FREE_BYTES + STEP_BYTES), "a share does not shrink");
        assert!(!first.hold(FREE_BYTES + 2 * STEP_BYTES + 1), "one address has half");
        assert!(!small.hold(FREE_BYTES + 1), "on all of its connections");
        let mut second = shared.pending(ip("10.0.0.2"));
        assert!(second.hold(FREE_BYTES + 2 * STEP_BYTES));
        let mut third = shared.pending(ip("10.0.0.3"));
        assert!(!third.hold(FREE_BYTES + 1), "all of it is used");
        drop(first);
        assert!(third.hold(FREE_BYTES + 1) && small.hold(FREE_BYTES + 1));
        drop((small, second, third));
        assert!(shared.book().of.is_empty() && shared.book().pending == 0);
    }

    #[test]
    fn places_are_limited_for_one_and_for_all() {
        let places = Places::new(3, 2);
        let mut held: Vec<Place> =
            ["10.0.0.1", "10.0.0.1", "10.0.0.2"].map(|peer| places.take(ip(peer)).unwrap()).into();
        assert_eq!(places.take(ip("10.0.0.1")).unwrap_err(), NoPlace::Share);
        assert_eq!(places.take(ip("10.0.0.2")).unwrap_err(), NoPlace::Full);
        held.remove(0);
        held.push(places.take(ip("2001:db8::1")).unwrap());
        assert_eq!(places.take(ip("2001:db8::2")).unwrap_err(), NoPlace::Full);
        held.clear();
        assert!(places.taken().is_empty());
        let _one = [1, 2].map(|last| places.take(ip(&format!("2001:db8::{last}"))).unwrap());
        assert_eq!(places.take(ip("2001:db8::3")).unwrap_err(), NoPlace::Share);
    }

    #[test]
    fn who_holds_nothing_is_not_remembered() {
        let shared = shared();
        let held = (shared.connection(ip("10.0.0.1")), shared.bytes(ip("10.0.0.1"), 7));
        drop(held);
        assert!(shared.book().of.is_empty() && shared.book().bytes == 0);
    }
}
