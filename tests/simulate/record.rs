//! The shared record of a running world: pending faults, past faults and how long they excuse
//! failures, counters, and violations. The checks of single calls use it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::memory::Backup;
use portcullis_provider::provider::MachineNumber;
use tokio::time::Instant;

use crate::actions::{DEEP, SHALLOW};
use crate::agents::RESYNC;
use crate::faults::{Coverage, Fault, Kind, Mishap};
use crate::liveness::Owed;
use crate::oracle::{GRACE, History, Oracle};
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
    pub mends: u64,
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
    pub storm: Option<usize>,
    /// How long every request to the provider takes.
    pub sluggish: Option<Duration>,
    /// The minimum interval between requests that change rules, for each kind separately.
    pub scarce: Option<Duration>,
    /// When the next request of each kind may be sent.
    pub turns: BTreeMap<Kind, Instant>,
    /// Requests of this kind are not answered.
    pub hanging: Option<Kind>,
    /// The provider refuses a whole change if any part of it is already in effect.
    pub strict: bool,
    /// The provider refuses every request that would open one of these ports.
    pub refused: PortBits,
    /// Requests that were denied since the agent started, and when.
    denied: BTreeMap<(usize, Kind, MachineId), Instant>,
    /// Until then a third party may have removed a rule that replaced another one.
    pub meddled_until: Instant,
    /// Until then an agent may not have detected that a third party removed a rule.
    pub removed_until: Instant,
    /// The last read of all lists returned them empty. An agent may act on two such reads in a row.
    pub emptied: bool,
    /// When the list of machines alone was last returned empty.
    bare_at: Option<Instant>,
    /// The last fault that retries recover from, and the last that may need a resync.
    pub shallow_at: Option<Instant>,
    pub deep_at: Option<Instant>,
    /// The last slow call.
    slow_at: Option<Instant>,
    /// The last fault that retries recover from, except slow calls.
    fault_at: Option<Instant>,
    /// The provider has a fault.
    pub unusual: bool,
    /// The store was restored: an agent that detects this later closes no port until an operator
    /// accepts the store again.
    pub went_back: bool,
    /// Closes that are wanted and not sent yet.
    pub owed: Owed,
    pub changed_at: Instant,
    /// The period, with start and end, in which an agent may act on outdated data.
    blind: (Instant, Instant),
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
    pub trusted: Vec<BTreeSet<(MachineId, Kind)>>,
    /// Until then a group may be too small to open a replacement before the replaced rule is
    /// closed, or a third party may have removed a replacement.
    pub crowded_until: Instant,
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
    began: Instant,
    /// The time of day at `began`, by the clock as it is set now.
    began_at_ms: u64,
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
            storm: None,
            sluggish: None,
            scarce: None,
            turns: BTreeMap::new(),
            hanging: None,
            strict: false,
            refused: PortBits::NONE,
            denied: BTreeMap::new(),
            meddled_until: now,
            removed_until: now,
            emptied: false,
            bare_at: None,
            shallow_at: None,
            deep_at: None,
            slow_at: None,
            fault_at: None,
            unusual: false,
            went_back: false,
            owed: Owed::default(),
            changed_at: now,
            blind: (now, now),
            writes: BTreeMap::new(),
            report_writes: 0,
            provider_reads: 0,
            provider_changes: 0,
            provisioned: 0,
            listed: vec![BTreeSet::new(); agents],
            past: None,
            trusted: vec![BTreeSet::new(); agents],
            crowded_until: now,
            confirmed: vec![None; agents],
            synced: vec![None; agents],
            lead: None,
            credit: BURST,
            credited_at: now,
            violations: Vec::new(),
            protected: Protected::default(),
            checkpoints: 0,
            began: now,
            began_at_ms: 1_700_000_000_000,
            log: log.then(String::new),
        }
    }

    /// Milliseconds of simulated time since the world began.
    pub(crate) fn millis(&self, at: Instant) -> u128 {
        (at - self.began).as_millis()
    }

    /// The time of day on an agent's clock.
    pub(crate) fn time_of_day_ms(&self) -> u64 {
        self.began_at_ms + u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn set_time_of_day(&mut self, hours: i64) {
        self.began_at_ms = self.began_at_ms.saturating_add_signed(hours * 3_600_000);
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
    pub(crate) fn shallow(&mut self) {
        self.fault_at = Some(Instant::now());
        self.shallow_at = self.fault_at;
    }

    /// Records a fault that may need a resync to recover from.
    pub(crate) fn deep(&mut self) {
        self.deep_at = Some(Instant::now());
    }

    /// Records a slow provider request. Latency excuses delays, but no missing change.
    pub(crate) fn slow(&mut self) {
        self.slow_at = Some(Instant::now());
        self.shallow_at = self.slow_at;
    }

    /// Lets agents act on the state at `since` for this long from now.
    pub(crate) fn blind(&mut self, since: Instant, long: Duration) {
        let since = if self.is_blind() { since.min(self.blind.0) } else { since };
        self.blind = (since, self.blind.1.max(Instant::now() + long));
    }

    pub(crate) fn is_blind(&self) -> bool {
        Instant::now() < self.blind.1
    }

    /// Whether a cause other than latency may prevent a close from being sent.
    fn excuses_closes(&self) -> bool {
        let lately = |at: Option<Instant>, long| at.is_some_and(|at| Instant::now() < at + long);
        let disturbed = self.storm.is_some() || self.scarce.is_some() || self.hanging.is_some();
        let waiting = !self.armed.is_empty() || !self.events.is_empty() || self.outage || self.is_blind();
        let faulty =
            self.unusual || self.went_back || lately(self.fault_at, SHALLOW) || lately(self.deep_at, DEEP);
        disturbed || waiting || faulty
    }

    /// Records that the leader ended a pass and left this `surplus` open.
    pub(crate) fn passed(&mut self, surplus: &BTreeMap<MachineId, PortBits>) {
        if self.excuses_closes() {
            self.owed.clear();
        } else if let Some(overdue) = self.owed.passed(surplus) {
            self.violated(overdue);
        }
    }

    /// Called after every change of the oracle.
    pub(crate) fn changed(&mut self) {
        let now = Instant::now();
        self.oracle.let_go();
        self.oracle.share(false);
        self.history.remember(&self.oracle, now);
        self.changed_at = now;
        self.credit += 40;
    }

    /// Whether a slow call may still be in progress.
    pub(crate) fn slow_lately(&self) -> bool {
        self.deep_at.max(self.slow_at).is_some_and(|at| Instant::now() < at + Duration::from_secs(90))
    }

    pub(crate) fn take_log(&mut self) -> String {
        self.log.take().unwrap_or_default()
    }

    pub(crate) fn born(&mut self, who: usize) {
        self.trusted[who].clear();
        (self.confirmed[who], self.synced[who]) = (None, None);
        self.listed[who].clear();
        self.denied.retain(|(agent, _, _), _| *agent != who);
    }

    /// M3: a denied request is repeated at most once a minute, regardless of other events.
    pub(crate) fn asked(&mut self, who: usize, kind: Kind, machine: MachineId, denied: bool) {
        let now = Instant::now();
        if self.denied.get(&(who, kind, machine)).is_some_and(|at| now < *at + A_MINUTE) {
            self.violated(format!("M3: agent {who} repeats {kind:?} of {machine}, which was denied"));
        }
        if denied {
            self.denied.insert((who, kind, machine), now);
        } else {
            self.denied.remove(&(who, kind, machine));
        }
    }

    /// The fault of the event that is being delivered, if any.
    pub(crate) fn next_event(&mut self) -> Option<Mishap> {
        if self.outage {
            return Some(Mishap::Interrupted);
        }
        let mishap = self.events.pop_front()?;
        self.log(format_args!("    {mishap:?}"));
        self.coverage.happened(mishap);
        if mishap == Mishap::EventMissed {
            self.deep();
            self.blind(Instant::now(), RESYNC + GRACE);
        }
        Some(mishap)
    }

    pub(crate) fn called(&mut self, who: usize, kind: Kind, machine: Option<MachineId>) {
        let now = Instant::now();
        self.coverage.calls += 1;
        let at = self.millis(now);
        self.log(format_args!("{at:>9} agent {who} {kind:?} {machine:?}"));
        // M3: an agent never calls faster than its pauses allow, regardless of failures.
        let passed = (now - self.credited_at).as_secs();
        self.credited_at += Duration::from_secs(passed);
        self.credit = (self.credit + 12 * passed).min(10 * BURST);
        match self.credit.checked_sub(if kind.is_store() { 1 } else { 3 }) {
            Some(left) => self.credit = left,
            // If an agent never waits, the paused clock never advances.
            None => {
                self.violated(format!("M3: agent {who} calls without pausing"));
                panic!("an agent that would go on like this for ever");
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
                && (armed.fault != Fault::Empty || self.doubtful(kind))
        });
        if kind == Kind::ReadLists {
            self.emptied = false;
        }
        if let Some(at) = at {
            if self.armed[at].skip > 0 {
                self.armed[at].skip -= 1;
            } else {
                let fault = self.armed.remove(at).fault;
                if fault == Fault::Empty {
                    self.emptied |= kind == Kind::ReadLists;
                    self.bare_at =
                        if kind == Kind::ReadMachines { Some(Instant::now()) } else { self.bare_at };
                }
                return Some(fault);
            }
        }
        let share = self.storm.filter(|_| !kind.is_store())?;
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
    fn doubtful(&self, kind: Kind) -> bool {
        if kind == Kind::ReadMachines {
            return self.bare_at.is_none_or(|at| Instant::now() > at + 2 * RESYNC);
        }
        !self.emptied
    }

    /// Checks that the effect of a call on a machine was right at some time since the call began or
    /// shortly before.
    pub(crate) fn judge(
        &mut self,
        who: usize,
        machine: MachineId,
        (before, after): (PortBits, PortBits),
        begun: Instant,
    ) {
        if before == after {
            return;
        }
        let (opened, closed) = (after.minus(before), before.minus(after));
        self.judge_restored(machine, opened, closed);
        // S4: no content of the store opens a port that policy denies.
        let denied = opened.and(PortBits::forbidden());
        if !denied.is_empty() {
            self.violated(format!("S4: {machine} opened{denied}, which policy denies"));
        }
        let known = if self.is_blind() { begun.min(self.blind.0) } else { begun };
        let since = known.checked_sub(GRACE).unwrap_or(known);
        // S1, S2: only recently requested ports are opened; unreadable data requests none.
        let mut asked = self.history.ever(machine, since);
        // An agent that missed a change of the flag combines its old value with a unit's current
        // ports.
        if self.is_blind() && !self.oracle.has_frozen(machine) {
            asked = asked.or(self.history.ever_asked(machine, since).mixed());
        }
        let unasked = opened.minus(asked);
        // A rule that is joined with others may hold a port that is kept for an unreadable unit. If
        // a third party removed that rule since the last read, the join opens the port again.
        let rejoined = Instant::now() < self.removed_until && self.oracle.has_frozen(machine);
        if !unasked.is_empty() && !rejoined {
            self.violated(format!("S1: {machine} opened{unasked}, which nobody asks for"));
        }
        // S2, S5: only ports that are no longer requested are closed; never ports that were wanted
        // the whole time, nor the ports of an unreadable unit.
        let robbed = closed.and(self.history.always(machine, since));
        // A lagging read may show a wider rule that no longer exists, so that the narrower one
        // seems redundant. The EC2 driver adds its own writes to its reads; the in-memory provider
        // does not.
        let unseen = Instant::now() < self.crowded_until || self.oracle.lagging;
        let excused = unseen || self.is_overtaken(who, begun);
        if !robbed.is_empty() && !excused {
            self.violated(format!("S2: {machine} closed{robbed}, which is wanted"));
        }
        self.oracle.lost(machine, closed);
        let now = Instant::now();
        self.history.remember(&self.oracle, now);
    }

    /// Whether another agent became the leader after this one began its request. No provider can
    /// refuse a request that was sent in time and arrives late; S6 requires only that its effect
    /// does not last.
    fn is_overtaken(&self, who: usize, begun: Instant) -> bool {
        self.lead.is_some_and(|(leader, since)| leader != who && since >= begun)
    }

    /// S2: a fully wanted rule is closed only if another rule opens the same ports. A full group is
    /// no excuse, because adjacent ports can be joined in time.
    pub(crate) fn judge_closes(
        &mut self,
        who: usize,
        machine: MachineId,
        (closed, after): (impl Iterator<Item = PortBits>, PortBits),
        begun: Instant,
    ) {
        let known = if self.is_blind() { begun.min(self.blind.0) } else { begun };
        let always = self.history.always(machine, known.checked_sub(GRACE).unwrap_or(known));
        if Instant::now() < self.meddled_until || self.oracle.lagging || self.is_overtaken(who, begun) {
            return;
        }
        for rule in closed.filter(|rule| rule.minus(always).is_empty()) {
            let shut = rule.minus(after);
            if !shut.is_empty() {
                self.violated(format!("S2: {machine} closed{shut}, to open it in a wider rule"));
            }
        }
    }
}
