//! A firewall for trying things out: a place for rules on every machine that is asked about, in this process alone. It
//! decides nothing and opens nothing; what it holds ends with the process.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::memory::Memory;
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;

#[derive(Debug)]
pub struct Trial(Memory);

impl Trial {
    pub fn new(memory: Memory) -> Self {
        Self(memory)
    }
}

impl Firewall for Trial {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        for machine in machines {
            self.0.add_group(*machine);
        }
        self.0.observe(machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        self.0.apply(machine, change, until).await
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.0.rules_per_family()
    }
}
