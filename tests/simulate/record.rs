//! The shared record of a running world: pending faults, past faults and how long they excuse
//! failures, counters, and violations. The checks of single calls use it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::memory::Backup;
use portcullis_provider::provider::MachineNumber;
use tokio::time::Instant;

use crate::actions::{RESYNC_RECOVERY, RETRY_RECOVERY};
use crate::agents::RESYNC;
use crate::faults::{Coverage, Fault, Kind, Mishap};
use crate::liveness::UnsentCloses;
use crate::oracle::{History, MAX_AGE, Oracle};
use crate::port_bits::PortBits;
use crate::random::Random;
use crate::restored::Protected;

/// The minimum time between a denied request and its repetition.
const A_MINUTE: Duration = Duration::from_secs(60);

/// How many calls an agent may make beyond those that time and events allow (M3).
const BURST: u64 = 400;

/// A fault that is pending until a matching call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Armed {
    pub fault: Fault,
    /// `None` matches any call.
    pub kind: Option<Kind>,
    /// How many matching calls succeed first.
    pub skip: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Writes {
    pub opens: u64,
    pub closes: u64,
    pub repairs: u64,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub random: Random,
    pub oracle: Oracle,
    pub history: History,
    pub coverage: Coverage,
    pub armed: Vec<Armed>,
    /// Faults of the next events that a feed delivers.
    pub events: VecDeque<Mishap>,
    /// All connections are lost, and events with them.
    pub outage: bool,
    /// One provider call in this many fails.
    pub failing_share: Option<usize>,
    /// How long every request to the provider takes.
    pub latency: Option<Duration>,
    /// The minimum interval between requests that change rules, for each kind separately.
    pub rate_limit: Option<Duration>,
    /// When the next request of each kind may be sent.
    pub next_request_at: BTreeMap<Kind, Instant>,
    /// Requests of this kind are not answered.
    pub hanging: Option<Kind>,
    /// The provider refuses a whole change if any part of it is already in effect.
    pub refuses_duplicates: bool,
    /// The provider refuses every request that would open one of these ports.
    pub refused: PortBits,
    /// Requests that were denied since the agent started, and when.
    denied: BTreeMap<(usize, Kind, MachineId), Instant>,
    /// Until then a third party may have removed a rule that replaced another one.
    pub replacement_removed_until: Instant,
    /// Until then an agent may not have detected that a third party removed a rule.
    pub removed_until: Instant,
    /// The last read of all lists returned them empty. An agent may act on two such reads in a row.
    pub lists_were_empty: bool,
    /// When the list of machines alone was last returned empty.
    machines_empty_at: Option<Instant>,
    /// The last fault that retries recover from, and the last that may need a resync.
    pub retry_fault_at: Option<Instant>,
    pub resync_fault_at: Option<Instant>,
    /// The last slow call.
    slow_at: Option<Instant>,
    /// The last fault that retries recover from, except slow calls.
    fault_at: Option<Instant>,
    /// The provider has a fault.
    pub provider_has_fault: bool,
    /// The store was restored: an agent that detects this later closes no port until an operator
    /// accepts the store again.
    pub was_restored: bool,
    /// Closes that are wanted and not sent yet.
    pub unsent_closes: UnsentCloses,
    pub changed_at: Instant,
    /// The period, with start and end, in which an agent may act on outdated data.
    outdated_period: (Instant, Instant),
    pub writes: BTreeMap<MachineId, Writes>,
    pub report_writes: u64,
    pub provider_reads: u64,
    /// Requests that change rules.
    pub provider_changes: u64,
    /// Requests that change instances or their groups.
    pub provisioned: u64,
    /// By agent: the machines for which its last list showed an instance.
    pub listed: Vec<BTreeSet<MachineNumber>>,
    pub past: Option<Backup>,
    /// By agent: the machines it has read since it started, with the kinds of request that have not
    /// failed since.
    pub rules_read: Vec<BTreeSet<(MachineId, Kind)>>,
    /// Until then a group may be too small to open a replacement before the replaced rule is
    /// closed, or a third party may have removed a replacement.
    pub full_until: Instant,
    /// By agent: when it took the lock, or began the sync before it last read that it holds the
    /// lock.
    pub confirmed: Vec<Option<Instant>>,
    /// By agent: when it last began a sync.
    pub synced: Vec<Option<Instant>>,
    /// The agent that took the lock last, and when.
    pub lead: Option<(usize, Instant)>,
    credit: u64,
    credited_at: Instant,
    pub violations: Vec<String>,
    /// Rules and machines that were made after a backup.
    pub protected: Protected,
    /// Checkpoints that agents wrote.
    pub checkpoints: u64,
    started_at: Instant,
    /// The time of day at `started_at`, by the clock as it is set now.
    started_at_ms: u64,
    log: Option<String>,
}

