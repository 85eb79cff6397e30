//! Worlds in which the agents also provision: instances are launched, adopted, lost and terminated.
//! Every call passes through `interceptor`, and the invariants of instances are checked here.

use std::future::Future;
use std::time::Duration;

use portcullis::firewall::report::Report;
use portcullis::model::MachineId;
use portcullis::store::lease::LEASE;
use portcullis::store::paths;
use portcullis::store::tree::Tree as _;
use portcullis_provider::provider::{
    GroupId, Instance, InstanceId, InstanceState, Inventory, Launch, MachineNumber, Origin, OtherGroup,
    UserData,
};
use portcullis_provider::{Error, Machines};
use tokio::time::Instant;

use crate::actions::{Action, RESYNC_RECOVERY, RETRY_RECOVERY};
use crate::checks::CHANGE_LIMIT;
use crate::faults::{Fault, Kind, Mishap};
use crate::firewall::id;
use crate::interceptor::Interceptor;
use crate::oracle::MAX_AGE;
use crate::record::Armed;
use crate::world::{Shape, World, number};

#[derive(Clone)]
pub(crate) struct SimMachines {
    pub interceptor: Interceptor,
    pub agent: usize,
}

/// The number of a machine that no world adds.
const REMOVED_MACHINE: u32 = 900;

fn is_live(instance: &&Instance) -> bool {
    instance.state != InstanceState::Terminated
}

impl SimMachines {
    /// Sends one request, subject to faults.
    async fn request<V: Send>(
        &self,
        kind: Kind,
        machine: Option<MachineNumber>,
        effect: impl Future<Output = Result<V, Error>> + Send,
    ) -> Result<V, Error> {
        if kind != Kind::List {
            self.interceptor.check_provisioning_lease(self.agent);
        }
        let fault = self.interceptor.before(self.agent, kind, machine.map(id)).await;
        let error = fault.and_then(|fault| fault.provider_error(machine));
        let result = match error {
            Some(error) if fault != Some(Fault::LostAfter) => Err(error),
            error => {
                let before = self.interceptor.rules_now();
                let done = effect.await;
                self.interceptor.changed_by_request(&before);
                error.map_or(done, Err)
            }
        };
        self.interceptor.after(self.agent, fault).await;
        result
    }
}

impl Machines for SimMachines {
    async fn list(&self) -> Result<Inventory, Error> {
        let listed = self.request(Kind::List, None, self.interceptor.provider.list()).await?;
        let live = listed.instances.iter().filter(is_live).map(|instance| instance.machine).collect();
        self.interceptor.lock().listed[self.agent] = live;
        Ok(listed)
    }

    async fn launch(&self, launch: &Launch) -> Result<Instance, Error> {
        let machine = launch.machine;
        let has_one = self.interceptor.lock().listed[self.agent].contains(&machine);
        if has_one {
            self.interceptor
                .lock()
                .violated(format!("P1: a second instance is launched for machine {machine}"));
        }
        self.request(Kind::Launch, Some(machine), self.interceptor.provider.launch(launch)).await
    }

    async fn adopt(&self, machine: MachineNumber, instance: &InstanceId) -> Result<Instance, Error> {
        self.request(Kind::Adopt, Some(machine), self.interceptor.provider.adopt(machine, instance)).await
    }

    async fn ensure_group(&self, machine: MachineNumber, instance: &InstanceId) -> Result<GroupId, Error> {
        let ensured = self.interceptor.provider.ensure_group(machine, instance);
        self.request(Kind::EnsureGroup, Some(machine), ensured).await
    }

    async fn release(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        self.interceptor.check_removal(machine, instance);
        self.interceptor.lock().check_termination(id(machine));
        self.request(Kind::Release, Some(machine), self.interceptor.provider.release(machine, instance)).await
    }

