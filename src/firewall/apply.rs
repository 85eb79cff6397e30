//! Carries plans out. Nothing is decided here: decisions belong in `plan.rs` and `wanted.rs`. Machines are independent of
//! each other; what failed is in the result.

use std::collections::BTreeMap;

use futures_util::stream::{self, StreamExt as _};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Firewall};

use crate::model::MachineId;

/// Machines that are changed at the same time: enough to hide a cloud's latency, few enough for its rate limits.
const AT_ONCE: usize = 8;

/// What became of each machine's change; `None` for one that was not begun, because we may no longer act.
pub type Outcomes = BTreeMap<MachineId, Option<Applied>>;

pub async fn apply<F: Firewall>(
    firewall: &F,
    changes: &BTreeMap<MachineId, Change>,
    may_act: impl Fn() -> bool,
) -> Outcomes {
    let may_act = &may_act;
    stream::iter(changes)
        .map(|(&machine, change)| async move {
            if !may_act() {
                return (machine, None);
            }
            (machine, Some(firewall.apply(number(machine), change).await))
        })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await
}

/// The machine as the provider knows it.
pub fn number(machine: MachineId) -> MachineNumber {
    MachineNumber::new(machine.number())
}
