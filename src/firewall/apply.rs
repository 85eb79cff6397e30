//! Carries plans out. Nothing is decided here: decisions belong in `plan.rs` and `wanted.rs`. Machines are independent of
//! each other; what failed is in the result.
//!
//! Closing and opening each have a lane of their own, so that an open that hangs, or waits for its turn at the provider, is
//! never in the way of a close. A machine's own open comes after its close has ended: that makes room for it, and takes
//! nothing away that it is to replace, which `plan.rs` sees to.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;

use crate::model::MachineId;
use crate::store::election::Leadership;

/// Machines that are changed at the same time in each lane: enough to hide a cloud's latency, few enough for its rate
/// limits.
const AT_ONCE: usize = 8;

/// What became of each machine's change. What there was no time to begin, because we may no longer act, is
/// [`Error::NotBegun`].
pub type Outcomes = BTreeMap<MachineId, Applied>;

/// All of a machine's change, or the half of it that is one request.
type Part = (MachineId, Change);

/// Those of `first` come first, in their order.
pub async fn apply<F: Firewall>(
    firewall: &F,
    changes: &BTreeMap<MachineId, Change>,
    first: &[MachineId],
    lead: &Leadership,
) -> Outcomes {
    let mut lanes = Lanes::new(changes, first, firewall.at_once());
    let mut outcomes = Outcomes::new();
    let (mut closes, mut opens) = (FuturesUnordered::new(), FuturesUnordered::new());
    loop {
        while closes.len() < AT_ONCE
            && let Some(part) = lanes.closing.pop_front()
        {
            closes.push(carry_out(firewall, part, lead));
        }
        while opens.len() < AT_ONCE
            && let Some(part) = lanes.opening.pop_front()
        {
            opens.push(carry_out(firewall, part, lead));
        }
        let (machine, change, applied) = tokio::select! {
            biased;
            Some(closed) = closes.next() => closed,
            Some(opened) = opens.next() => opened,
            else => return outcomes,
        };
        if let Some(open) = lanes.after.remove(&machine) {
            // Before all others: what was closed may have made room for it, and then some of it is shut meanwhile.
            lanes.opening.push_front((machine, open));
        }
        let outcome = outcomes.entry(machine).or_insert_with(|| Applied::as_one(Ok(())));
        if !change.open.is_empty() || change.is_empty() {
            outcome.opened = applied.opened;
        }
        if change.open.is_empty() || !change.close.is_empty() {
            outcome.closed = applied.closed;
        }
    }
}

/// What waits to be begun.
#[derive(Debug, Default)]
struct Lanes {
    /// With all that a firewall does at once, and what is only put right.
    closing: VecDeque<Part>,
    opening: VecDeque<Part>,
    /// Opens of machines that close first.
    after: BTreeMap<MachineId, Change>,
}

impl Lanes {
    fn new(changes: &BTreeMap<MachineId, Change>, first: &[MachineId], at_once: bool) -> Self {
        let early: BTreeSet<MachineId> = first.iter().copied().collect();
        let rest = changes.keys().filter(|machine| !early.contains(machine));
        let mut lanes = Self::default();
        for machine in first.iter().chain(rest) {
            let Some(change) = changes.get(machine) else { continue };
            if at_once || change.open.is_empty() {
                lanes.closing.push_back((*machine, change.clone()));
            } else if change.close.is_empty() {
                lanes.opening.push_back((*machine, change.clone()));
            } else {
                let close = Change { close: change.close.clone(), ..Change::default() };
                let open = Change { open: change.open.clone(), ..Change::default() };
                lanes.closing.push_back((*machine, close));
                lanes.after.insert(*machine, open);
            }
        }
        if planted(Bug::ClosesQueueUp) {
            lanes.opening.append(&mut lanes.closing);
        }
        lanes
    }
}

async fn carry_out<F: Firewall>(
    firewall: &F,
    (machine, change): Part,
    lead: &Leadership,
) -> (MachineId, Change, Applied) {
    let until = lead.may_act_until();
    if Instant::now() >= until {
        let what = number(machine).into();
        return (machine, change, Applied::as_one(Err(Error::NotBegun { what })));
    }
    let until = if planted(Bug::AsksOnce) { until + Duration::from_secs(3600) } else { until };
    // Boxed: a cloud's futures nest deeper than the compiler follows, in a build from nothing before all others.
    let applied = Box::pin(firewall.apply(number(machine), &change, until)).await;
    (machine, change, applied)
}

/// The machine as the provider knows it.
pub fn number(machine: MachineId) -> MachineNumber {
    MachineNumber::new(machine.number())
}
