//! A timer wheel: which entries are due, at a cost that depends on the due entries only. Entries
//! are small numbers that the caller assigns and reuses. The wheel may return an entry too early,
//! if its deadline is more than one turn ahead; the caller checks the deadline and puts it back.
//! Pure.

/// Resolution of deadlines, and so how late an entry may be returned.
pub const STEP_MS: u64 = 16;

/// Slots of one turn; a turn is a little more than a minute.
const SLOTS: u64 = 4096;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    previous: u32,
    next: u32,
    /// `NONE` for an entry that is in no slot.
    slot: u32,
}

const UNLINKED: Link = Link { previous: NONE, next: NONE, slot: NONE };

#[derive(Debug, Clone)]
pub struct TimerWheel {
    heads: Box<[u32]>,
    links: Vec<Link>,
    /// The last step whose slot was emptied.
    done: u64,
}

impl TimerWheel {
    /// An empty wheel; no entry is due before `now`.
    pub fn new(now: u64) -> Self {
        Self { heads: vec![NONE; SLOTS as usize].into(), links: Vec::new(), done: now / STEP_MS }
    }

    /// Sets or moves the deadline of an entry.
    pub fn put(&mut self, entry: u32, deadline: u64) {
        let at = entry as usize;
        if self.links.len() <= at {
            self.links.resize(at + 1, UNLINKED);
        }
        let step = (deadline / STEP_MS + 1).max(self.done + 1);
        let slot = (step % SLOTS) as u32;
        if self.links[at].slot == slot {
            return;
        }
        self.remove(entry);
        let head = self.heads[slot as usize];
        self.links[at] = Link { previous: NONE, next: head, slot };
        if head != NONE {
            self.links[head as usize].previous = entry;
        }
        self.heads[slot as usize] = entry;
    }

    pub fn remove(&mut self, entry: u32) {
        let Some(link) = self.links.get(entry as usize).copied().filter(|link| link.slot != NONE) else {
            return;
        };
        match link.previous {
            NONE => self.heads[link.slot as usize] = link.next,
            previous => self.links[previous as usize].next = link.next,
        }
        if link.next != NONE {
            self.links[link.next as usize].previous = link.previous;
        }
        self.links[entry as usize] = UNLINKED;
    }

    /// Moves entries whose deadline may have passed by `until` into `due`.
    pub fn take_due(&mut self, until: u64, due: &mut Vec<u32>) {
        let last = until / STEP_MS;
        for step in self.steps(last) {
            let slot = (step % SLOTS) as usize;
            let mut entry = std::mem::replace(&mut self.heads[slot], NONE);
            while entry != NONE {
                due.push(entry);
                entry = std::mem::replace(&mut self.links[entry as usize], UNLINKED).next;
            }
        }
        self.done = self.done.max(last);
    }

    /// Whether [`TimerWheel::take_due`] would find anything.
    pub fn has_due(&self, until: u64) -> bool {
        self.steps(until / STEP_MS).any(|step| self.heads[(step % SLOTS) as usize] != NONE)
    }

    /// Each slot is visited once, even after a long pause.
    fn steps(&self, last: u64) -> std::ops::RangeInclusive<u64> {
        let first = (self.done + 1).max((last + 1).saturating_sub(SLOTS));
        first..=last
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn due(wheel: &mut TimerWheel, until: u64) -> Vec<u32> {
        let mut found = Vec::new();
        wheel.take_due(until, &mut found);
        found.sort_unstable();
        found
    }

    #[test]
    fn due_entry_is_returned_once() {
        let mut wheel = TimerWheel::new(1000);
        wheel.put(0, 2000);
        wheel.put(1, 3000);
        wheel.put(2, 2000);
        wheel.remove(2);
        assert!(!wheel.has_due(1999));
        assert!(due(&mut wheel, 1999).is_empty());
        assert_eq!(due(&mut wheel, 2000 + STEP_MS), [0]);
        assert!(due(&mut wheel, 2999).is_empty());
        wheel.put(1, 4000);
        assert!(due(&mut wheel, 3999).is_empty());
        assert!(wheel.has_due(5000));
        assert_eq!(due(&mut wheel, 5000), [1]);
        assert!(due(&mut wheel, 500_000).is_empty());
    }

    #[test]
    fn deadline_in_the_past_is_due_at_once() {
        let mut wheel = TimerWheel::new(10_000);
        wheel.put(7, 0);
        assert_eq!(due(&mut wheel, 10_000 + STEP_MS), [7]);
    }

    /// Random steps: an entry gets a deadline or loses it, and time passes.
    fn random_steps() -> impl Strategy<Value = Vec<(u32, Option<u64>, u64)>> {
        let step = (0u32..20, proptest::option::of(0u64..200_000), 0u64..40_000);
        proptest::collection::vec(step, 1..80)
    }

    proptest! {
        /// No entry is returned late or lost, and an entry that is returned early is about a turn
        /// ahead.
        #[test]
        fn wheel_behaves_like_a_sorted_list(steps in random_steps()) {
            let (mut wheel, mut list, mut now) = (TimerWheel::new(0), BTreeMap::new(), 0u64);
            for (entry, deadline, passed) in steps {
                match deadline {
                    Some(after) => {
                        wheel.put(entry, now + after);
                        list.insert(entry, now + after);
                    }
                    None => {
                        wheel.remove(entry);
                        list.remove(&entry);
                    }
                }
                now += passed;
                let (has, found) = (wheel.has_due(now), due(&mut wheel, now));
                prop_assert_eq!(has, !found.is_empty());
                for entry in found {
                    let deadline = list[&entry];
                    if deadline > now {
                        prop_assert!(deadline + 2 * STEP_MS >= now + SLOTS * STEP_MS - 40_000 - 2 * STEP_MS);
                        wheel.put(entry, deadline);
                    } else {
                        list.remove(&entry);
                    }
                }
                prop_assert!(list.values().all(|deadline| *deadline + STEP_MS > now));
            }
        }
    }
}
