//! Actions of a simulated world: scripted or chosen by the seed, one at a time. Each action changes
//! the oracle and the store in one step, because an operator's command completes before any agent
//! runs again.

use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, UnitId};
use portcullis::store::{Error, UnitPorts, paths};

use crate::agents::RESYNC;
use crate::faults::Mishap;
use crate::oracle::{Exposed, Machine, Service, Unit};
use crate::port_bits::{ARGUMENTS, named};
use crate::record::Armed;
use crate::world::{SERVICES, World, deployment, number, service_name, unit_name};

/// An action. Its indices are taken modulo the length of the list they refer to, so that every
/// number is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Open(usize, usize),
    Close(usize, usize),
    Expose(usize),
    ExposeTo(usize, usize),
    Unexpose(usize),
    AddUnit(usize, usize),
    RemoveUnit(usize),
    Destroy(usize),
    Deploy(usize, usize),
    AddMachine,
    /// Adds a machine without an instance, which an agent has to launch.
    Launch,
    Terminate(usize),
    /// Many changes at once.
    Flood(usize),
    Corrupt(Mishap, usize, usize),
    /// Deletes znodes; the mishap selects the kind.
    DeleteNodes(Mishap, usize),
    OlderRecord(usize),
    NewerRecord(usize),
    RepairStore,
    EditRules(Mishap, usize),
    LoseInstance(usize),
    /// Gives the provider a fault of the given severity.
    Provider(Mishap, usize),
    /// Lets one provider call in this many fail.
    FailCalls(usize),
    /// Delays every provider request by this many milliseconds.
    Latency(u64),
    /// Allows one request of each kind per this many milliseconds.
    RateLimit(u64),
    EndProviderFaults,
    Interrupt,
    Expire(usize),
    Crash(usize),
    Stop(usize),
    Freeze(usize, u64),
    Jump(u64),
    /// Moves the time of day by this many hours, forward or backward.
    SetTimeOfDay(i64),
    Events(Mishap, usize),
    Arm(Armed),
    Backup,
    Restore,
    /// The operator accepts a restored store.
    Accept,
}

impl PartialEq for Armed {
    fn eq(&self, other: &Self) -> bool {
        (self.fault, self.kind, self.skip) == (other.fault, other.kind, other.skip)
    }
}

impl Eq for Armed {}

impl World {
    pub(crate) async fn perform(&mut self, action: Action) {
        self.log(format_args!("-- {action:?}"));
        self.interceptor.lock().coverage.events += 1;
        match action {
            Action::Open(unit, port) => self.port(unit, port, true).await,
            Action::Close(unit, port) => self.port(unit, port, false).await,
            Action::Expose(service) => self.expose(service, Exposed::World).await,
            Action::ExposeTo(service, source) => self.expose(service, Exposed::To(source % 2)).await,
            Action::Unexpose(service) => self.expose(service, Exposed::No).await,
            Action::AddUnit(service, machine) => self.add_unit(service, machine).await,
            Action::RemoveUnit(unit) => self.remove_unit(unit).await,
            Action::Destroy(service) => self.destroy(service).await,
            Action::Deploy(service, machine) => self.deploy(service, machine).await,
            Action::AddMachine => {
                let launch = self.provisions && self.random.one_in(2);
                self.add_machine(launch).await;
            }
            Action::Launch => self.add_machine(true).await,
            Action::Terminate(machine) => self.terminate(machine).await,
            Action::Flood(count) => {
                self.count_mishap(Mishap::Flood);
                for n in 0..count {
                    self.port(n, n / 3, n % 2 == 0).await;
                }
            }
            Action::Corrupt(what, index, how) => self.corrupt(what, index, how).await,
            Action::DeleteNodes(what, index) => self.delete_nodes(what, index).await,
            Action::OlderRecord(unit) => self.other_version(unit, true).await,
            Action::NewerRecord(unit) => self.other_version(unit, false).await,
            Action::RepairStore => self.repair_store().await,
            Action::EditRules(what, machine) => self.edit_rules(what, machine),
            Action::LoseInstance(machine) => self.lose_instance(self.machine(machine)).await,
            Action::Provider(what, amount) => self.provider(what, amount),
            Action::FailCalls(share) => {
                let mut shared = self.interceptor.lock();
                shared.failing_share = Some(share);
                shared.record_retry_fault();
            }
            Action::Latency(ms) => {
                self.count_mishap(Mishap::Latency);
                let mut shared = self.interceptor.lock();
                shared.latency = Some(Duration::from_millis(ms));
                shared.record_slow_call();
            }
            Action::RateLimit(ms) => {
                self.count_mishap(Mishap::RateLimit);
                let mut shared = self.interceptor.lock();
                shared.rate_limit = Some(Duration::from_millis(ms));
                shared.record_slow_call();
            }
            Action::EndProviderFaults => self.end_provider_faults(),
            _ => self.perform_disturbance(action).await,
        }
    }

    fn unit(&self, index: usize) -> Option<(UnitId, Unit)> {
        let shared = self.interceptor.lock();
        let units = &shared.oracle.units;
        units.iter().nth(index % units.len().max(1)).map(|(id, unit)| (*id, unit.clone()))
    }

    pub(crate) fn machine(&self, index: usize) -> MachineId {
        let shared = self.interceptor.lock();
        let machines = &shared.oracle.machines;
        *machines.keys().nth(index % machines.len()).expect("a machine")
    }

    /// Returns `None` if the store refused the command because of a corrupt record or a machine in
    /// use.
    fn refused<V>(&self, result: Result<V, Error>) -> Option<V> {
        match result {
            Ok(value) => Some(value),
            Err(Error::Corrupt { .. } | Error::MachineInUse(_)) => None,
            Err(other) => panic!("{other}"),
        }
    }

