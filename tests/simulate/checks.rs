//! Invariants of the world as a whole, checked after every event and at the end. The invariants of
//! single calls are checked in `interceptor`.

use std::collections::BTreeMap;
use std::time::Duration;

use portcullis::firewall::report::Report;
use portcullis::model::{MachineId, UnitId};
use portcullis::store::paths;
use portcullis::store::tree::Tree as _;
use portcullis_provider::provider::{InstanceState, MachineNumber};
use tokio::time::Instant;

use crate::actions::{Action, RESYNC_RECOVERY, RETRY_RECOVERY};
use crate::agents::RESYNC;
use crate::interceptor::FOREIGN;
use crate::port_bits::PortBits;
use crate::record::Writes;
use crate::world::{World, number};

/// The time limit for a change in a world without faults: it includes batching a burst and reading
/// twice before a mass close.
pub(crate) const CHANGE_LIMIT: Duration = Duration::from_secs(5);

/// The state before an action, if the world had no faults then.
#[derive(Default)]
pub(crate) struct BeforeAction(Option<Before>);

struct Before {
    writes: BTreeMap<MachineId, Writes>,
    wanted: BTreeMap<MachineId, PortBits>,
    faults: [Option<Instant>; 2],
}

impl World {
    /// Returns when the effects of the last fault have to be gone; `None` while a fault persists.
    fn recovered_at(&self) -> Option<Instant> {
        if self.has_faults() {
            return None;
        }
        let shared = self.interceptor.lock();
        let retry_fault = shared.retry_fault_at.map(|at| at + RETRY_RECOVERY);
        let resync_fault = shared.resync_fault_at.map(|at| at + RESYNC_RECOVERY);
        Some(retry_fault.max(resync_fault).unwrap_or(self.started_at))
    }

    fn provider_is_normal(&self) -> bool {
        let mut normal_settings = false;
        self.interceptor.provider.configure(|settings| normal_settings = *settings == self.normal_settings);
        normal_settings
    }

    fn is_without_faults(&self) -> bool {
        self.recovered_at().is_some_and(|rest| Instant::now() >= rest) && self.provider_is_normal()
    }

    /// Whether the agents must have converged by now.
    pub(crate) fn is_due(&self) -> bool {
        // Until an operator accepts a restored store, S7 is the only check on the agents.
        if self.unaccepted {
            return false;
        }
        let Some(rest) = self.recovered_at() else { return false };
        let changed = self.interceptor.lock().changed_at;
        let timeout = if changed >= rest { CHANGE_LIMIT } else { RETRY_RECOVERY };
        self.is_without_faults() && Instant::now() >= changed + timeout
    }

    /// Checks the invariants that always hold, and convergence if it is due.
    pub(crate) async fn check(&mut self) {
        self.expect_no_violation();
        self.expect_foreign_rules_untouched();
        self.expect_foreign_instances_untouched();
        if self.restored && !self.unaccepted {
            self.accept().await;
        }
        if self.is_due() {
            self.expect_converged().await;
            self.expect_no_reports_of_removed_machines().await;
            if self.provisions {
                self.expect_provisioned().await;
            }
            let mut shared = self.interceptor.lock();
            shared.coverage.convergence_checks += 1;
            shared.oracle.update_shared(true);
        }
    }

    fn expect_no_violation(&self) {
        let violations = std::mem::take(&mut self.interceptor.lock().violations);
        if let Some(first) = violations.first() {
            self.fail(first);
        }
    }

    pub(crate) fn fail(&self, what: &str) -> ! {
        panic!("{what}\n{}", self.interceptor.take_log());
    }

    /// S3: foreign rules, groups and machines are unchanged.
    fn expect_foreign_rules_untouched(&self) {
        for &machine in self.foreign.keys() {
            let there = self.interceptor.provider.actual(number(machine)).map(|rules| rules.foreign);
            if there != Some(self.foreign_on(machine)) {
                self.fail(&format!("S3: rules of others on {machine} were touched: {there:?}"));
            }
        }
        if self.interceptor.provider.squatted() != self.taken_group_names {
            self.fail("S3: a group that has only the name of one of ours was touched");
        }
        if self.provisions {
            // The shared group is deleted with the last machine, and the next launch creates it
            // again.
            let truth = self.interceptor.provider.truth();
            let is_used = truth.instances.iter().any(|one| one.state != InstanceState::Terminated);
            if is_used && !truth.groups.iter().any(|group| group.machine.is_none()) {
                self.fail("S3: the group that all machines share was deleted");
            }
            return;
        }
        let theirs = self.interceptor.provider.actual(MachineNumber::new(FOREIGN));
        if theirs.is_none_or(|rules| !rules.owned.is_empty()) {
            self.fail("S3: a foreign group was touched");
        }
    }

