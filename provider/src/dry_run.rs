//! A provider that looks and does not touch: it reads through another one, and every change ends in
//! [`Error::DryRun`], which says what it would have been. It has no machines to launch or end, so whoever runs on it cannot.

use crate::error::Error;
use crate::provider::{Applied, Firewall, MachineNumber, Seen};
use crate::rule::{Change, Rule};
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// More rules than this are counted and not named.
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
        // Nothing is put right here, so nothing is to be put right: a change that is empty would be one that was made.
        for machine in seen.values_mut() {
            if let Seen::Present(rules) = machine {
                rules.amiss.clear();
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

    fn at_once(&self) -> bool {
        self.inner.at_once()
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

/// A change in words, as in "would open 80/tcp from ::/0"; empty if there is nothing to change.
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
    use crate::memory::{Memory, Settings};
    use crate::rule::{Cidr, PortRange, Protocol};

    fn rules(ports: std::ops::Range<u16>) -> BTreeSet<Rule> {
        let rule = |port| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        ports.map(rule).collect()
    }

    fn in_time() -> Instant {
        Instant::now() + std::time::Duration::from_secs(60)
    }

    #[tokio::test]
    async fn it_never_claims_to_have_done_anything() {
        let memory = Memory::new(Settings::default());
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
    fn a_change_is_said_in_words() {
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
