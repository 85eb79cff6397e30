//! The firewall of the machine that we run on: nftables, or a dry run for it. A dry run looks at the kernel's rules where it
//! may; where it may not, as an ordinary user, it knows of none. It says what it would do, and does nothing.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::memory::{Memory, Settings};
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, DryRun, Error, Firewall, Nftables};

use super::trial::Trial;

#[derive(Debug)]
pub enum Here {
    Real(Nftables),
    Dry(DryRun<Nftables>),
    Blind(DryRun<Trial>),
}

impl Here {
    /// A dry run for `nftables` on `machine`.
    pub async fn dry(nftables: Nftables, machine: MachineNumber) -> Self {
        match nftables.observe(&BTreeSet::from([machine])).await {
            Ok(_) => Self::Dry(DryRun::new(nftables)),
            Err(error) => {
                tracing::debug!(%error, "dry run without a look at nftables");
                Self::Blind(DryRun::new(Trial::new(Memory::new(Settings::default()))))
            }
        }
    }
}

impl Firewall for Here {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        match self {
            Self::Real(firewall) => firewall.observe(machines).await,
            Self::Dry(firewall) => firewall.observe(machines).await,
            Self::Blind(firewall) => firewall.observe(machines).await,
        }
    }

    async fn apply(&self, machine: MachineNumber, change: &Change) -> Applied {
        match self {
            Self::Real(firewall) => firewall.apply(machine, change).await,
            Self::Dry(firewall) => firewall.apply(machine, change).await,
            Self::Blind(firewall) => firewall.apply(machine, change).await,
        }
    }

    fn rules_per_family(&self) -> Option<usize> {
        match self {
            Self::Real(firewall) => firewall.rules_per_family(),
            Self::Dry(firewall) => firewall.rules_per_family(),
            Self::Blind(firewall) => firewall.rules_per_family(),
        }
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        match self {
            Self::Real(firewall) => firewall.requests(),
            Self::Dry(firewall) => firewall.requests(),
            Self::Blind(firewall) => firewall.requests(),
        }
    }
}