impl Shared {
    pub(crate) fn new(random: Random, agents: usize, log: bool) -> Self {
        let now = Instant::now();
        Shared {
            random,
            oracle: Oracle::default(),
            history: History::default(),
            coverage: Coverage::default(),
            armed: Vec::new(),
            events: VecDeque::new(),
            outage: false,
            failing_share: None,
            latency: None,
            rate_limit: None,
            next_request_at: BTreeMap::new(),
            hanging: None,
            refuses_duplicates: false,
            refused: PortBits::NONE,
            denied: BTreeMap::new(),
            replacement_removed_until: now,
            removed_until: now,
            lists_were_empty: false,
            machines_empty_at: None,
            retry_fault_at: None,
            resync_fault_at: None,
            slow_at: None,
            fault_at: None,
            provider_has_fault: false,
            was_restored: false,
            unsent_closes: UnsentCloses::default(),
            changed_at: now,
            outdated_period: (now, now),
            writes: BTreeMap::new(),
            report_writes: 0,
            provider_reads: 0,
            provider_changes: 0,
            provisioned: 0,
            listed: vec![BTreeSet::new(); agents],
            past: None,
            rules_read: vec![BTreeSet::new(); agents],
            full_until: now,
            confirmed: vec![None; agents],
            synced: vec![None; agents],
            lead: None,
            credit: BURST,
            credited_at: now,
            violations: Vec::new(),
            protected: Protected::default(),
            checkpoints: 0,
            started_at: now,
            started_at_ms: 1_700_000_000_000,
            log: log.then(String::new),
        }
    }

    /// Milliseconds of simulated time since the world began.
    pub(crate) fn millis(&self, at: Instant) -> u128 {
        (at - self.started_at).as_millis()
    }

