//! Carries provisioning steps out. Nothing is decided here: decisions belong in `provision.rs`. Machines are independent of
//! each other, the steps of one come in order; what failed is in the result, and ends the steps of its machine.

use std::collections::{BTreeMap, VecDeque};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use portcullis_provider::Machines;
use portcullis_provider::provider::{Instance, Launch};
use tracing::info;

use super::apply::number;
use super::boot::Boot;
use super::provision::{Step, recorded};
use crate::model::MachineId;
use crate::store::Credential;
use crate::store::election::Leadership;
use crate::store::paths;
use crate::store::records::{self, parse_credentials};
use crate::store::tree::{self, Tree, Write};

/// Machines that are seen to at the same time, of those that go and of all others. Launches are slow, and few of them a
/// second are allowed.
const AT_ONCE: usize = 4;

/// What became of the steps of one machine.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The machine's record as we wrote it.
    pub recorded: Option<records::Machine>,
    /// Something outside the tree was changed.
    pub acted: bool,
    pub failure: Option<Failure>,
}

#[derive(Debug)]
pub enum Failure {
    Provider(portcullis_provider::Error),
    /// The tree is not as it was; the next look sees how.
    Stale,
}

/// Why the rest was not even tried.
#[derive(Debug)]
pub enum Stop {
    /// Somebody else leads.
    Replaced,
    Store(crate::store::Error),
}

/// What steps are carried out with.
#[derive(Debug)]
pub struct Hands<'a, T, M> {
    pub tree: &'a T,
    pub machines: &'a M,
    pub boot: &'a Boot,
}

impl<T: Tree, M: Machines> Hands<'_, T, M> {
    /// Each step is begun only under a lock that was just confirmed.
    pub async fn enact(
        &self,
        steps: Vec<Step>,
        lead: &mut Leadership,
    ) -> Result<BTreeMap<Option<MachineId>, Outcome>, Stop> {
        let mut of_machine: BTreeMap<Option<MachineId>, VecDeque<Step>> = BTreeMap::new();
        for step in steps {
            of_machine.entry(step.machine()).or_default().push_back(step);
        }
        let mut outcomes: BTreeMap<Option<MachineId>, Outcome> = BTreeMap::new();
        // Whoever goes has a lane of its own: a launch that hangs keeps no port open and no instance running.
        let is_going = |(_, steps): &(Option<MachineId>, VecDeque<Step>)| steps.iter().all(Step::is_farewell);
        let (going, others) = of_machine.into_iter().partition(is_going);
        let mut lanes: [Lane; 2] = [Lane { waiting: going, begun: 0 }, Lane { waiting: others, begun: 0 }];
        let mut running = FuturesUnordered::new();
        loop {
            for (place, lane) in lanes.iter_mut().enumerate() {
                while lane.begun < AT_ONCE
                    && let Some((machine, mut steps)) = lane.waiting.pop_front()
                {
                    let Some(step) = steps.pop_front() else { continue };
                    confirm(self.tree, lead).await?;
                    let (fence, alone) = (lead.fence(), step.stands_alone());
                    lane.begun += 1;
                    running.push(async move { (place, machine, steps, alone, self.step(step, fence).await) });
                }
            }
            let Some((place, machine, mut steps, alone, done)) = running.next().await else {
                return Ok(outcomes);
            };
            let lane = &mut lanes[place];
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
                    // The first is the worst: what could not be shut is open.
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
                let user_data = self.boot.user_data(machine, &credential);
                let launch = Launch { machine: number(machine), user_data };
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
            Step::Shut(machine, group) => {
                self.machines.shut(number(machine), &group).await?;
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

    /// What the machine proves itself with. Without it nothing is launched, since nobody would let it in.
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
            // If the machine went with them, the next look says so, and nothing is wrong any more.
            Err(tree::Error::NoNode(path)) => Err(unusable(format!("{path} is missing")).into()),
            Err(error) => Err(error.into()),
        }
    }

    async fn record(&self, machine: MachineId, instance: &Instance, fence: Write) -> Result<Done, Failed> {
        let path = paths::machine(machine);
        let node = self.tree.get(&path).await?;
        // One that became unreadable since it was looked at is kept as it is.
        let Ok(old) = records::Machine::parse(&path, &node.data) else { return Ok(Done::default()) };
        let Some(new) = recorded(&old, instance).filter(|new| *new != old) else {
            return Ok(Done::default());
        };
        let write = Write::SetIfVersion { path, data: new.to_bytes(), version: node.version };
        self.tree.write(vec![fence, write]).await?;
        Ok(Done { recorded: Some(new), ..Done::default() })
    }
}

/// Machines that are seen to a few at a time, each with what is left to do for it.
struct Lane {
    waiting: VecDeque<(Option<MachineId>, VecDeque<Step>)>,
    begun: usize,
}

/// One step, done.
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

    /// What the provider answered goes into the tree at once.
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

/// Asks the store whether we still lead.
pub async fn confirm<T: Tree>(tree: &T, lead: &mut Leadership) -> Result<(), Stop> {
    match lead.confirm(tree).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(Stop::Replaced),
        Err(error) => Err(Stop::Store(error)),
    }
}
