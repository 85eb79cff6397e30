//! What a tracker's door remembers of machines' credentials, so that a beat costs no read of the store and guessing costs few.
//! Pure: it is shown the time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::MachineId;

/// Looks that may be in vain in a second, whoever causes them. Machines that were heard before need none.
const VAIN_LOOKS: u32 = 100;

/// Machines that are remembered before those that there are not make room for others.
const MAX_BELIEVED: usize = 100_000;

/// What the store said of each machine, and when: its credential, or that it has none.
#[derive(Debug, Default)]
pub(super) struct Believed {
    machines: HashMap<MachineId, (Option<String>, Instant)>,
}

impl Believed {
    pub(super) fn get(&self, machine: MachineId) -> Option<(Option<String>, Instant)> {
        self.machines.get(&machine).cloned()
    }

    /// Anybody can ask for machines that there are not, and there are enough numbers for that: they never displace one that
    /// there is.
    pub(super) fn put(&mut self, machine: MachineId, credential: Option<String>, now: Instant) {
        if self.machines.len() >= MAX_BELIEVED && !self.machines.contains_key(&machine) {
            if credential.is_none() {
                return;
            }
            self.machines.retain(|_, (credential, _)| credential.is_some());
        }
        self.machines.insert(machine, (credential, now));
    }
}

/// Looks in vain in this second, with those that are under way and may be.
#[derive(Debug)]
pub(super) struct VainLooks {
    second: Instant,
    count: u32,
}

/// A look that counts until it is known to be right.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    second: Instant,
}

impl VainLooks {
    pub(super) fn new(now: Instant) -> Self {
        Self { second: now, count: 0 }
    }

    /// None if there were enough of them.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Look> {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        if self.count >= VAIN_LOOKS {
            return None;
        }
        self.count += 1;
        Some(Look { second: self.second })
    }

    /// It was not in vain.
    pub(super) fn was_right(&mut self, look: Look) {
        if look.second == self.second {
            self.count = self.count.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn looks_in_vain_are_counted_by_the_second() {
        let mut looks = VainLooks::new(Instant::now());
        let first = looks.begin(Instant::now()).unwrap();
        for _ in 1..VAIN_LOOKS {
            assert!(looks.begin(Instant::now()).is_some());
        }
        assert!(looks.begin(Instant::now()).is_none(), "also before any of them has its answer");
        looks.was_right(first);
        let second = looks.begin(Instant::now()).unwrap();
        assert!(looks.begin(Instant::now()).is_none());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!((0..VAIN_LOOKS).all(|_| looks.begin(Instant::now()).is_some()));
        looks.was_right(second);
        assert!(looks.begin(Instant::now()).is_none(), "that was another second's");
    }

    #[tokio::test(start_paused = true)]
    async fn machines_that_there_are_not_displace_nobody() {
        let mut believed = Believed::default();
        let (now, machine) = (Instant::now(), |number: usize| MachineId::new(u32::try_from(number).unwrap()));
        let good = |number: usize| Some(format!("secret-{number}"));
        (0..10).for_each(|number| believed.put(machine(number), good(number), now));
        (10..MAX_BELIEVED + 1000).for_each(|number| believed.put(machine(number), None, now));
        assert_eq!(believed.machines.len(), MAX_BELIEVED, "there is an end to it");
        assert!((0..10).all(|number| believed.get(machine(number)) == Some((good(number), now))));
        // Who comes then and is good has room; who is remembered may change.
        let late = MAX_BELIEVED + 5000;
        believed.put(machine(20), None, now);
        believed.put(machine(late), good(late), now);
        assert_eq!(believed.machines.len(), 11);
        assert!(
            [0, 9, late].iter().all(|number| believed.get(machine(*number)) == Some((good(*number), now)))
        );
    }
}
