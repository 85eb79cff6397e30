//! Carries out provisioning steps. Decisions belong in `plan.rs`. Machines are independent of each
//! other; the steps of one machine run in order. A failure is part of the result and ends the steps
//! of its machine.

use std::collections::{BTreeMap, VecDeque};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use portcullis_provider::Machines;
use portcullis_provider::provider::{Instance, Launch};
use tracing::info;

use super::plan::{Step, recorded};
use super::user_data::BootConfig;
use crate::machine::join_token::LIFETIME_MS;
use crate::machine::number;
use crate::model::MachineId;
use crate::store::joining::offer_at_launch;
use crate::store::lease::Lease;
use crate::store::paths;
use crate::store::records::{self, parse_credentials};
use crate::store::tree::{self, Tree, Write};
use crate::store::{Credential, record_machine};

/// Limit of concurrent machines in each lane. Launches are slow, and providers limit their rate.
const MAX_CONCURRENT: usize = 4;

/// The outcome of the steps of one machine.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The machine's record, if it was written.
    pub recorded: Option<records::Machine>,
    /// Whether anything at the provider was changed.
    pub acted: bool,
    pub failure: Option<Failure>,
}

#[derive(Debug)]
pub enum Failure {
    Provider(portcullis_provider::Error),
    /// The store has changed since the read; the next pass reads it again.
    Stale,
}

/// Why the remaining steps were not begun.
#[derive(Debug)]
pub enum Stop {
    /// Another process holds the lease.
    Replaced,
    Store(crate::store::Error),
}

/// The context in which steps run.
#[derive(Debug)]
pub struct StepRunner<'a, T, M> {
    pub tree: &'a T,
    pub machines: &'a M,
    pub boot: &'a BootConfig,
    /// The time of day, in milliseconds since 1970.
    pub now_ms: u64,
}

