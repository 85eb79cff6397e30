//! A cache of machines' credentials, so that most beats cause no read of the store, and a limit for
//! lookups that fail, so that guessing causes few. The time is an argument.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::MachineId;

/// Failed lookups per second, over all clients. Cached machines need none.
const MAX_FAILED_LOOKUPS: u32 = 100;

/// Cached machines. Beyond that, machines that do not exist are dropped.
const MAX_CACHED: usize = 100_000;

/// The credential of each machine, or that it has none, and when it was read.
#[derive(Debug, Default)]
pub(super) struct CredentialCache {
    machines: HashMap<MachineId, (Option<String>, Instant)>,
}

impl CredentialCache {
    pub(super) fn get(&self, machine: MachineId) -> Option<(Option<String>, Instant)> {
        self.machines.get(&machine).cloned()
    }

    /// Machines that do not exist never displace one that does, since any client can ask for them.
    pub(super) fn put(&mut self, machine: MachineId, credential: Option<String>, now: Instant) {
        if self.machines.len() >= MAX_CACHED && !self.machines.contains_key(&machine) {
            if credential.is_none() {
                return;
            }
            self.machines.retain(|_, (credential, _)| credential.is_some());
        }
        self.machines.insert(machine, (credential, now));
    }
}

/// Lookups in this second that failed or are still running.
#[derive(Debug)]
pub(super) struct FailedLookups {
    second: Instant,
    count: u32,
}

/// A lookup that counts as failed until it succeeds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lookup {
    second: Instant,
}

impl FailedLookups {
    pub(super) fn new(now: Instant) -> Self {
        Self { second: now, count: 0 }
    }

    /// `None` if the limit is reached.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Lookup> {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        if self.count >= MAX_FAILED_LOOKUPS {
            return None;
        }
        self.count += 1;
        Some(Lookup { second: self.second })
    }

    /// Records that a lookup succeeded.
    pub(super) fn succeeded(&mut self, lookup: Lookup) {
        if lookup.second == self.second {
            self.count = self.count.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failed_lookups_are_counted_per_second() {
        let mut lookups = FailedLookups::new(Instant::now());
        let first = lookups.begin(Instant::now()).unwrap();
        for _ in 1..MAX_FAILED_LOOKUPS {
            assert!(lookups.begin(Instant::now()).is_some());
        }
        assert!(lookups.begin(Instant::now()).is_none(), "also while they are running");
        lookups.succeeded(first);
        let second = lookups.begin(Instant::now()).unwrap();
        assert!(lookups.begin(Instant::now()).is_none());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!((0..MAX_FAILED_LOOKUPS).all(|_| lookups.begin(Instant::now()).is_some()));
        lookups.succeeded(second);
        assert!(lookups.begin(Instant::now()).is_none(), "it counted for another second");
    }

    #[tokio::test(start_paused = true)]
    async fn machines_that_do_not_exist_displace_no_others() {
        let mut cache = CredentialCache::default();
        let (now, machine) = (Instant::now(), |number: usize| MachineId::new(u32::try_from(number).unwrap()));
        let good = |number: usize| Some(format!("secret-{number}"));
        (0..10).for_each(|number| cache.put(machine(number), good(number), now));
        (10..MAX_CACHED + 1000).for_each(|number| cache.put(machine(number), None, now));
        assert_eq!(cache.machines.len(), MAX_CACHED, "the size is limited");
        assert!((0..10).all(|number| cache.get(machine(number)) == Some((good(number), now))));
        // A machine that exists still gets an entry, and entries can change.
        let late = MAX_CACHED + 5000;
        cache.put(machine(20), None, now);
        cache.put(machine(late), good(late), now);
        assert_eq!(cache.machines.len(), 11);
        assert!([0, 9, late].iter().all(|number| cache.get(machine(*number)) == Some((good(*number), now))));
    }
}
