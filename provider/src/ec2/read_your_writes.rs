//! Recent writes that a describe may not show yet. The time is an argument.
//!
//! A describe may lag behind a write by seconds. Without this overlay a pass would open a rule
//! twice, or treat a group that it has just created as missing. An entry is kept only briefly:
//! after a describe shows the write, or was sent after the write's consistency window, only EC2's
//! reply counts, so that changes by other clients are not hidden.

use crate::provider::{GroupId, MachineNumber};
use crate::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The consistency window of a rule: a describe that was sent this long after a write shows it. If
/// EC2 takes longer, the write is sent again and EC2 replies that the rule exists already, which
/// costs one request; a longer window would hide that another client removed a rule.
const WINDOW: Duration = Duration::from_secs(3);
/// How long a new group may be missing from a describe.
const MEMORY: Duration = Duration::from_secs(30);
/// Limit of remembered groups and writes.
const GROUPS_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct RecentWrites {
    writes: BTreeMap<GroupId, Writes>,
    made: BTreeMap<MachineNumber, Made>,
}

#[derive(Debug)]
struct Writes {
    /// `true` for an opened rule, `false` for a closed one.
    rules: BTreeMap<Rule, (bool, Instant)>,
    latest: Instant,
}

#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) group: GroupId,
    pub(super) vpc: String,
    at: Instant,
}

impl RecentWrites {
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

    /// Returns the machine's group if it was created so recently that a describe may not show it.
    pub(super) fn made_for(&self, machine: MachineNumber, now: Instant) -> Option<&Made> {
        self.made.get(&machine).filter(|made| now.saturating_duration_since(made.at) < MEMORY)
    }

    /// Removes the entry of the machine's group after a describe has shown it.
    pub(super) fn is_shown(&mut self, machine: MachineNumber) {
        self.made.remove(&machine);
    }

    /// Drops the writes to a group after an error, so that only EC2's replies count.
    pub(super) fn discard(&mut self, group: &GroupId) {
        self.writes.remove(group);
    }

    /// Drops all entries of a deleted group.
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

    fn shown(
        recent_writes: &mut RecentWrites,
        group: &GroupId,
        reader: &[u16],
        now: Instant,
    ) -> BTreeSet<Rule> {
        let mut owned = rules(reader);
        recent_writes.overlay(group, &mut owned, now);
        owned
    }

    #[test]
    fn own_writes_count_until_a_describe_shows_them() {
        let (mut recent_writes, group, start) =
            (RecentWrites::default(), GroupId::new("sg-1"), Instant::now());
        recent_writes.wrote(&group, &rules(&[80]), &rules(&[22]), start);
        assert_eq!(shown(&mut recent_writes, &group, &[22, 443], start), rules(&[80, 443]), "late");
        assert_eq!(shown(&mut recent_writes, &group, &[22, 80], start), rules(&[80]), "partly shown");
        assert_eq!(
            shown(&mut recent_writes, &group, &[], start),
            rules(&[]),
            "a shown write no longer counts"
        );
        assert!(recent_writes.writes.is_empty());
    }

    #[test]
    fn describe_after_the_window_shows_changes_by_others() {
        let second = Duration::from_secs(1);
        // If a rule is revoked by hand before the first describe, the second one shows it as
        // missing at a resync of 2 s.
        for (sent_after, seen) in [(0, [80]), (2, [80]), (4, [22]), (30, [22])] {
            let (mut recent_writes, group, start) =
                (RecentWrites::default(), GroupId::new("sg-1"), Instant::now());
            recent_writes.wrote(&group, &rules(&[80]), &rules(&[22]), start);
            let sent = start + sent_after * second;
            assert_eq!(
                shown(&mut recent_writes, &group, &[22], sent),
                rules(&seen),
                "sent after {sent_after} s"
            );
            assert_eq!(recent_writes.writes.is_empty(), seen == [22]);
        }
    }

    #[test]
    fn describe_sent_before_the_write_does_not_hide_it() {
        let (mut recent_writes, group, sent) =
            (RecentWrites::default(), GroupId::new("sg-1"), Instant::now());
        recent_writes.wrote(&group, &rules(&[80]), &rules(&[]), sent + WINDOW);
        assert_eq!(shown(&mut recent_writes, &group, &[], sent), rules(&[80]), "even if its reply is late");
    }

    #[test]
    fn last_write_wins() {
        let (mut recent_writes, group, start) =
            (RecentWrites::default(), GroupId::new("sg-1"), Instant::now());
        recent_writes.wrote(&group, &rules(&[80]), &rules(&[]), start);
        recent_writes.wrote(&group, &rules(&[]), &rules(&[80]), start);
        assert_eq!(shown(&mut recent_writes, &group, &[80], start), rules(&[]));
        assert_eq!(
            shown(&mut recent_writes, &GroupId::new("sg-2"), &[80], start),
            rules(&[80]),
            "of that group only"
        );
    }

    #[test]
    fn new_groups_are_remembered() {
        let (mut recent_writes, group, start) =
            (RecentWrites::default(), GroupId::new("sg-1"), Instant::now());
        let machine = MachineNumber::new(1);
        recent_writes.made(machine, &group, "vpc-1", start);
        assert_eq!(recent_writes.made_for(machine, start).map(|made| &made.group), Some(&group));
        assert!(recent_writes.made_for(machine, start + MEMORY).is_none());
        recent_writes.forget(&group);
        assert!(recent_writes.made_for(machine, start).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let (mut recent_writes, start) = (RecentWrites::default(), Instant::now());
        for n in 0..=u32::try_from(GROUPS_MAX).unwrap() {
            let group = GroupId::new(format!("sg-{n}"));
            recent_writes.wrote(&group, &rules(&[80]), &rules(&[]), start);
            recent_writes.made(MachineNumber::new(n), &group, "vpc-1", start);
        }
        assert!(recent_writes.writes.len() <= GROUPS_MAX && recent_writes.made.len() <= GROUPS_MAX);
    }
}