    async fn terminate(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        let all = self.interceptor.provider.truth().instances;
        // S3: foreign instances are never terminated.
        if !all.iter().any(|ours| ours.id == *instance && ours.origin == Origin::Launched) {
            self.interceptor.lock().violated(format!("S3: {instance} is foreign, and is terminated"));
        }
        self.interceptor.check_removal(machine, instance);
        self.interceptor.lock().check_termination(id(machine));
        self.request(Kind::Terminate, Some(machine), self.interceptor.provider.terminate(machine, instance))
            .await
    }

    async fn revoke_all(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        if self.interceptor.was_present_throughout(machine) {
            self.interceptor
                .lock()
                .violated(format!("S5: machine {machine} is closed like a removed machine"));
        }
        self.interceptor.lock().check_termination(id(machine));
        self.request(Kind::RevokeAll, Some(machine), self.interceptor.provider.revoke_all(machine, group))
            .await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        let groups = self.interceptor.provider.truth().groups;
        if let Some(machine) = groups.iter().find(|there| there.id == *group).and_then(|found| found.machine)
            && self.interceptor.was_present_throughout(machine)
        {
            self.interceptor.lock().violated(format!("S5: the group of machine {machine} is deleted"));
        }
        if let Some(machine) = groups.iter().find(|there| there.id == *group).and_then(|found| found.machine)
        {
            self.interceptor.lock().check_termination(id(machine));
        }
        let deleted =
            self.request(Kind::DeleteGroup, None, self.interceptor.provider.delete_group(group)).await;
        if matches!(deleted, Err(Error::StillInUse { .. })) {
            self.interceptor.lock().coverage.count_mishap(Mishap::GroupInUse);
        }
        deleted
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        self.request(Kind::EnsureGroup, None, self.interceptor.provider.adopt_groups()).await
    }
}

impl Interceptor {
    /// S6: a replaced leader begins no request after its lease has ended.
    fn check_provisioning_lease(&self, agent: usize) {
        let mut shared = self.lock();
        shared.provisioned += 1;
        if let Some((leader, since)) = shared.lead
            && leader != agent
            && Instant::now() >= since + LEASE
        {
            shared.violated(format!("S6: agent {agent} provisions though {leader} leads"));
        }
    }

    /// Whether the machine has been in the tree for long enough that every agent has read it.
    fn was_present_throughout(&self, machine: MachineNumber) -> bool {
        let (shared, now) = (self.lock(), Instant::now());
        let since = now.checked_sub(MAX_AGE).unwrap_or(now);
        !shared.may_be_outdated()
            && shared.history.knows(id(machine), since)
            && shared.oracle.machines.contains_key(&id(machine))
    }

    /// P2: a machine in the tree keeps its instance; only a duplicate may be removed.
    fn check_removal(&self, machine: MachineNumber, instance: &InstanceId) {
        let all = self.provider.truth().instances;
        let others =
            all.iter().filter(is_live).filter(|other| other.machine == machine && other.id != *instance);
        if others.count() == 0 && self.was_present_throughout(machine) {
            self.lock().violated(format!("P2: machine {machine} loses {instance}"));
        }
    }

    fn rules_now(&self) -> Vec<(MachineId, crate::port_bits::PortBits)> {
        let machines: Vec<MachineId> = self.lock().oracle.machines.keys().copied().collect();
        machines.into_iter().map(|machine| (machine, self.open_on(machine).unwrap_or_default())).collect()
    }

    /// Ports that were closed together with a group no longer have to stay open.
    fn changed_by_request(&self, before: &[(MachineId, crate::port_bits::PortBits)]) {
        for (machine, open) in before {
            let lost = open.minus(self.open_on(*machine).unwrap_or_default());
            if !lost.is_empty() {
                let mut shared = self.lock();
                shared.oracle.lost(*machine, lost);
                shared.changed();
            }
        }
    }
}

impl World {
    /// Adds a foreign instance.
    pub(crate) fn add_foreign_instance(&mut self, name: &str) {
        let foreign_instance = InstanceId::new(name);
        self.interceptor.provider.add_instance(&foreign_instance);
        self.foreign_instances.insert(foreign_instance);
    }

