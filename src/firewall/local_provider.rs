//! The firewall of the machine that this process runs on: nftables, or a dry run for it. A dry run
//! reads the kernel's rules if it has the permission; as an ordinary user it assumes that there are
//! none. It describes changes and makes none.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::memory::{Memory, MemorySettings};
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, DryRun, Error, Firewall, Nftables};
use tokio::time::Instant;

use super::scratch_provider::ScratchProvider;

#[derive(Debug)]
pub enum LocalProvider {
    Real(Nftables),
    Dry(DryRun<ReadIfPermitted<Nftables>>),
}

impl LocalProvider {
    /// A dry run for `nftables`.
    pub fn dry(nftables: Nftables) -> Self {
        Self::Dry(DryRun::new(ReadIfPermitted::new(nftables)))
    }
}

impl Firewall for LocalProvider {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        match self {
            Self::Real(firewall) => firewall.observe(machines).await,
            Self::Dry(firewall) => firewall.observe(machines).await,
        }
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        match self {
            Self::Real(firewall) => firewall.apply(machine, change, until).await,
            Self::Dry(firewall) => firewall.apply(machine, change, until).await,
        }
    }

    fn is_atomic(&self) -> bool {
        match self {
            Self::Real(firewall) => firewall.is_atomic(),
            Self::Dry(firewall) => firewall.is_atomic(),
        }
    }

    fn is_dry_run(&self) -> bool {
        match self {
            Self::Real(firewall) => firewall.is_dry_run(),
            Self::Dry(firewall) => firewall.is_dry_run(),
        }
    }

    fn rules_per_family(&self) -> Option<usize> {
        match self {
            Self::Real(firewall) => firewall.rules_per_family(),
            Self::Dry(firewall) => firewall.rules_per_family(),
        }
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        match self {
            Self::Real(firewall) => firewall.requests(),
            Self::Dry(firewall) => firewall.requests(),
        }
    }
}

/// Shows no rules if reading them is not permitted. Every read is attempted again, because
/// permissions may change; a read that fails for another reason is an error.
#[derive(Debug)]
pub struct ReadIfPermitted<F> {
    inner: F,
    no_rules: ScratchProvider,
}

impl<F> ReadIfPermitted<F> {
    fn new(inner: F) -> Self {
        Self { inner, no_rules: ScratchProvider::new(Memory::new(MemorySettings::default())) }
    }
}

impl<F: Firewall> Firewall for ReadIfPermitted<F> {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        match self.inner.observe(machines).await {
            Err(error @ (Error::Denied { .. } | Error::Unusable { .. })) => {
                tracing::debug!(%error, "nftables not readable; dry run assumes no rules");
                self.no_rules.observe(machines).await
            }
            seen => seen,
        }
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        self.inner.apply(machine, change, until).await
    }

    fn is_atomic(&self) -> bool {
        self.inner.is_atomic()
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.inner.rules_per_family()
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        self.inner.requests()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::Subject;
    use portcullis_provider::memory::{Failure, Fault};
    use portcullis_provider::rule::{Cidr, PortRange, Protocol, Rule};

    #[tokio::test]
    async fn every_read_is_attempted_again() {
        let (machine, memory) = (MachineNumber::new(0), Memory::new(MemorySettings::default()));
        let rule = Rule::new(PortRange::single(80, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        memory.add_group(machine);
        memory.tamper(machine, |rules| _ = rules.owned.insert(rule));
        let (what, reason) = (Subject::Machine(machine), "no".to_owned());
        let busy = Error::Unavailable { what: what.clone(), reason: reason.clone() };
        let denied = Error::Denied { what, reason };
        memory.fail_at(1, Fault::Before(Failure::Error(busy.clone())));
        memory.fail_at(2, Fault::Before(Failure::Error(denied)));
        let dry = DryRun::new(ReadIfPermitted::new(memory));
        let read = async || -> Result<BTreeSet<Rule>, Error> {
            let seen = dry.observe(&BTreeSet::from([machine])).await?;
            let Seen::Present(rules) = &seen[&machine] else { panic!("{seen:?}") };
            Ok(rules.owned.clone())
        };
        assert_eq!(read().await, Err(busy), "only missing permission counts as no rules");
        assert_eq!(read().await, Ok(BTreeSet::new()), "no permission, no rules");
        assert_eq!(read().await, Ok(BTreeSet::from([rule])), "permission was granted");
    }
}
