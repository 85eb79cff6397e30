//! Slots for connections and other lasting uses, limited for all clients together and for one
//! client address, so that one client cannot exclude the others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Returns the part of a limit that one client address may use. More would leave too little for the
/// others; less would be too little where a whole site has one translated address. Loopback is no
/// exception: a relay on the same machine can have a defect, too.
pub(super) fn half_of(all: usize) -> usize {
    all.div_ceil(2)
}

/// Returns the address that stands for a client. A client with IPv6 has a network of 2^64
/// addresses.
pub(super) fn client_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// A number of slots, of which one client gets at most some.
#[derive(Debug)]
pub struct Slots {
    all: usize,
    per_client: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// Only clients with at least one slot.
    clients: HashMap<IpAddr, usize>,
}

/// No slot is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSlot {
    /// For any client.
    Full,
    /// For this client, which has its share.
    Share,
}

impl Slots {
    pub fn new(all: usize, per_client: usize) -> Arc<Self> {
        Arc::new(Self { all, per_client, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// If no slot is free for this peer.
    pub fn take(self: &Arc<Self>, peer: IpAddr) -> Result<Slot, NoSlot> {
        let client = client_of(peer);
        let mut taken = self.taken();
        if taken.clients.get(&client).is_some_and(|count| *count >= self.per_client) {
            return Err(NoSlot::Share);
        }
        if taken.all >= self.all {
            return Err(NoSlot::Full);
        }
        taken.all += 1;
        *taken.clients.entry(client).or_default() += 1;
        Ok(Slot { of: Arc::clone(self), client })
    }
}

/// A slot in use; dropping it frees it.
#[derive(Debug)]
pub struct Slot {
    of: Arc<Slots>,
    client: IpAddr,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.of.taken();
        taken.all -= 1;
        if let Some(count) = taken.clients.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                taken.clients.remove(&self.client);
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
    fn slots_are_limited_for_one_client_and_for_all() {
        let slots = Slots::new(3, 2);
        let mut held: Vec<Slot> =
            ["10.0.0.1", "10.0.0.1", "10.0.0.2"].map(|peer| slots.take(ip(peer)).unwrap()).into();
        assert_eq!(slots.take(ip("10.0.0.1")).unwrap_err(), NoSlot::Share);
        assert_eq!(slots.take(ip("::ffff:10.0.0.1")).unwrap_err(), NoSlot::Share, "the same address");
        assert_eq!(slots.take(ip("10.0.0.2")).unwrap_err(), NoSlot::Full);
        held.remove(0);
        held.push(slots.take(ip("2001:db8::1")).unwrap());
        assert_eq!(slots.take(ip("2001:db8::2")).unwrap_err(), NoSlot::Full);
        held.clear();
        assert!(slots.taken().clients.is_empty() && slots.taken().all == 0);
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        let slots = Slots::new(4, 2);
        let _held = ["2001:db8::1", "2001:db8::2"].map(|peer| slots.take(ip(peer)).unwrap());
        assert_eq!(slots.take(ip("2001:db8::3")).unwrap_err(), NoSlot::Share);
        assert!(slots.take(ip("2001:db8:0:1::1")).is_ok());
    }
}
