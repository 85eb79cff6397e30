//! Limits for the memory of unfinished requests: bytes of large bodies and of all other buffers,
//! for all clients together and for one client address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Limits;
use crate::net::client_limits::{client_of, half_of};

/// Buffered bytes of an unfinished request that do not count towards the limit: most requests are
/// smaller.
pub(super) const FREE_BYTES: usize = 1024;

/// Buffers are counted in steps of this size.
const STEP_BYTES: usize = 4 * 1024;

#[derive(Debug, Clone, Copy, Default)]
struct Bytes {
    /// Of large bodies.
    large: usize,
    /// Of other unfinished requests.
    pending: usize,
}

#[derive(Debug, Default)]
struct Used {
    all: Bytes,
    /// Only clients that use any.
    clients: HashMap<IpAddr, Bytes>,
}

#[derive(Debug)]
pub(super) struct BufferLimits {
    most: Bytes,
    used: Mutex<Used>,
}

impl BufferLimits {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        let most = Bytes { large: limits.large_bytes, pending: limits.pending_bytes };
        Arc::new(Self { most, used: Mutex::default() })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves bytes for a large body; none if the limit of this client or of all is reached.
    pub(super) fn large(self: &Arc<Self>, peer: IpAddr, bytes: usize) -> Option<Reservation> {
        let client = client_of(peer);
        let mut used = self.used();
        let held = used.clients.get(&client).copied().unwrap_or_default();
        if used.all.large + bytes > self.most.large || held.large + bytes > half_of(self.most.large) {
            return None;
        }
        used.all.large += bytes;
        used.clients.entry(client).or_default().large += bytes;
        Some(Reservation { of: Arc::clone(self), client, bytes: Bytes { large: bytes, pending: 0 } })
    }

    /// Returns an empty reservation for a request, which grows with it.
    pub(super) fn pending(self: &Arc<Self>, peer: IpAddr) -> Reservation {
        Reservation { of: Arc::clone(self), client: client_of(peer), bytes: Bytes::default() }
    }
}

/// Bytes in use; dropping it frees them.
#[derive(Debug)]
pub(super) struct Reservation {
    of: Arc<BufferLimits>,
    client: IpAddr,
    bytes: Bytes,
}

impl Reservation {
    /// Grows to `bytes` of an unfinished request. Returns false if a limit is reached.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        let needed = bytes.saturating_sub(FREE_BYTES);
        if needed <= self.bytes.pending {
            return true;
        }
        let more = (needed - self.bytes.pending).next_multiple_of(STEP_BYTES);
        let mut used = self.of.used();
        let held = used.clients.get(&self.client).copied().unwrap_or_default();
        let most = self.of.most.pending;
        if used.all.pending + more > most || held.pending + more > half_of(most) {
            return false;
        }
        used.all.pending += more;
        used.clients.entry(self.client).or_default().pending += more;
        self.bytes.pending += more;
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut used = self.of.used();
        used.all.large -= self.bytes.large;
        used.all.pending -= self.bytes.pending;
        if let Some(held) = used.clients.get_mut(&self.client) {
            held.large -= self.bytes.large;
            held.pending -= self.bytes.pending;
            if held.large == 0 && held.pending == 0 {
                used.clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn large_bodies_are_limited_for_one_client_and_for_all() {
        let limits = BufferLimits::new(&Limits { large_bytes: 100, ..Limits::default() });
        let first = limits.large(ip("10.0.0.1"), 50).unwrap();
        assert!(limits.large(ip("10.0.0.1"), 1).is_none(), "one client has half");
        let second = limits.large(ip("10.0.0.2"), 50).unwrap();
        assert!(limits.large(ip("10.0.0.3"), 1).is_none(), "all of it is used");
        drop(first);
        assert!(limits.large(ip("10.0.0.3"), 50).is_some());
        drop(second);
        assert!(limits.used().clients.is_empty() && limits.used().all.large == 0);
    }

    #[test]
    fn unfinished_requests_are_limited_for_one_client_and_for_all() {
        let limits = BufferLimits::new(&Limits { pending_bytes: 4 * STEP_BYTES, ..Limits::default() });
        let mut small = limits.pending(ip("10.0.0.1"));
        assert!(small.grow_to(FREE_BYTES), "small requests are not counted");
        assert!(limits.used().clients.is_empty());
        let mut first = limits.pending(ip("10.0.0.1"));
        assert!(first.grow_to(FREE_BYTES + 1) && first.grow_to(FREE_BYTES + 2 * STEP_BYTES));
        assert!(first.grow_to(FREE_BYTES + STEP_BYTES), "a reservation does not shrink");
        assert!(!first.grow_to(FREE_BYTES + 2 * STEP_BYTES + 1), "one client has half");
        assert!(!small.grow_to(FREE_BYTES + 1), "on all of its connections");
        let mut second = limits.pending(ip("10.0.0.2"));
        assert!(second.grow_to(FREE_BYTES + 2 * STEP_BYTES));
        let mut third = limits.pending(ip("10.0.0.3"));
        assert!(!third.grow_to(FREE_BYTES + 1), "all of it is used");
        drop(first);
        assert!(third.grow_to(FREE_BYTES + 1) && small.grow_to(FREE_BYTES + 1));
        drop((small, second, third));
        assert!(limits.used().clients.is_empty() && limits.used().all.pending == 0);
    }
}