    async fn port(&mut self, unit: usize, argument: usize, open: bool) {
        let Some((id, unit)) = self.unit(unit) else { return };
        if unit.corrupt_ports {
            return;
        }
        let argument = argument % ARGUMENTS.len();
        let range = parse_argument(ARGUMENTS[argument]).expect("a port");
        let ports = UnitPorts::new(self.operator.tree(), id);
        if open { ports.open(range).await } else { ports.close(range).await }.expect("stored");
        let mut shared = self.interceptor.lock();
        let unit = shared.oracle.units.get_mut(&id).expect("a unit");
        unit.ports.retain(|other| *other != argument);
        if open {
            unit.ports.push(argument);
        }
        shared.changed();
    }

    async fn expose(&mut self, service: usize, to: Exposed) {
        let service = service % SERVICES;
        if !self.is_whole(service) {
            return;
        }
        let name = service_name(service);
        let done = match to {
            Exposed::No => self.operator.unexpose(&name).await,
            Exposed::World => self.operator.expose(&name).await,
            Exposed::To(source) => {
                self.operator.expose_to(&name, &[named().nth(source).expect("a source")]).await
            }
        };
        done.expect("exposed");
        let mut shared = self.interceptor.lock();
        let known = shared.oracle.services.get_mut(&service).expect("a service");
        // The previous value of the flag, valid or corrupt, is overwritten.
        (known.exposed, known.corrupt) = (to, false);
        let flag = paths::exposed(known.id);
        shared.changed();
        drop(shared);
        self.damaged.remove(&flag);
    }

    async fn add_unit(&mut self, service: usize, machine: usize) {
        let (service, machine) = (service % SERVICES, self.machine(machine));
        let full = self.interceptor.lock().oracle.units.len() >= 9;
        if full || !self.is_whole(service) {
            return;
        }
        let added = self.operator.add_units(&service_name(service), 1, Some(machine)).await;
        let Some(added) = self.refused(added) else { return };
        let mut shared = self.interceptor.lock();
        for placed in added {
            shared.oracle.units.insert(placed.id, Unit::new(service, placed.name.number(), machine));
        }
        shared.changed();
    }

    async fn remove_unit(&mut self, unit: usize) {
        let Some((id, unit)) = self.unit(unit) else { return };
        let removed = self.operator.remove_unit(&unit_name(&unit)).await;
        if self.refused(removed).is_some() {
            self.count_mishap(Mishap::UnitRemoved);
            let mut shared = self.interceptor.lock();
            shared.oracle.units.remove(&id);
            shared.changed();
        }
    }

    async fn destroy(&mut self, service: usize) {
        let service = service % SERVICES;
        if !self.interceptor.lock().oracle.services.contains_key(&service) {
            return;
        }
        let destroyed = self.operator.destroy_service(&service_name(service)).await;
        if self.refused(destroyed).is_some() {
            self.count_mishap(Mishap::ServiceDestroyed);
            let mut shared = self.interceptor.lock();
            shared.oracle.services.remove(&service);
            shared.oracle.units.retain(|_, unit| unit.service != service);
            shared.changed();
        }
    }

    async fn deploy(&mut self, service: usize, machine: usize) {
        let (service, machine) = (service % SERVICES, self.machine(machine));
        if self.interceptor.lock().oracle.services.contains_key(&service) {
            return;
        }
        let deployed = self.operator.deploy(&deployment(service, machine)).await;
        let Some(deployed) = self.refused(deployed) else { return };
        self.count_mishap(Mishap::NameUsedAgain);
        let mut shared = self.interceptor.lock();
        let known = Service { id: deployed.service, exposed: Exposed::No, corrupt: false };
        shared.oracle.services.insert(service, known);
        for placed in deployed.units {
            shared.oracle.units.insert(placed.id, Unit::new(service, placed.name.number(), machine));
        }
        shared.changed();
    }

    async fn add_machine(&mut self, launched: bool) {
        if self.interceptor.lock().oracle.machines.len() >= 5 {
            return;
        }
        let name = format!("i-{}", self.random.next());
        if !launched {
            self.add_foreign_instance(&name);
        }
        let instance = (!launched).then(|| name.parse().expect("an id"));
        let machine = self.operator.add_machine(instance).await.expect("a machine");
        // After a restore the number may be a reused one, whose group still exists with its old
        // rules.
        if !self.provisions {
            self.interceptor.provider.add_group(number(machine));
        }
        let mut shared = self.interceptor.lock();
        shared.oracle.machines.insert(machine, Machine::default());
        shared.changed();
    }

    async fn terminate(&mut self, machine: usize) {
        let machine = if self.provisions { self.idle_machine(machine) } else { self.machine(machine) };
        if self.interceptor.lock().oracle.machines.len() < 2 {
            return;
        }
        let gone = self.operator.terminate_machines(&[machine]).await;
        if self.refused(gone).is_some() {
            self.count_mishap(Mishap::MachineGone);
            self.foreign.remove(&machine);
            if !self.provisions {
                self.interceptor.provider.remove_group(number(machine));
            }
            let mut shared = self.interceptor.lock();
            shared.oracle.machines.remove(&machine);
            // A pass in progress may refer to the group, which no longer exists.
            shared.record_retry_fault();
            shared.changed();
        }
    }
}

/// Exceeds the resync interval plus an agent's longest pause and the work that follows it.
pub(crate) const RESYNC_RECOVERY: Duration = Duration::from_secs(RESYNC.as_secs() + RETRY_RECOVERY.as_secs());

/// Exceeds an agent's longest pause plus the time that a crashed agent holds the lock and the work
/// that follows.
pub(crate) const RETRY_RECOVERY: Duration = Duration::from_secs(100);