    /// The time of day on an agent's clock.
    pub(crate) fn time_of_day_ms(&self) -> u64 {
        self.started_at_ms + u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn set_time_of_day(&mut self, hours: i64) {
        self.started_at_ms = self.started_at_ms.saturating_add_signed(hours * 3_600_000);
    }

    pub(crate) fn log(&mut self, line: std::fmt::Arguments<'_>) {
        if let Some(log) = &mut self.log {
            let _infallible = writeln!(log, "{line}");
        }
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.log(format_args!("VIOLATED {what}"));
        self.violations.push(what);
    }

    /// Adds a pending fault. A lagging server shows the state `past`.
    pub(crate) fn arm(&mut self, armed: Armed, past: Option<Backup>) {
        self.past = past.or(self.past.take());
        self.armed.push(armed);
    }

    /// Records a fault that retries recover from.
    pub(crate) fn record_retry_fault(&mut self) {
        self.fault_at = Some(Instant::now());
        self.retry_fault_at = self.fault_at;
    }

    /// Records a fault that may need a resync to recover from.
    pub(crate) fn record_resync_fault(&mut self) {
        self.resync_fault_at = Some(Instant::now());
    }

    /// Records a slow provider request. Latency excuses delays, but no missing change.
    pub(crate) fn record_slow_call(&mut self) {
        self.slow_at = Some(Instant::now());
        self.retry_fault_at = self.slow_at;
    }

    /// Lets agents act on the state at `since` for this long from now.
    pub(crate) fn allow_outdated_data(&mut self, since: Instant, long: Duration) {
        let since = if self.may_be_outdated() { since.min(self.outdated_period.0) } else { since };
        self.outdated_period = (since, self.outdated_period.1.max(Instant::now() + long));
    }

    pub(crate) fn may_be_outdated(&self) -> bool {
        Instant::now() < self.outdated_period.1
    }

    /// Whether a cause other than latency may prevent a close from being sent.
    fn excuses_closes(&self) -> bool {
        let lately = |at: Option<Instant>, long| at.is_some_and(|at| Instant::now() < at + long);
        let disturbed = self.failing_share.is_some() || self.rate_limit.is_some() || self.hanging.is_some();
        let waiting =
            !self.armed.is_empty() || !self.events.is_empty() || self.outage || self.may_be_outdated();
        let faulty = self.provider_has_fault
            || self.was_restored
            || lately(self.fault_at, RETRY_RECOVERY)
            || lately(self.resync_fault_at, RESYNC_RECOVERY);
        disturbed || waiting || faulty
    }

    /// Records that the leader ended a pass and left this `surplus` open.
    pub(crate) fn passed(&mut self, surplus: &BTreeMap<MachineId, PortBits>) {
        if self.excuses_closes() {
            self.unsent_closes.clear();
        } else if let Some(overdue) = self.unsent_closes.passed(surplus) {
            self.violated(overdue);
        }
    }

    /// Called after every change of the oracle.
    pub(crate) fn changed(&mut self) {
        let now = Instant::now();
        self.oracle.drop_kept_of_readable();
        self.oracle.update_shared(false);
        self.history.remember(&self.oracle, now);
        self.changed_at = now;
        self.credit += 40;
    }

    /// Whether a slow call may still be in progress.
    pub(crate) fn slow_lately(&self) -> bool {
        self.resync_fault_at.max(self.slow_at).is_some_and(|at| Instant::now() < at + Duration::from_secs(90))
    }

    pub(crate) fn take_log(&mut self) -> String {
        self.log.take().unwrap_or_default()
    }

    pub(crate) fn started(&mut self, agent: usize) {
        self.rules_read[agent].clear();
        (self.confirmed[agent], self.synced[agent]) = (None, None);
        self.listed[agent].clear();
        self.denied.retain(|(other, _, _), _| *other != agent);
    }

    /// M3: a denied request is repeated at most once a minute, regardless of other events.
    pub(crate) fn record_request(&mut self, agent: usize, kind: Kind, machine: MachineId, denied: bool) {
        let now = Instant::now();
        if self.denied.get(&(agent, kind, machine)).is_some_and(|at| now < *at + A_MINUTE) {
            self.violated(format!("M3: agent {agent} repeats {kind:?} of {machine}, which was denied"));
        }
        if denied {
            self.denied.insert((agent, kind, machine), now);
        } else {
            self.denied.remove(&(agent, kind, machine));
        }
    }

    /// The fault of the event that is being delivered, if any.
    pub(crate) fn next_event(&mut self) -> Option<Mishap> {
        if self.outage {
            return Some(Mishap::Interrupted);
        }
        let mishap = self.events.pop_front()?;
        self.log(format_args!("    {mishap:?}"));
        self.coverage.count_mishap(mishap);
        if mishap == Mishap::EventMissed {
            self.record_resync_fault();
            self.allow_outdated_data(Instant::now(), RESYNC + MAX_AGE);
        }
        Some(mishap)
    }

    pub(crate) fn called(&mut self, agent: usize, kind: Kind, machine: Option<MachineId>) {
        let now = Instant::now();
        self.coverage.calls += 1;
        let at = self.millis(now);
        self.log(format_args!("{at:>9} agent {agent} {kind:?} {machine:?}"));
        // M3: an agent never calls faster than its pauses allow, regardless of failures.
        let passed = (now - self.credited_at).as_secs();
        self.credited_at += Duration::from_secs(passed);
        self.credit = (self.credit + 12 * passed).min(10 * BURST);
        match self.credit.checked_sub(if kind.is_store() { 1 } else { 3 }) {
            Some(left) => self.credit = left,
            // If an agent never waits, the paused clock never advances.
            None => {
                self.violated(format!("M3: agent {agent} calls without pausing"));
                panic!("an agent that never pauses");
            }
        }
        match kind {
            Kind::Open | Kind::Close | Kind::Repair => self.provider_changes += 1,
            Kind::Observe | Kind::List => self.provider_reads += 1,
            _ => {}
        }
    }

    pub(crate) fn choose(&mut self, kind: Kind) -> Option<Fault> {
        let at = self.armed.iter().position(|armed| {
            armed.kind.is_none_or(|wanted| wanted == kind)
                && armed.fault.possible_at(kind)
                && (armed.fault != Fault::Empty || self.needs_confirmation(kind))
        });
        if kind == Kind::ReadLists {
            self.lists_were_empty = false;
        }
        if let Some(at) = at {
            if self.armed[at].skip > 0 {
                self.armed[at].skip -= 1;
            } else {
                let fault = self.armed.remove(at).fault;
                if fault == Fault::Empty {
                    self.lists_were_empty |= kind == Kind::ReadLists;
                    self.machines_empty_at = if kind == Kind::ReadMachines {
                        Some(Instant::now())
                    } else {
                        self.machines_empty_at
                    };
                }
                return Some(fault);
            }
        }
        let share = self.failing_share.filter(|_| !kind.is_store())?;
        if !self.random.one_in(share) {
            return None;
        }
        let errors: Vec<Fault> = Fault::ALL
            .iter()
            .copied()
            .filter(|f| f.provider_error(None).is_some() && f.possible_at(kind))
            .collect();
        Some(self.random.pick(&errors))
    }

    /// Whether the agent has to confirm an empty read, because the previous read was not empty.
    fn needs_confirmation(&self, kind: Kind) -> bool {
        if kind == Kind::ReadMachines {
            return self.machines_empty_at.is_none_or(|at| Instant::now() > at + 2 * RESYNC);
        }
        !self.lists_were_empty
    }

    /// Checks that the effect of a call on a machine was right at some time since the call began or
    /// shortly before.
    pub(crate) fn check_effect(
        &mut self,
        agent: usize,
        machine: MachineId,
        (before, after): (PortBits, PortBits),
        begun: Instant,
    ) {
        if before == after {
            return;
        }
        let (opened, closed) = (after.minus(before), before.minus(after));
        self.check_against_restore(machine, opened, closed);
        // S4: no content of the store opens a port that policy denies.
        let denied = opened.and(PortBits::forbidden());
        if !denied.is_empty() {
            self.violated(format!("S4: {machine} opened{denied}, which policy denies"));
        }
        let known = if self.may_be_outdated() { begun.min(self.outdated_period.0) } else { begun };
        let since = known.checked_sub(MAX_AGE).unwrap_or(known);
        // S1, S2: only recently requested ports are opened; unreadable data requests none.
        let mut requested = self.history.ever(machine, since);
        // An agent that missed a change of the flag combines its old value with a unit's current
        // ports.
        if self.may_be_outdated() && !self.oracle.has_frozen(machine) {
            requested = requested.or(self.history.ever_requested(machine, since).every_combination());
        }
        let unrequested = opened.minus(requested);
        // A rule that is joined with others may hold a port that is kept for an unreadable unit. If
        // a third party removed that rule since the last read, the join opens the port again.
        let may_rejoin = Instant::now() < self.removed_until && self.oracle.has_frozen(machine);
        if !unrequested.is_empty() && !may_rejoin {
            self.violated(format!("S1: {machine} opened{unrequested}, which no unit requests"));
        }
        // S2, S5: only ports that are no longer requested are closed; never ports that were wanted
        // the whole time, nor the ports of an unreadable unit.
        let closed_wanted = closed.and(self.history.always(machine, since));
        // A lagging read may show a wider rule that no longer exists, so that the narrower one
        // seems redundant. The EC2 driver adds its own writes to its reads; the in-memory provider
        // does not.
        let unseen = Instant::now() < self.full_until || self.oracle.lagging;
        let excused = unseen || self.was_replaced_during(agent, begun);
        if !closed_wanted.is_empty() && !excused {
            self.violated(format!("S2: {machine} closed{closed_wanted}, which is wanted"));
        }
        self.oracle.lost(machine, closed);
        let now = Instant::now();
        self.history.remember(&self.oracle, now);
    }

    /// Whether another agent became the leader after this one began its request. No provider can
    /// refuse a request that was sent in time and arrives late; S6 requires only that its effect
    /// does not last.
    fn was_replaced_during(&self, agent: usize, begun: Instant) -> bool {
        self.lead.is_some_and(|(leader, since)| leader != agent && since >= begun)
    }

    /// S2: a fully wanted rule is closed only if another rule opens the same ports. A full group is
    /// no excuse, because adjacent ports can be joined in time.
    pub(crate) fn check_closes(
        &mut self,
        agent: usize,
        machine: MachineId,
        (closed, after): (impl Iterator<Item = PortBits>, PortBits),
        begun: Instant,
    ) {
        let known = if self.may_be_outdated() { begun.min(self.outdated_period.0) } else { begun };
        let always = self.history.always(machine, known.checked_sub(MAX_AGE).unwrap_or(known));
        if Instant::now() < self.replacement_removed_until
            || self.oracle.lagging
            || self.was_replaced_during(agent, begun)
        {
            return;
        }
        for rule in closed.filter(|rule| rule.minus(always).is_empty()) {
            let closed = rule.minus(after);
            if !closed.is_empty() {
                self.violated(format!("S2: {machine} closed{closed}, to open it in a wider rule"));
            }
        }
    }
}
