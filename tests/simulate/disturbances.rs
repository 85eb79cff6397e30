//! Disturbances other than faults of single calls: processes, connections, clocks, the provider,
//! and manual changes by third parties.

use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{Cidr, MachineId};
use portcullis_provider::memory::Rewrite;
use portcullis_provider::provider::Foreign;
use portcullis_provider::rule::{Rule, WirePorts};
use tokio::time::Instant;

use crate::actions::Action;
use crate::agents::RESYNC;
use crate::faults::{Fault, Mishap};
use crate::oracle::MAX_AGE;
use crate::port_bits::PortBits;
use crate::world::{World, number};

const OUTAGE: Duration = Duration::from_millis(400);

impl World {
    pub(crate) async fn perform_disturbance(&mut self, action: Action) {
        let agents = self.agents();
        match action {
            Action::Interrupt => self.interrupt_connections(),
            Action::Expire(agent) => {
                self.count_mishap(Mishap::SessionExpired);
                // Two agents may act for the length of a lease, and only a resync is sure to detect
                // the result.
                self.interceptor.lock().record_resync_fault();
                self.interceptor.controls[agent % agents].expire(&self.interceptor.store);
            }
            Action::Crash(agent) => {
                self.count_mishap(Mishap::Crashed);
                self.interceptor.lock().record_retry_fault();
                self.interceptor.controls[agent % agents].crash();
            }
            Action::Stop(agent) => {
                self.count_mishap(Mishap::Stopped);
                self.interceptor.lock().record_retry_fault();
                self.interceptor.controls[agent % agents].stop();
            }
            Action::Freeze(agent, ms) => {
                self.count_mishap(Mishap::FrozenProcess);
                self.interceptor.lock().record_resync_fault();
                self.interceptor.freeze(agent % agents, Duration::from_millis(ms));
            }
            Action::Jump(ms) => self.jump(Duration::from_millis(ms)).await,
            // The agents must not depend on the time of day, so this does not count as a fault.
            Action::SetTimeOfDay(hours) => {
                self.count_mishap(Mishap::TimeOfDaySet);
                self.interceptor.lock().set_time_of_day(hours);
            }
            Action::Events(mishap, count) => {
                self.interceptor.lock().events.extend(std::iter::repeat_n(mishap, count));
            }
            Action::Arm(armed) => {
                let past = (armed.fault == Fault::Stale).then(|| self.interceptor.store.backup());
                self.interceptor.lock().arm(armed, past);
                if let Some(kind) = armed.kind.filter(|kind| kind.is_provisioning()) {
                    self.cause_call(kind).await;
                }
            }
            // Missing znodes could not be put back after a restore, so no backup is made while
            // there are any.
            Action::Backup if !self.deleted_nodes.is_empty() => {}
            Action::Backup => self.back_up(),
            Action::Restore => self.restore(),
            Action::Accept => self.accept().await,
            _ => {}
        }
    }

    /// Loses the connections of all agents to the store for a moment.
    fn interrupt_connections(&mut self) {
        self.count_mishap(Mishap::Interrupted);
        let mut shared = self.interceptor.lock();
        shared.record_retry_fault();
        // No agent receives events during the outage; afterwards all agents get an event to read
        // everything again.
        shared.outage = true;
        drop(shared);
        let interceptor = self.interceptor.clone();
        tokio::spawn(async move {
            tokio::time::sleep(OUTAGE).await;
            let mut shared = interceptor.lock();
            shared.outage = false;
            shared.record_retry_fault();
            shared.allow_outdated_data(Instant::now() - OUTAGE, MAX_AGE);
            drop(shared);
            interceptor.store.interrupt();
        });
    }

    /// Advances the monotonic clock of all processes at once.
    async fn jump(&mut self, time: Duration) {
        self.count_mishap(Mishap::ClockJumped);
        self.interceptor.lock().record_resync_fault();
        let before = Instant::now();
        tokio::time::advance(time).await;
        let mut shared = self.interceptor.lock();
        shared.record_resync_fault();
        // No agent ran during the jump, so none has processed the events from before it.
        shared.allow_outdated_data(before, Duration::from_secs(1));
    }