    /// S1, L1: once convergence is due, the open ports are the wanted ports, and the reports agree.
    async fn expect_converged(&self) {
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        for machine in machines {
            let Some(open) = self.interceptor.open_on(machine) else { continue };
            let (wanted, kept, frozen, corrupt) = {
                let shared = self.interceptor.lock();
                let oracle = &shared.oracle;
                (
                    oracle.wanted(machine),
                    oracle.kept(machine),
                    oracle.has_frozen(machine),
                    oracle.machines[&machine].corrupt,
                )
            };
            if corrupt {
                continue;
            }
            let missing = wanted.or(kept).minus(self.interceptor.reachable(machine));
            if !missing.is_empty() {
                self.fail(&format!("L1: {machine} has not opened{missing}"));
            }
            // The ports of an unreadable unit are not always known, so closes are not required.
            let extra = open.minus(wanted);
            if !extra.is_empty() && !frozen {
                self.fail(&format!("S1: {machine} has not closed{extra}"));
            }
            self.expect_report(machine).await;
        }
    }

    /// Removed machines have no reports.
    async fn expect_no_reports_of_removed_machines(&self) {
        let reported = self.operator.tree().children(&paths::firewall_reports()).await.unwrap_or_default();
        let shared = self.interceptor.lock();
        let known = |name: &String| {
            MachineId::from_key(name).is_ok_and(|id| shared.oracle.machines.contains_key(&id))
        };
        let removed: Vec<String> = reported.into_iter().filter(|name| !known(name)).collect();
        drop(shared);
        if !removed.is_empty() {
            self.fail(&format!("M1: reports of removed machines: {removed:?}"));
        }
    }

    /// S2: the report names unreadable units and lists every open port.
    async fn expect_report(&self, machine: MachineId) {
        let report = self.report(machine).await;
        // A lost instance is correctly reported as a problem.
        let whole = !self.provisions || self.has_instance(machine).await;
        let shared = self.interceptor.lock();
        let frozen = shared.oracle.on(machine).filter(|(_, unit)| shared.oracle.frozen(unit));
        let frozen: Vec<UnitId> = frozen.map(|(id, _)| id).collect();
        let unreported: Vec<UnitId> =
            frozen.iter().copied().filter(|id| !report.frozen.contains_key(id)).collect();
        let wanted = shared.oracle.wanted(machine);
        drop(shared);
        if !unreported.is_empty() {
            self.fail(&format!("S2: no report says that {unreported:?} cannot be read"));
        }
        // A unit with deleted znodes is a problem of its machine until the unit is restored or
        // removed.
        let deleted = frozen.iter().any(|id| self.has_deleted_nodes(*id));
        if report.is_pending() && whole && !deleted {
            self.fail(&format!("L1: {machine} has converged and reports {:?}", report.problem));
        }
        let granted = report.granted.values().flat_map(|rules| rules.rules().collect::<Vec<_>>());
        let granted = granted.filter_map(|rule| PortBits::of_rule(&rule)).fold(PortBits::NONE, PortBits::or);
        let unreported = wanted.minus(granted);
        if !unreported.is_empty() {
            self.fail(&format!("S2: the report of {machine} omits{unreported}"));
        }
    }

    pub(crate) async fn report(&self, machine: MachineId) -> Report {
        let node = match self.operator.tree().get(&paths::firewall_report(machine)).await {
            Ok(node) => node,
            Err(err) => self.fail(&format!("S2: no report of {machine}: {err}")),
        };
        match Report::parse(&node.data) {
            Ok(report) => report,
            Err(err) => self.fail(&format!("S2: the report of {machine} is garbage: {err}")),
        }
    }

    /// Machines on which a wanted port is closed.
    pub(crate) fn lacking(&self) -> Vec<MachineId> {
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        let lacks = |machine: &MachineId| {
            let wanted = self.interceptor.lock().oracle.wanted(*machine);
            !wanted.minus(self.interceptor.reachable(*machine)).is_empty()
        };
        machines.into_iter().filter(lacks).collect()
    }

    /// Machines on which an unwanted port is open.
    pub(crate) fn surplus(&self) -> Vec<MachineId> {
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        let has = |machine: &MachineId| {
            let wanted = self.interceptor.lock().oracle.wanted(*machine);
            !self.interceptor.open_on(*machine).unwrap_or_default().minus(wanted).is_empty()
        };
        machines.into_iter().filter(has).collect()
    }

    /// Clears the record of past faults: no later failure is excused by them.
    pub(crate) fn forget_faults(&mut self) {
        let mut shared = self.interceptor.lock();
        (shared.retry_fault_at, shared.resync_fault_at) = (None, None);
    }

    /// Called before an action: if the world has no faults, the requests that follow are counted.
    pub(crate) fn begin(&mut self) {
        let before = self.is_due().then(|| {
            let shared = self.interceptor.lock();
            let machines = shared.oracle.machines.iter();
            let readable =
                machines.filter(|(id, machine)| !machine.corrupt && !shared.oracle.has_frozen(**id));
            let wanted = readable.map(|(id, _)| (*id, shared.oracle.wanted(*id))).collect();
            Before {
                writes: shared.writes.clone(),
                wanted,
                faults: [shared.retry_fault_at, shared.resync_fault_at],
            }
        });
        self.before_action = BeforeAction(before);
    }

