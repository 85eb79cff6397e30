//! A firewall for experiments: stores rules for every machine that is queried, in the memory of
//! this process only. It makes no decisions and opens no real ports; its rules are lost when the
//! process ends.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::memory::Memory;
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;

#[derive(Debug)]
pub struct ScratchProvider(Memory);

impl ScratchProvider {
    pub fn new(memory: Memory) -> Self {
        Self(memory)
    }
}

impl Firewall for ScratchProvider {
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