    pub(crate) fn edit_rules(&mut self, what: Mishap, machine: usize) {
        let id = self.machine(machine);
        if self.interceptor.open_on(id).is_none() {
            return;
        }
        self.count_mishap(what);
        self.interceptor.lock().record_resync_fault();
        let rule = |text: &str| Rule::new(parse_argument(text).expect("a port"), Cidr::WORLD_V4);
        let foreign = |port: i32, source: &str| {
            let wire = WirePorts { proto: "tcp", from: Some(port), to: Some(port) };
            Foreign::from_wire(wire, source.parse().expect("a block"))
        };
        let before = self.interceptor.open_on(id).unwrap_or_default();
        let (mut added, mut removed) = (None, None);
        self.interceptor.provider.tamper(number(id), |rules| match what {
            Mishap::RuleRemoved => removed = rules.owned.pop_first(),
            Mishap::RuleAdded => _ = rules.owned.insert(rule("82")),
            Mishap::ForeignAdded => added = Some(foreign(5432, "10.0.0.0/8")),
            Mishap::ForeignEqual if !rules.owned.contains(&rule("81")) => {
                added = Some(foreign(81, "0.0.0.0/0"));
            }
            Mishap::GroupDrift => rules.drift.push("its name".to_owned()),
            _ => {}
        });
        if what == Mishap::NameTaken {
            self.taken_group_names.insert(number(id));
            self.interceptor.provider.squat(number(id));
        }
        if matches!(what, Mishap::GroupDeleted | Mishap::NameTaken) {
            self.foreign.remove(&id);
            self.interceptor.provider.remove_group(number(id));
        }
        if let Some(added) = added.filter(|added| !self.foreign_on(id).contains(added)) {
            self.foreign.entry(id).or_default().push(added.clone());
            self.interceptor.provider.tamper(number(id), |rules| rules.foreign.push(added));
        }
        let open = self.interceptor.open_on(id).unwrap_or_default();
        let lost = before.minus(open);
        let mut shared = self.interceptor.lock();
        // Another rule covers the same ports and may be about to be closed, because the removed
        // rule replaced it.
        if !removed.and_then(|rule| PortBits::of_rule(&rule)).unwrap_or_default().and(open).is_empty() {
            shared.full_until = shared.full_until.max(Instant::now() + RESYNC + MAX_AGE);
            shared.replacement_removed_until =
                shared.replacement_removed_until.max(Instant::now() + RESYNC + MAX_AGE);
        }
        if removed.is_some() {
            shared.removed_until = Instant::now() + RESYNC + MAX_AGE;
        }
        shared.oracle.lost(id, lost);
        shared.changed();
    }

    pub(crate) fn foreign_on(&self, machine: MachineId) -> Vec<Foreign> {
        self.foreign.get(&machine).cloned().unwrap_or_default()
    }

    pub(crate) fn provider(&mut self, what: Mishap, amount: usize) {
        self.count_mishap(what);
        self.interceptor.lock().record_resync_fault();
        self.interceptor.lock().provider_has_fault = true;
        self.interceptor.lock().refuses_duplicates |= what == Mishap::RefusesDuplicates;
        self.interceptor.lock().oracle.lagging |= what == Mishap::DescribeLags;
        self.interceptor.provider.configure(|settings| match what {
            Mishap::DescribeLags => settings.lag_calls = 1 + amount as u64 % 4,
            Mishap::RewritesRanges => settings.rewrite = Rewrite::Spelling,
            Mishap::SplitsRanges => settings.rewrite = Rewrite::Halves,
            Mishap::Quota => settings.rules_per_family = 2 + amount % 6,
            Mishap::NoLaunchDeduplication => settings.forgets_launches = true,
            _ => {}
        });
    }

    /// Ends all faults of the provider. Their effects may persist for a while.
    pub(crate) fn end_provider_faults(&mut self) {
        self.interceptor.provider.configure(|settings| {
            if *settings != self.normal_settings {
                self.interceptor.lock().record_resync_fault();
            }
            settings.clone_from(&self.normal_settings);
        });
        let machines: Vec<MachineId> = self.interceptor.lock().oracle.machines.keys().copied().collect();
        for machine in machines {
            if self.interceptor.open_on(machine).is_none() {
                self.interceptor.lock().record_resync_fault();
                if self.provisions {
                    continue;
                }
                self.interceptor.provider.add_group(number(machine));
            }
        }
        if !std::mem::take(&mut self.taken_group_names).is_empty() {
            self.interceptor.provider.end_squatting();
            self.interceptor.lock().record_resync_fault();
        }
        let mut shared = self.interceptor.lock();
        if shared.failing_share.take().is_some() {
            shared.record_retry_fault();
        }
        if shared.latency.take().is_some()
            | shared.rate_limit.take().is_some()
            | shared.hanging.take().is_some()
        {
            shared.record_slow_call();
        }
        (shared.refuses_duplicates, shared.provider_has_fault) = (false, false);
    }

    /// Removes all faults that are still pending.
    pub(crate) fn disarm(&mut self) {
        let mut shared = self.interceptor.lock();
        shared.armed.clear();
        shared.events.clear();
        shared.past = None;
    }

    /// Whether a fault persists or is pending.
    pub(crate) fn has_faults(&self) -> bool {
        let shared = self.interceptor.lock();
        let busy = shared.latency.is_some() || shared.rate_limit.is_some() || shared.hanging.is_some();
        let provider_has_faults =
            shared.failing_share.is_some() || busy || !self.taken_group_names.is_empty();
        provider_has_faults || !shared.armed.is_empty() || !shared.events.is_empty()
    }
}