    /// M1, M2: without a fault, a change costs at most one open request and two close requests per
    /// affected machine (the second close removes rules that were replaced by equivalent ones), and
    /// no request for any other machine.
    pub(crate) fn end(&mut self) {
        let Some(before) = self.before_action.0.take().filter(|_| self.is_without_faults()) else { return };
        let shared = self.interceptor.lock();
        if before.faults != [shared.retry_fault_at, shared.resync_fault_at] {
            return;
        }
        let mut wrong = None;
        for (machine, wanted) in before.wanted {
            if shared.oracle.has_frozen(machine) {
                continue;
            }
            let then = before.writes.get(&machine).copied().unwrap_or_default();
            let now = shared.writes.get(&machine).copied().unwrap_or_default();
            let concerned =
                shared.oracle.machines.contains_key(&machine) && shared.oracle.wanted(machine) != wanted;
            let (opens, closes) = if concerned { (1, 2) } else { (0, 0) };
            if now.opens - then.opens > opens
                || now.closes - then.closes > closes
                || now.repairs != then.repairs
            {
                wrong = Some(format!("M2: {machine} had {then:?} and has {now:?}; concerned: {concerned}"));
            }
        }
        drop(shared);
        if let Some(wrong) = wrong {
            self.fail(&wrong);
        }
    }

    /// Ends all faults, then checks that the agents converge and send no further requests.
    pub(crate) async fn settle(&mut self) {
        self.disarm();
        self.perform(Action::RepairStore).await;
        self.accept_for_all().await;
        // The last change happens while provider calls fail, and no later event triggers a pass.
        self.perform(Action::FailCalls(2)).await;
        let last = if self.random.one_in(2) {
            Action::Expose(self.random.below(3))
        } else {
            Action::Unexpose(self.random.below(3))
        };
        self.perform(last).await;
        self.pause(Duration::from_millis(100)).await;
        self.perform(Action::EndProviderFaults).await;
        self.expect_few_calls().await;
        self.expect_no_writes().await;
        for _ in 0..3 {
            let action = self.choose_operation();
            self.begin();
            self.perform(action).await;
            self.pause(CHANGE_LIMIT + Duration::from_millis(1)).await;
            self.end();
            self.check().await;
        }
    }

    /// L1: after the last fault the agents converge with few calls.
    async fn expect_few_calls(&mut self) {
        let (wrong, machines) = self.wrong();
        let so_far = |world: &World| {
            let shared = world.interceptor.lock();
            (shared.provider_changes, shared.provider_reads)
        };
        let before = so_far(self);
        // An agent that missed an event reads the rules of a removed machine until its next resync.
        let may_be_outdated = self.interceptor.lock().may_be_outdated();
        // A request in progress may end in a fault later than the last one recorded.
        loop {
            let rest = self.recovered_at().expect("no faults");
            let changed = self.interceptor.lock().changed_at;
            let until = rest.max(changed + RETRY_RECOVERY) + Duration::from_secs(1);
            if Instant::now() >= until {
                break;
            }
            self.pause(until - Instant::now()).await;
        }
        self.check().await;
        let (changes, reads) = (so_far(self).0 - before.0, so_far(self).1 - before.1);
        // A machine with the right ports may still need one change, to replace a rule or to repair
        // its group.
        if changes > u64::from(2 * wrong) + machines {
            self.fail(&format!("L1: {changes} changes to correct {wrong} ports on {machines} machines"));
        }
        // Each machine may be handled separately, with a read before and after its change. Agents
        // that provision read at each step.
        let most = if self.provisions { 8 * machines + 6 } else { 2 * machines + 4 };
        // A lost instance that was adopted is looked up repeatedly.
        if reads > most && !may_be_outdated && self.all_have_instances().await {
            self.fail(&format!("L1: {reads} reads to correct {wrong} ports on {machines} machines"));
        }
    }

    /// Returns the number of ports in the wrong state, and the number of machines.
    fn wrong(&self) -> (u32, u64) {
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        let mut wrong = 0;
        for &machine in &machines {
            let open = self.interceptor.open_on(machine).unwrap_or_default();
            let wanted = self.interceptor.lock().oracle.wanted(machine);
            wrong += open.minus(wanted).or(wanted.minus(open)).len();
        }
        (wrong, machines.len() as u64)
    }

    /// M1: a converged world causes no writes, even when an agent restarts.
    async fn expect_no_writes(&mut self) {
        // A lost instance that was adopted is looked up repeatedly.
        let settled = self.all_have_instances().await;
        let so_far = |world: &World| {
            let shared = world.interceptor.lock();
            let provisioned = if settled { shared.provisioned } else { 0 };
            (shared.writes.clone(), shared.report_writes, provisioned, shared.checkpoints)
        };
        let before = so_far(self);
        self.interceptor.controls[0].crash();
        self.pause(RESYNC + Duration::from_secs(20)).await;
        self.expect_no_violation();
        let after = so_far(self);
        if before != after {
            self.fail(&format!("M1: writes after convergence: {before:?}, then {after:?}"));
        }
        // Recovery from the restart above needs no extra time.
        self.forget_faults();
    }
}