    /// Performs actions that lead to a call of this kind, because such calls are rare.
    pub(crate) async fn cause_call(&mut self, kind: Kind) {
        let actions = match kind {
            Kind::Launch => vec![Action::Launch],
            Kind::Release => vec![Action::Terminate(self.idle_machine_of(Origin::Adopted).unwrap_or(0))],
            Kind::Terminate => match self.idle_machine_of(Origin::Launched) {
                Some(machine) => vec![Action::Terminate(machine)],
                None => {
                    self.launch_for_removed_machine().await;
                    vec![Action::Interrupt]
                }
            },
            Kind::DeleteGroup => vec![Action::Terminate(0)],
            Kind::RevokeAll => {
                // A removed machine has open ports only if a third party added an owned rule just
                // before.
                let idle = self.idle_machine(0);
                let place = self.interceptor.lock().oracle.machines.keys().position(|id| *id == idle);
                vec![Action::EditRules(Mishap::RuleAdded, place.unwrap_or(0)), Action::Terminate(0)]
            }
            Kind::EnsureGroup => vec![Action::EditRules(Mishap::GroupDeleted, 0), Action::Interrupt],
            _ => vec![Action::AddMachine],
        };
        for action in actions {
            Box::pin(self.perform(action)).await;
        }
    }

    /// Returns a machine without units, or any machine if all have units.
    pub(crate) fn idle_machine(&self, index: usize) -> MachineId {
        let shared = self.interceptor.lock();
        let busy = |machine: &MachineId| shared.oracle.units.values().any(|unit| unit.machine == *machine);
        let idle: Vec<MachineId> = shared.oracle.machines.keys().copied().filter(|id| !busy(id)).collect();
        drop(shared);
        if idle.is_empty() { self.machine(index) } else { idle[index % idle.len()] }
    }

    /// Returns the index of a machine without units whose instance was launched or adopted.
    fn idle_machine_of(&self, origin: Origin) -> Option<usize> {
        let instances = self.interceptor.provider.truth().instances;
        let machines = self.interceptor.lock().oracle.machines.len();
        (0..machines).find(|index| {
            let machine = number(self.idle_machine(*index));
            let mut own = instances.iter().filter(is_live).filter(|instance| instance.machine == machine);
            own.any(|instance| instance.origin == origin)
        })
    }

    /// Launches an instance for a machine that is not in the tree, like a launch that completes
    /// after its machine was removed.
    async fn launch_for_removed_machine(&mut self) {
        let launch = Launch { machine: MachineNumber::new(REMOVED_MACHINE), user_data: UserData::new("") };
        // The provider may refuse it.
        drop(self.interceptor.provider.launch(&launch).await);
        self.interceptor.lock().record_resync_fault();
    }

    /// Ends the instance of a machine without a request of an agent.
    pub(crate) async fn lose_instance(&mut self, machine: MachineId) {
        let Ok(record) = self.operator.machine(machine).await else { return };
        let Some(instance) = record.instance_id.map(|id| InstanceId::new(id.as_str())) else { return };
        self.count_mishap(Mishap::InstanceLost);
        self.foreign_instances.remove(&instance);
        self.interceptor.provider.lose_instance(&instance);
        self.interceptor.lock().record_resync_fault();
    }

    /// S3: foreign instances keep running, even if they were adopted for a while.
    pub(crate) fn expect_foreign_instances_untouched(&self) {
        if let Some(ended) = self
            .foreign_instances
            .iter()
            .find(|foreign_instance| !self.interceptor.provider.is_running(foreign_instance))
        {
            self.fail(&format!("S3: {ended} was terminated, and is foreign"));
        }
    }

    /// Whether the instance of a machine runs.
    pub(crate) async fn has_instance(&self, machine: MachineId) -> bool {
        let record = self.operator.machine(machine).await;
        let instance =
            record.ok().and_then(|record| record.instance_id).map(|id| InstanceId::new(id.as_str()));
        instance.is_some_and(|instance| self.interceptor.provider.is_running(&instance))
    }

