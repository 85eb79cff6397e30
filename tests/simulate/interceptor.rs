//! The interface between the agents and the world: every call of an agent passes through it, is
//! counted, may fail, and has its effect checked. The invariants of single calls are checked here,
//! at the time of the call; those of the world as a whole are in `checks`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::MemoryStore;
use portcullis::store::lease::LEASE;
use portcullis_provider::Memory;
use portcullis_provider::provider::MachineNumber;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::agents::Control;
use crate::faults::{Fault, Kind};
use crate::oracle::Machine;
use crate::port_bits::PortBits;
use crate::random::Random;
use crate::record::Shared;

/// The session timeout of the store.
pub(crate) const SESSION: Duration = Duration::from_secs(10);

/// The timeout of a request that is never answered.
pub(crate) const HANG: Duration = Duration::from_secs(10);

/// The kinds of request that a change of a machine's rules consists of.
const HALVES: [Kind; 3] = [Kind::Open, Kind::Close, Kind::Repair];

#[derive(Clone)]
pub(crate) struct Interceptor {
    shared: Arc<Mutex<Shared>>,
    pub controls: Arc<Vec<Control>>,
    pub store: MemoryStore,
    pub provider: Memory,
    action_during_call: Arc<[Notify; 2]>,
}

impl Interceptor {
    pub(crate) fn new(
        random: Random,
        agents: usize,
        store: MemoryStore,
        provider: Memory,
        log: bool,
    ) -> Self {
        Interceptor {
            shared: Arc::new(Mutex::new(Shared::new(random, agents, log))),
            controls: Arc::new((0..agents).map(|_| Control::default()).collect()),
            store,
            provider,
            action_during_call: Arc::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ports that owned rules open on a machine; `None` if it has no group.
    pub(crate) fn open_on(&self, machine: MachineId) -> Option<PortBits> {
        let rules = self.provider.actual(MachineNumber::new(machine.number()))?;
        let mut open = PortBits::NONE;
        for rule in &rules.owned {
            match PortBits::of_rule(rule) {
                Some(points) => open = open.or(points),
                None => {
                    self.lock().violated(format!("S1: {machine} has {rule}, which no unit ever requested"));
                }
            }
        }
        Some(open)
    }

    /// The ports that owned and foreign rules open on a machine.
    pub(crate) fn reachable(&self, machine: MachineId) -> PortBits {
        let rules = self.provider.actual(MachineNumber::new(machine.number()));
        let exact = rules.into_iter().flat_map(|rules| rules.foreign).filter_map(|foreign| foreign.exact);
        let theirs = exact.filter_map(|rule| PortBits::of_rule(&rule)).fold(PortBits::NONE, PortBits::or);
        self.open_on(machine).unwrap_or_default().or(theirs)
    }

    /// Called at the start of every call: chooses its fault and carries out the part before the
    /// call's effect.
    pub(crate) async fn before(&self, agent: usize, kind: Kind, machine: Option<MachineId>) -> Option<Fault> {
        let fault = {
            let mut shared = self.lock();
            shared.called(agent, kind, machine);
            let fault = shared.choose(kind);
            if let Some(fault) = fault {
                shared.coverage.count_fault(fault, kind);
                shared.log(format_args!("    {fault:?}"));
                match fault {
                    Fault::Slow if !kind.is_store() => shared.record_slow_call(),
                    // Empty: an agent that had no rules to close accepts the empty lists until its
                    // next resync.
                    Fault::Empty
                    | Fault::Slow
                    | Fault::Paused
                    | Fault::ActionDuringCall
                    | Fault::Stale
                    | Fault::Expired => {
                        shared.record_resync_fault();
                    }
                    _ => shared.record_retry_fault(),
                }
            }
            fault
        };
        match fault {
            Some(Fault::CrashBefore) => self.crash_and_wait(agent).await,
            Some(Fault::Stop) => self.controls[agent].stop(),
            Some(Fault::Slow) => {
                let long = self.lock().random.pick(&[900, 2_500, 6_000]);
                sleep(Duration::from_millis(long)).await;
                if kind.is_store() {
                    self.lock().record_resync_fault();
                } else {
                    self.lock().record_slow_call();
                }
            }
            Some(Fault::Paused) => {
                let long = self.lock().random.pick(&[1_000, 4_000, 25_000]);
                self.freeze(agent, Duration::from_millis(long));
                tokio::task::yield_now().await;
            }
            Some(Fault::ActionDuringCall) => {
                self.action_during_call[0].notify_one();
                self.action_during_call[1].notified().await;
            }
            _ => {}
        }
        if self.lock().hanging == Some(kind) {
            self.lock().record_slow_call();
            sleep(HANG).await;
            self.lock().record_slow_call();
            return Some(Fault::LostBefore);
        }
        let latency = self.lock().latency.filter(|_| !kind.is_store());
        if let Some(long) = latency {
            self.lock().record_slow_call();
            sleep(long).await;
            self.lock().record_slow_call();
        }
        fault
    }

    /// Waits for the rate limit of requests that change rules, if there is one, but no longer than
    /// `until`.
    pub(crate) async fn wait_for_rate_limit(&self, kind: Kind, until: Instant) {
        loop {
            let now = Instant::now();
            let ready = {
                let mut shared = self.lock();
                let Some(every) = shared.rate_limit.filter(|_| now < until) else { return };
                shared.record_slow_call();
                let next = shared.next_request_at.entry(kind).or_insert(now);
                if *next <= now {
                    *next = now + every;
                    return;
                }
                *next
            };
            tokio::time::sleep_until(ready.min(until)).await;
        }
    }

    /// Called at the end of every call that took effect.
    pub(crate) async fn after(&self, agent: usize, fault: Option<Fault>) {
        if fault == Some(Fault::CrashAfter) {
            self.crash_and_wait(agent).await;
        }
    }

    async fn crash_and_wait(&self, agent: usize) {
        self.controls[agent].crash();
        std::future::pending::<()>().await;
    }

    /// Waits until a call has reached the point at which another action is to be performed.
    pub(crate) async fn action_during_call(&self) {
        self.action_during_call[0].notified().await;
    }

    pub(crate) fn resume_call(&self) {
        self.action_during_call[1].notify_one();
    }

    /// Freezes the process for a while. Its session expires if that exceeds the session timeout.
    pub(crate) fn freeze(&self, agent: usize, long: Duration) {
        self.controls[agent].freeze(true);
        let interceptor = self.clone();
        tokio::spawn(async move {
            sleep(long.min(SESSION)).await;
            if long > SESSION {
                interceptor.controls[agent].expire(&interceptor.store);
                sleep(long - SESSION).await;
            }
            interceptor.controls[agent].freeze(false);
            let mut shared = interceptor.lock();
            shared.log(format_args!("agent {agent} goes on"));
            shared.record_resync_fault();
        });
    }

    /// S6: a replaced leader writes nothing.
    pub(crate) fn reported(&self, agent: usize) {
        let mut shared = self.lock();
        shared.report_writes += 1;
        if let Some((leader, _)) = shared.lead
            && leader != agent
        {
            shared.violated(format!("S6: agent {agent} reports though {leader} leads"));
        }
    }

    pub(crate) fn took_lock(&self, agent: usize) {
        let mut shared = self.lock();
        shared.log(format_args!("    agent {agent} leads"));
        shared.lead = Some((agent, Instant::now()));
        shared.confirmed[agent] = Some(Instant::now());
    }

    /// The leader has read the lock, which extends its lease from the start of the sync before the
    /// read.
    pub(crate) fn confirmed(&self, agent: usize) {
        let mut shared = self.lock();
        if shared.lead.is_some_and(|(leader, _)| leader == agent) {
            shared.confirmed[agent] = shared.confirmed[agent].max(shared.synced[agent]);
        }
    }

    pub(crate) fn syncs(&self, agent: usize) {
        self.lock().synced[agent] = Some(Instant::now());
    }

    /// Called before a change is sent.
    pub(crate) fn check_before_change(&self, agent: usize, kind: Kind, machine: MachineId) {
        let mut shared = self.lock();
        if kind == Kind::Close {
            shared.unsent_closes.sent(machine);
        }
        // S6: a replaced leader begins no request after its lease has ended.
        if let Some((leader, since)) = shared.lead
            && leader != agent
            && Instant::now() >= since + LEASE
        {
            let since = shared.millis(since);
            shared.violated(format!("S6: agent {agent} acts though {leader} leads since {since}"));
        }
        // An agent that holds the lock must not act on an expired lease either: it may have been
        // replaced.
        if shared.confirmed[agent].is_none_or(|at| Instant::now() >= at + LEASE) {
            shared.violated(format!("S6: agent {agent} changes {machine} after its lease"));
        }
        // S3: only machines of the tree are changed, including those that were removed recently.
        if machine.number() >= FOREIGN {
            shared.violated(format!("S3: {machine} is foreign"));
        }
        // After a failure the rules of a machine are unknown. The next change has to be planned
        // from a later read; otherwise a provider that refuses whole batches would refuse it every
        // time.
        if !shared.rules_read[agent].contains(&(machine, kind)) {
            shared.violated(format!("S2: agent {agent} changes {machine} without reading its rules"));
        }
    }

    /// Called after each pass. L3: open and unwanted rules are closed within a bounded number of
    /// passes.
    pub(crate) fn passed(&self, agent: usize) {
        let mut surplus = BTreeMap::new();
        {
            let shared = self.lock();
            if shared.lead.is_none_or(|(leader, _)| leader != agent) {
                return;
            }
            let readable =
                |(id, machine): &(&MachineId, &Machine)| !machine.corrupt && !shared.oracle.has_frozen(**id);
            let machines = shared.oracle.machines.iter().filter(readable);
            surplus.extend(machines.map(|(id, _)| (*id, shared.oracle.wanted(*id))));
        }
        surplus.retain(|machine, points| {
            *points = self.open_on(*machine).unwrap_or_default().minus(*points);
            !points.is_empty()
        });
        self.lock().passed(&surplus);
    }

    pub(crate) fn record_read(&self, agent: usize, machines: impl Iterator<Item = MachineId>) {
        let each = machines.flat_map(|machine| HALVES.map(|half| (machine, half)));
        self.lock().rules_read[agent].extend(each);
    }

    /// Records the result of one request of a change.
    pub(crate) fn record_change(
        &self,
        agent: usize,
        kind: Kind,
        machine: MachineId,
        change: (PortBits, PortBits),
        begun: Instant,
        ok: bool,
    ) {
        let mut shared = self.lock();
        let writes = shared.writes.entry(machine).or_default();
        match kind {
            Kind::Open => writes.opens += 1,
            Kind::Close => writes.closes += 1,
            _ => writes.repairs += 1,
        }
        // The requests of one change are independent: if one has failed, the other may still be
        // sent once.
        let rules_read = &mut shared.rules_read[agent];
        if !ok || !HALVES.iter().all(|half| rules_read.contains(&(machine, *half))) {
            rules_read.remove(&(machine, kind));
        }
        shared.log(format_args!(
            "    {} -> {} points, {}",
            change.0.len(),
            change.1.len(),
            if ok { "ok" } else { "failed" }
        ));
        shared.check_effect(agent, machine, change, begun);
    }

    pub(crate) fn take_log(&self) -> String {
        self.lock().take_log()
    }
}

/// Machines with this number or a higher one are foreign.
pub(crate) const FOREIGN: u32 = 900;
