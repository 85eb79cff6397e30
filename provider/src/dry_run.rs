//! A provider that only reads: it observes through another provider, and every change fails with
//! [`Error::DryRun`], which describes the change. It does not implement [`crate::Machines`], so a
//! dry run cannot launch or terminate instances.

use crate::error::Error;
use crate::provider::{Applied, Firewall, MachineNumber, Seen};
use crate::rule::{Change, Rule};
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// Number of rules that a description lists; further ones are only counted.
const NAMED_MAX: usize = 10;

#[derive(Debug)]
pub struct DryRun<F> {
    inner: F,
}

impl<F: Firewall> DryRun<F> {
    pub fn new(inner: F) -> Self {
        Self { inner }
    }
}

impl<F: Firewall> Firewall for DryRun<F> {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        let mut seen = self.inner.observe(machines).await?;
        // A dry run repairs no drift, so it must not request a repair: an empty change reports
        // success.
        for machine in seen.values_mut() {
            if let Seen::Present(rules) = machine {
                rules.drift.clear();
            }
        }
        Ok(seen)
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, _until: Instant) -> Applied {
        let not_done = |verb, rules: &BTreeSet<Rule>| {
            if rules.is_empty() {
                return Ok(());
            }
            Err(Error::DryRun { what: machine.into(), would: format!("{verb} {}", named(rules)) })
        };
        Applied { opened: not_done("open", &change.open), closed: not_done("close", &change.close) }
    }

    fn is_atomic(&self) -> bool {
        self.inner.is_atomic()
    }

    fn is_dry_run(&self) -> bool {
        true
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.inner.rules_per_family()
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        self.inner.requests()
    }
}

/// Describes a change, as in "would open 80/tcp from ::/0"; empty for an empty change.
pub fn would(open: &BTreeSet<Rule>, close: &BTreeSet<Rule>) -> String {
    let halves = [("open", open), ("close", close)].into_iter().filter(|(_, rules)| !rules.is_empty());
    halves.map(|(verb, rules)| format!("would {verb} {}", named(rules))).collect::<Vec<_>>().join("; ")
}

fn named(rules: &BTreeSet<Rule>) -> String {
    let mut names: Vec<String> = rules.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    if rules.len() > NAMED_MAX {
        names.push(format!("{} more", rules.len() - NAMED_MAX));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, MemorySettings};
    use crate::rule::{Cidr, PortRange, Protocol};

    fn rules(ports: std::ops::Range<u16>) -> BTreeSet<Rule> {
        let rule = |port| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        ports.map(rule).collect()
    }

    fn in_time() -> Instant {
        Instant::now() + std::time::Duration::from_secs(60)
    }

    #[tokio::test]
    async fn every_change_fails_as_a_dry_run() {
        let memory = Memory::new(MemorySettings::default());
        let (dry, machine) = (DryRun::new(memory.clone()), MachineNumber::new(2));
        memory.add_group(machine);
        let change = Change { open: rules(80..82), close: rules(1000..1012) };
        let applied = dry.apply(machine, &change, in_time()).await;
        assert_eq!(
            applied.opened.unwrap_err().to_string(),
            "dry run: machine 2 is left as it is; would open 80/tcp from 0.0.0.0/0, 81/tcp from 0.0.0.0/0"
        );
        assert!(applied.closed.unwrap_err().to_string().ends_with(", 2 more"));
        assert_eq!(dry.apply(machine, &Change::default(), in_time()).await, Applied::as_one(Ok(())));
        assert_eq!(memory.writes(), 0);
        assert!(dry.is_dry_run());
    }

    #[test]
    fn changes_are_described() {
        let none = BTreeSet::new();
        for (open, close, words) in [
            (rules(80..81), none.clone(), "would open 80/tcp from 0.0.0.0/0"),
            (none.clone(), rules(81..82), "would close 81/tcp from 0.0.0.0/0"),
            (
                rules(80..81),
                rules(81..82),
                "would open 80/tcp from 0.0.0.0/0; would close 81/tcp from 0.0.0.0/0",
            ),
            (none.clone(), none.clone(), ""),
        ] {
            assert_eq!(would(&open, &close), words);
        }
        assert!(would(&rules(1000..1012), &none).ends_with(", 2 more"));
    }
}