impl<T: Tree, M: Machines> StepRunner<'_, T, M> {
    /// Carries out `steps`. The lease is confirmed immediately before each step.
    pub async fn run(
        &self,
        steps: Vec<Step>,
        lease: &mut Lease,
    ) -> Result<BTreeMap<Option<MachineId>, Outcome>, Stop> {
        let mut of_machine: BTreeMap<Option<MachineId>, VecDeque<Step>> = BTreeMap::new();
        for step in steps {
            of_machine.entry(step.machine()).or_default().push_back(step);
        }
        let mut outcomes: BTreeMap<Option<MachineId>, Outcome> = BTreeMap::new();
        // Removals have a separate lane, so that a slow launch does not delay closing ports or
        // terminating instances.
        let is_going = |(_, steps): &(Option<MachineId>, VecDeque<Step>)| steps.iter().all(Step::is_removal);
        let (going, others) = of_machine.into_iter().partition(is_going);
        let mut queues: [Lane; 2] = [Lane { waiting: going, begun: 0 }, Lane { waiting: others, begun: 0 }];
        let mut running = FuturesUnordered::new();
        loop {
            for (place, lane) in queues.iter_mut().enumerate() {
                while lane.begun < MAX_CONCURRENT
                    && let Some((machine, mut steps)) = lane.waiting.pop_front()
                {
                    let Some(step) = steps.pop_front() else { continue };
                    confirm(self.tree, lease).await?;
                    let (fence, alone) = (lease.fence(), step.is_independent());
                    lane.begun += 1;
                    running.push(async move { (place, machine, steps, alone, self.step(step, fence).await) });
                }
            }
            let Some((place, machine, mut steps, alone, done)) = running.next().await else {
                return Ok(outcomes);
            };
            let lane = &mut queues[place];
            lane.begun -= 1;
            let outcome = outcomes.entry(machine).or_default();
            match done {
                Ok(done) => {
                    outcome.acted |= done.acted;
                    outcome.recorded = done.recorded.or(outcome.recorded.take());
                    steps.extend(done.next);
                    lane.waiting.push_front((machine, steps));
                }
                Err(Failed::Provider(error)) => {
                    // The first failure is kept: ports that could not be closed matter most.
                    outcome.failure.get_or_insert(Failure::Provider(error));
                    if alone {
                        lane.waiting.push_front((machine, steps));
                    }
                }
                Err(Failed::Store(tree::Error::BadVersion(path))) if path == paths::epoch() => {
                    return Err(Stop::Replaced);
                }
                Err(Failed::Store(error)) if error.is_conflict() => outcome.failure = Some(Failure::Stale),
                Err(Failed::Store(error)) => return Err(Stop::Store(error.into())),
            }
        }
    }

    async fn step(&self, step: Step, fence: Write) -> Result<Done, Failed> {
        info!(?step, "provisioning");
        match step {
            Step::Launch(machine) => {
                let credential = self.credential(machine).await?;
                let (roles, time) = (self.boot.roles(), (self.now_ms, LIFETIME_MS));
                let offer = offer_at_launch(self.tree, roles, (machine, &credential), fence, time).await?;
                let launch = Launch { machine: number(machine), user_data: self.boot.user_data(&offer) };
                Ok(Done::with(machine, self.machines.launch(&launch).await?))
            }
            Step::Adopt(machine, id) => {
                Ok(Done::with(machine, self.machines.adopt(number(machine), &id).await?))
            }
            Step::EnsureGroup(machine, id) => {
                self.machines.ensure_group(number(machine), &id).await?;
                Ok(Done::acted())
            }
            Step::Record(machine, instance) => self.record(machine, &instance, fence).await,
            Step::RevokeAll(machine, group) => {
                self.machines.revoke_all(number(machine), &group).await?;
                Ok(Done::acted())
            }
            Step::Terminate(machine, id) => {
                self.machines.terminate(number(machine), &id).await?;
                Ok(Done::acted())
            }
            Step::Release(machine, id) => {
                self.machines.release(number(machine), &id).await?;
                Ok(Done::acted())
            }
            Step::DeleteGroup(_, group) | Step::DeleteSharedGroup(group) => {
                self.machines.delete_group(&group).await?;
                Ok(Done::acted())
            }
        }
    }

    /// Returns the machine's credential. Without one no instance is launched, because the store
    /// would refuse it.
    async fn credential(&self, machine: MachineId) -> Result<Credential, Failed> {
        let unusable = |reason: String| {
            let what = portcullis_provider::Subject::Machine(number(machine));
            portcullis_provider::Error::Unusable { what, reason }
        };
        let path = paths::machine_credentials(machine);
        match self.tree.get(&path).await {
            Ok(node) => {
                Ok(parse_credentials(&path, &node.data).map_err(|error| unusable(error.to_string()))?)
            }
            // If the machine was removed as well, the next pass reads that and drops this failure.
            Err(tree::Error::NoNode(path)) => Err(unusable(format!("{path} is missing")).into()),
            Err(error) => Err(error.into()),
        }
    }

    async fn record(&self, machine: MachineId, instance: &Instance, fence: Write) -> Result<Done, Failed> {
        let recorded = record_machine(self.tree, fence, machine, |old| recorded(old, instance)).await?;
        Ok(Done { recorded, ..Done::default() })
    }
}

/// A queue of machines with their remaining steps, and the number of those in progress.
struct Lane {
    waiting: VecDeque<(Option<MachineId>, VecDeque<Step>)>,
    begun: usize,
}

/// The result of one step.
#[derive(Debug, Default)]
struct Done {
    next: Option<Step>,
    recorded: Option<records::Machine>,
    acted: bool,
}

impl Done {
    fn acted() -> Self {
        Self { acted: true, ..Self::default() }
    }

    /// Records the provider's reply in the store as the next step.
    fn with(machine: MachineId, instance: Instance) -> Self {
        Self { next: Some(Step::Record(machine, Box::new(instance))), ..Self::acted() }
    }
}

enum Failed {
    Provider(portcullis_provider::Error),
    Store(tree::Error),
}

impl From<portcullis_provider::Error> for Failed {
    fn from(error: portcullis_provider::Error) -> Self {
        Self::Provider(error)
    }
}

impl From<tree::Error> for Failed {
    fn from(error: tree::Error) -> Self {
        Self::Store(error)
    }
}

/// Confirms with the store that the lease is still held.
pub async fn confirm<T: Tree>(tree: &T, lease: &mut Lease) -> Result<(), Stop> {
    match lease.confirm(tree).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(Stop::Replaced),
        Err(error) => Err(Stop::Store(error)),
    }
}
