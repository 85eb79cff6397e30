//! What we wrote a moment ago, for as long as EC2's readers may not know of it. Pure: takes `now`.
//!
//! A describe may lag behind a write by seconds. Without this memory a pass would open again what it has just opened,
//! or take a group for missing that it has just made. It is short: once a reader has shown a write, or the time is up,
//! what EC2 says counts alone, so that a change by somebody else is not hidden.

use crate::provider::{GroupId, MachineNumber};
use crate::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long EC2's readers may lag.
const MEMORY: Duration = Duration::from_secs(30);
/// Groups and writes that are kept at most; beyond that the oldest knowledge is not worth the room.
const GROUPS_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Recent {
    writes: BTreeMap<GroupId, Writes>,
    made: BTreeMap<MachineNumber, Made>,
}

#[derive(Debug)]
struct Writes {
    /// `true` for opened.
    rules: BTreeMap<Rule, (bool, Instant)>,
    latest: Instant,
}

#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) group: GroupId,
    pub(super) vpc: String,
    at: Instant,
}

impl Recent {
    pub(super) fn wrote(
        &mut self,
        group: &GroupId,
        open: &BTreeSet<Rule>,
        close: &BTreeSet<Rule>,
        now: Instant,
    ) {
        self.forget_old(now);
        let writes = self.writes.entry(group.clone());
        let writes = writes.or_insert_with(|| Writes { rules: BTreeMap::new(), latest: now });
        writes.latest = now;
        writes.rules.extend(open.iter().map(|rule| (*rule, (true, now))));
        writes.rules.extend(close.iter().map(|rule| (*rule, (false, now))));
    }

    /// Puts our own last writes over what a reader shows of a group, and forgets those that it knows of.
    pub(super) fn overlay(&mut self, group: &GroupId, owned: &mut BTreeSet<Rule>, now: Instant) {
        let Some(writes) = self.writes.get_mut(group) else { return };
        writes.rules.retain(|rule, (open, at)| {
            now.saturating_duration_since(*at) < MEMORY && owned.contains(rule) != *open
        });
        for (rule, (open, _)) in &writes.rules {
            if *open {
                owned.insert(*rule);
            } else {
                owned.remove(rule);
            }
        }
        if writes.rules.is_empty() {
            self.writes.remove(group);
        }
    }

    pub(super) fn made(&mut self, machine: MachineNumber, group: &GroupId, vpc: &str, now: Instant) {
        self.forget_old(now);
        self.made.insert(machine, Made { group: group.clone(), vpc: vpc.to_owned(), at: now });
    }

    /// The group that we made for the machine a moment ago, if a reader that does not show it may be late.
    pub(super) fn made_for(&self, machine: MachineNumber, now: Instant) -> Option<&Made> {
        self.made.get(&machine).filter(|made| now.saturating_duration_since(made.at) < MEMORY)
    }

    /// A reader has shown the machine's group.
    pub(super) fn is_shown(&mut self, machine: MachineNumber) {
        self.made.remove(&machine);
    }

    /// Something went wrong with the group: what EC2 says of it counts from now on.
    pub(super) fn doubt(&mut self, group: &GroupId) {
        self.writes.remove(group);
    }

    /// The group is gone, and what we knew of it.
    pub(super) fn forget(&mut self, group: &GroupId) {
        self.writes.remove(group);
        self.made.retain(|_, made| made.group != *group);
    }

    fn forget_old(&mut self, now: Instant) {
        if self.writes.len() >= GROUPS_MAX {
            self.writes.retain(|_, writes| now.saturating_duration_since(writes.latest) < MEMORY);
        }
        if self.writes.len() >= GROUPS_MAX {
            self.writes.clear();
        }
        if self.made.len() >= GROUPS_MAX {
            self.made.retain(|_, made| now.saturating_duration_since(made.at) < MEMORY);
        }
        if self.made.len() >= GROUPS_MAX {
            self.made.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::{Cidr, PortRange, Protocol};

    fn rules(ports: &[u16]) -> BTreeSet<Rule> {
        let rule = |&port| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        ports.iter().map(rule).collect()
    }

    fn shown(recent: &mut Recent, group: &GroupId, reader: &[u16], now: Instant) -> BTreeSet<Rule> {
        let mut owned = rules(reader);
        recent.overlay(group, &mut owned, now);
        owned
    }

    #[test]
    fn our_writes_count_until_a_reader_knows_them() {
        let (mut recent, group, start) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
        recent.wrote(&group, &rules(&[80]), &rules(&[22]), start);
        assert_eq!(shown(&mut recent, &group, &[22, 443], start), rules(&[80, 443]), "late");
        assert_eq!(shown(&mut recent, &group, &[22, 80], start), rules(&[80]), "half known");
        assert_eq!(shown(&mut recent, &group, &[], start), rules(&[]), "what was shown once may go again");
        assert!(recent.writes.is_empty());
    }

    #[test]
    fn and_no_longer_than_readers_lag() {
        let (mut recent, group, start) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
        recent.wrote(&group, &rules(&[80]), &rules(&[22]), start);
        let later = start + MEMORY;
        assert_eq!(shown(&mut recent, &group, &[22], later), rules(&[22]), "somebody else did this");
        assert!(recent.writes.is_empty());
    }

    #[test]
    fn the_last_write_wins() {
        let (mut recent, group, start) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
        recent.wrote(&group, &rules(&[80]), &rules(&[]), start);
        recent.wrote(&group, &rules(&[]), &rules(&[80]), start);
        assert_eq!(shown(&mut recent, &group, &[80], start), rules(&[]));
        assert_eq!(
            shown(&mut recent, &GroupId::new("sg-2"), &[80], start),
            rules(&[80]),
            "of that group only"
        );
    }

    #[test]
    fn groups_just_made_are_known() {
        let (mut recent, group, start) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
        let machine = MachineNumber::new(1);
        recent.made(machine, &group, "vpc-1", start);
        assert_eq!(recent.made_for(machine, start).map(|made| &made.group), Some(&group));
        assert!(recent.made_for(machine, start + MEMORY).is_none());
        recent.forget(&group);
        assert!(recent.made_for(machine, start).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        for n in 0..=u32::try_from(GROUPS_MAX).unwrap() {
            let group = GroupId::new(format!("sg-{n}"));
            recent.wrote(&group, &rules(&[80]), &rules(&[]), start);
            recent.made(MachineNumber::new(n), &group, "vpc-1", start);
        }
        assert!(recent.writes.len() <= GROUPS_MAX && recent.made.len() <= GROUPS_MAX);
    }
}
