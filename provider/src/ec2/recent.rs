//! What we wrote a moment ago, for as long as EC2's readers may not know of it. Pure: takes `now`.
//!
//! A describe may lag behind a write by seconds. Without this memory a pass would open again what
//! it has just opened, or treat a group that it has just made as missing. An entry is kept only
//! briefly: once a describe shows the write, or was sent after the write's consistency window, only
//! EC2's reply counts, so that changes by other clients are not hidden.

use crate::provider::{GroupId, MachineNumber};
use crate::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The consistency window of a rule: a describe that was sent this long after a write shows it. If
/// EC2 takes longer, the write is sent again and EC2 replies that the rule exists already, which
/// costs one request; a longer window would hide that another client removed a rule.
const WINDOW: Duration = Duration::from_secs(3);
/// How long a group that was just made may be missing from a describe.
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

    /// Applies our own last writes to the rules that a describe sent at `sent` shows for a group.
    /// Drops the writes that the describe shows, and those whose consistency window was over when
    /// it was sent.
    pub(super) fn overlay(&mut self, group: &GroupId, owned: &mut BTreeSet<Rule>, sent: Instant) {
        let Some(writes) = self.writes.get_mut(group) else { return };
        writes.rules.retain(|rule, (open, at)| {
            sent.saturating_duration_since(*at) < WINDOW && owned.contains(rule) != *open
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
            self.writes.retain(|_, writes| now.saturating_duration_since(writes.latest) < WINDOW);
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
    fn a_describe_sent_after_the_window_shows_what_others_changed() {
        let second = Duration::from_secs(1);
        // If a rule is revoked by hand before the first describe, the second one shows it as
        // missing at a resync of 2 s.
        for (sent_after, seen) in [(0, [80]), (2, [80]), (4, [22]), (30, [22])] {
            let (mut recent, group, start) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
            recent.wrote(&group, &rules(&[80]), &rules(&[22]), start);
            let sent = start + sent_after * second;
            assert_eq!(shown(&mut recent, &group, &[22], sent), rules(&seen), "sent after {sent_after} s");
            assert_eq!(recent.writes.is_empty(), seen == [22]);
        }
    }

    #[test]
    fn a_describe_sent_before_the_write_does_not_hide_it() {
        let (mut recent, group, sent) = (Recent::default(), GroupId::new("sg-1"), Instant::now());
        recent.wrote(&group, &rules(&[80]), &rules(&[]), sent + WINDOW);
        assert_eq!(shown(&mut recent, &group, &[], sent), rules(&[80]), "however late its answer comes");
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
