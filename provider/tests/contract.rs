//! Checks the contract of drivers. That of nftables is checked in `nftables/`, which has network
//! namespaces.

mod suite;

use portcullis_provider::memory::{Memory, MemorySettings, Rewrite};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::{DryRun, memory::CallName};
use suite::{Bench, holds};

const MACHINE: MachineNumber = MachineNumber::new(2);
const ABSENT: MachineNumber = MachineNumber::new(3);

#[tokio::test]
async fn memory_fulfils_the_contract() {
    for rewrite in [Rewrite::Nothing, Rewrite::Spelling, Rewrite::Halves] {
        let firewall = Memory::new(MemorySettings { rewrite, ..MemorySettings::default() });
        firewall.add_group(MACHINE);
        holds(&Bench { firewall: firewall.clone(), machine: MACHINE, absent: ABSENT, keeps: true }).await;
        assert!(firewall.writes() > 0);
    }
}

#[tokio::test]
async fn dry_run_fulfils_the_contract_and_writes_nothing() {
    let memory = Memory::new(MemorySettings::default());
    memory.add_group(MACHINE);
    let firewall = DryRun::new(memory.clone());
    holds(&Bench { firewall, machine: MACHINE, absent: ABSENT, keeps: false }).await;
    assert_eq!(memory.writes(), 0);
    assert!(memory.calls_of(CallName::Observe) > 0);
}