    pub(crate) async fn all_have_instances(&self) -> bool {
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        for machine in machines {
            if !self.has_instance(machine).await {
                return false;
            }
        }
        true
    }

    /// Once convergence is due, every machine has exactly one instance or a report of the problem,
    /// and there are no other instances.
    pub(crate) async fn expect_provisioned(&self) {
        let truth = self.interceptor.provider.truth();
        let machines: Vec<(MachineId, bool)> = {
            let shared = self.interceptor.lock();
            shared.oracle.machines.iter().map(|(id, machine)| (*id, machine.corrupt)).collect()
        };
        let known = |machine: MachineNumber| machines.iter().any(|(id, _)| number(*id) == machine);
        let live: Vec<&Instance> = truth.instances.iter().filter(is_live).collect();
        if let Some(instance) = live.iter().find(|instance| !known(instance.machine)) {
            self.fail(&format!("P3: {} outlives machine {}", instance.id, instance.machine));
        }
        if let Some(group) = truth.groups.iter().find(|group| group.machine.is_some_and(|m| !known(m))) {
            self.fail(&format!("P3: {} outlives its machine", group.id));
        }
        if let Some(group) = truth.groups.first().filter(|_| machines.is_empty()) {
            self.fail(&format!("P3: {} outlives the last machine", group.id));
        }
        for (machine, _) in machines.iter().filter(|(_, corrupt)| !corrupt) {
            self.expect_one_instance(*machine, &live, &truth).await;
        }
    }

    async fn expect_one_instance(&self, machine: MachineId, live: &[&Instance], truth: &Inventory) {
        let record = match self.operator.machine(machine).await {
            Ok(record) => record,
            Err(err) => self.fail(&format!("P1: {machine}: {err}")),
        };
        let own: Vec<&&Instance> =
            live.iter().filter(|instance| instance.machine == number(machine)).collect();
        if own.len() > 1 {
            self.fail(&format!("P1: {machine} has {} instances", own.len()));
        }
        let Some(recorded) = record.instance_id else { self.fail(&format!("P1: {machine} has no instance")) };
        match own.first().filter(|instance| instance.id.as_str() == recorded.as_str()) {
            Some(instance) => {
                let group = truth.groups.iter().find(|group| group.machine == Some(number(machine)));
                if group.is_none_or(|group| !instance.groups.contains(&group.id)) {
                    self.fail(&format!("P1: {} is not in the group of {machine}", instance.id));
                }
            }
            // A lost instance is reported and not replaced.
            None => {
                let node = self.operator.tree().get(&paths::firewall_report(machine)).await;
                let report = node.ok().and_then(|node| Report::parse(&node.data).ok());
                if report.is_none_or(|report| report.problem.is_none()) {
                    self.fail(&format!("P1: no report says that {machine} has lost {recorded}"));
                }
            }
        }
    }
}

/// One read shows no machine at all. The instance of a machine without units stays, too.
pub(crate) async fn list_of_machines_is_empty() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.perform(Action::AddMachine).await;
    world.pause(CHANGE_LIMIT + RETRY_RECOVERY).await;
    world.check().await;
    let empty = Armed { fault: Fault::Empty, kind: Some(Kind::ReadMachines), skip: 0 };
    world.perform(Action::Arm(empty)).await;
    world.perform(Action::Interrupt).await;
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
}

/// A launch fails just before a machine is removed. The launch then waits for the read that
/// confirms the termination, and its retry becomes due meanwhile.
pub(crate) async fn a_failed_launch_waits_for_a_confirming_read() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.perform(Action::Launch).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    let failure = Armed { fault: Fault::Unavailable, kind: Some(Kind::Launch), skip: 0 };
    world.perform(Action::Arm(failure)).await;
    // Shorter than the pause before the first retry.
    world.pause(Duration::from_millis(100)).await;
    assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
    world.perform(Action::Terminate(0)).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.pause(RETRY_RECOVERY).await;
    world.check().await;
    assert!(world.all_have_instances().await);
}
