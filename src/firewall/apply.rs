//! Carries out plans. Decisions belong in `plan.rs` and `wanted.rs`. Machines are independent of
//! each other; the result contains all failures.
//!
//! Closes and opens have separate queues, so that an open that hangs or waits for the provider
//! never delays a close. A machine's own open follows its close: the close may free slots for the
//! open, and `plan.rs` ensures that it closes no port whose replacement is still to be opened.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::mutant;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;

use crate::machine::number;
use crate::model::MachineId;
use crate::store::lease::Lease;

/// The number of concurrent requests per queue: enough to hide a cloud's latency, few enough for
/// its rate limits.
const MAX_CONCURRENT: usize = 8;

/// The result of each machine's change. Requests that were not sent because the lease had ended are
/// [`Error::NotBegun`].
pub type Outcomes = BTreeMap<MachineId, Applied>;

/// A machine's whole change, or the half of it that is one request.
type Part = (MachineId, Change);

/// Applies `changes`, those of the machines in `first` before all others and in that order.
pub async fn apply<F: Firewall>(
    firewall: &F,
    changes: &BTreeMap<MachineId, Change>,
    first: &[MachineId],
    lease: &Lease,
) -> Outcomes {
    let mut queues = Queues::new(changes, first, firewall.is_atomic());
    let mut outcomes = Outcomes::new();
    let (mut closes, mut opens) = (FuturesUnordered::new(), FuturesUnordered::new());
    loop {
        while closes.len() < MAX_CONCURRENT
            && let Some(part) = queues.closing.pop_front()
        {
            closes.push(send_part(firewall, part, lease));
        }
        while opens.len() < MAX_CONCURRENT
            && let Some(part) = queues.opening.pop_front()
        {
            opens.push(send_part(firewall, part, lease));
        }
        let (machine, change, applied) = tokio::select! {
            biased;
            Some(closed) = closes.next() => closed,
            Some(opened) = opens.next() => opened,
            else => return outcomes,
        };
        if let Some(open) = queues.after.remove(&machine) {
            // Before all other opens: if the close made room for this open, wanted ports are closed
            // until it succeeds.
            queues.opening.push_front((machine, open));
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

/// Queues of requests that were not sent yet.
#[derive(Debug, Default)]
struct Queues {
    /// Also contains the changes of an atomic firewall, and repairs without rules.
    closing: VecDeque<Part>,
    opening: VecDeque<Part>,
    /// Opens of machines whose close must end first.
    after: BTreeMap<MachineId, Change>,
}

impl Queues {
    fn new(changes: &BTreeMap<MachineId, Change>, first: &[MachineId], is_atomic: bool) -> Self {
        let early: BTreeSet<MachineId> = first.iter().copied().collect();
        let rest = changes.keys().filter(|machine| !early.contains(machine));
        let mut queues = Self::default();
        for machine in first.iter().chain(rest) {
            let Some(change) = changes.get(machine) else { continue };
            if is_atomic || change.open.is_empty() {
                queues.closing.push_back((*machine, change.clone()));
            } else if change.close.is_empty() {
                queues.opening.push_back((*machine, change.clone()));
            } else {
                let close = Change { close: change.close.clone(), ..Change::default() };
                let open = Change { open: change.open.clone(), ..Change::default() };
                queues.closing.push_back((*machine, close));
                queues.after.insert(*machine, open);
            }
        }
        if mutant!(ClosesQueuedBehindOpens) {
            queues.opening.append(&mut queues.closing);
        }
        queues
    }
}

async fn send_part<F: Firewall>(
    firewall: &F,
    (machine, change): Part,
    lease: &Lease,
) -> (MachineId, Change, Applied) {
    let until = lease.may_act_until();
    if Instant::now() >= until {
        let what = number(machine).into();
        return (machine, change, Applied::as_one(Err(Error::NotBegun { what })));
    }
    let until =
        if mutant!(LeaseNotCheckedAfterRateLimit) { until + Duration::from_secs(3600) } else { until };
    // Boxed: a cloud's futures exceed the compiler's nesting limit, above all in a clean build.
    let applied = Box::pin(firewall.apply(number(machine), &change, until)).await;
    (machine, change, applied)
}
