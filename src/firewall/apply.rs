//! Carries plans out. Nothing is decided here: decisions belong in `plan.rs` and `wanted.rs`. Machines are independent of
//! each other; what failed is in the result.

use std::collections::BTreeMap;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Firewall};

use tokio::time::Instant;

use crate::model::MachineId;
use crate::store::election::Leadership;

/// Machines that are changed at the same time: enough to hide a cloud's latency, few enough for its rate limits.
const AT_ONCE: usize = 8;

/// What became of each machine's change; `None` for one that was not begun, because we may no longer act.
pub type Outcomes = BTreeMap<MachineId, Option<Applied>>;

pub async fn apply<F: Firewall>(
    firewall: &F,
    changes: &BTreeMap<MachineId, Change>,
    lead: &Leadership,
) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut waiting = changes.iter();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < AT_ONCE
            && let Some((machine, change)) = waiting.next()
        {
            running.push(apply_one(firewall, *machine, change, lead));
        }
        match running.next().await {
            Some((machine, outcome)) => drop(outcomes.insert(machine, outcome)),
            None => return outcomes,
        }
    }
}

async fn apply_one<F: Firewall>(
    firewall: &F,
    machine: MachineId,
    change: &Change,
    lead: &Leadership,
) -> (MachineId, Option<Applied>) {
    if !lead.may_act(Instant::now()) {
        return (machine, None);
    }
    // Boxed: a cloud's futures nest deeper than the compiler follows, in a build from nothing before all others.
    (machine, Some(Box::pin(firewall.apply(number(machine), change)).await))
}

/// The machine as the provider knows it.
pub fn number(machine: MachineId) -> MachineNumber {
    MachineNumber::new(machine.number())
}
