//! What is known of a world while it goes on: the faults that wait for their call, what was wrong and until when, what was
//! counted, and what was found to be wrong. Whoever wants to judge a call asks here what was so at the time.

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
use crate::points::Points;
use crate::random::Random;
use crate::restored::Protected;

/// The least time between two requests of which the first was denied.
const A_MINUTE: Duration = Duration::from_secs(60);

/// Calls that an agent may have made more than time and events alone allow for (M3).
const BURST: u64 = 400;

/// A fault that waits for its call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Armed {
    pub fault: Fault,
    /// Any call if none.
    pub kind: Option<Kind>,
    /// How many such calls go by first.
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
    /// What becomes of the next events that somebody waits for.
    pub events: VecDeque<Mishap>,
    /// Connections are away, and events with them.
    pub outage: bool,
    /// One provider call in so many fails.
    pub storm: Option<usize>,
    /// How long every request to the provider takes.
    pub sluggish: Option<Duration>,
    /// A request that changes rules is let through every so often only, those of one kind and those of another each.
    pub scarce: Option<Duration>,
    /// When the next one of a kind may be sent.
    pub turns: BTreeMap<Kind, Instant>,
    /// Requests of this kind are not answered.
    pub hanging: Option<Kind>,
    /// The provider refuses a change as a whole if any of it is already so.
    pub strict: bool,
    /// The provider refuses every request that would open one of these.
    pub refused: Points,
    /// Per agent the requests that were denied in this life, and when.
    denied: BTreeMap<(usize, Kind, MachineId), Instant>,
    /// Until then a rule that replaced another one may be gone because somebody took it away.
    pub meddled_until: Instant,
    /// The last who asked for all lists were told that they are empty. Who is told so twice in a row may believe it.
    pub emptied: bool,
    /// The same of the list of machines alone, and when.
    bare_at: Option<Instant>,
    /// The last fault that retries make good, and the last that only a resync is sure to.
    pub shallow_at: Option<Instant>,
    pub deep_at: Option<Instant>,
    /// The last call that took long.
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
    /// An agent may not know what it should: since when, and until when.
    blind: (Instant, Instant),
    pub writes: BTreeMap<MachineId, Writes>,
    pub report_writes: u64,
    pub provider_reads: u64,
    /// Requests that change rules.
    pub provider_changes: u64,
    /// Requests that change instances or their groups.
    pub provisioned: u64,
    /// Per agent the machines that it was last shown an instance of.
    pub listed: Vec<BTreeSet<MachineNumber>>,
    pub past: Option<Backup>,
    /// Per agent the machines that it has seen in this life, with the requests that have not failed since.
    pub trusted: Vec<BTreeSet<(MachineId, Kind)>>,
    /// Until then groups are so small that something has to make room for what replaces it, or what replaced something
    /// was taken away by somebody.
    pub crowded_until: Instant,
    /// Per agent when it began to make sure of what it then was shown of the lock, or took it.
    pub confirmed: Vec<Option<Instant>>,
    /// Per agent when it last began to make sure that what it is shown is up to date.
    pub synced: Vec<Option<Instant>>,
    /// Who took the lock last, and when.
    pub lead: Option<(usize, Instant)>,
    credit: u64,
    credited_at: Instant,
    pub violations: Vec<String>,
    /// Rules and machines that were made after a backup.
    pub protected: Protected,
    /// Checkpoints that agents wrote.
    pub checkpoints: u64,
    began: Instant,
    /// What the time of day was then, by the clock as it is set now.
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
            refused: Points::NONE,
            denied: BTreeMap::new(),
            meddled_until: now,
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

    /// On the world's own clock.
    pub(crate) fn millis(&self, at: Instant) -> u128 {
        (at - self.began).as_millis()
    }

    /// What an agent takes the time of day for.
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

    /// A fault waits for its call. Whoever meets a server that is behind sees this `past`.
    pub(crate) fn arm(&mut self, armed: Armed, past: Option<Backup>) {
        self.past = past.or(self.past.take());
        self.armed.push(armed);
    }

    /// Retries make good what is wrong from here.
    pub(crate) fn shallow(&mut self) {
        self.fault_at = Some(Instant::now());
        self.shallow_at = self.fault_at;
    }

    /// Only a resync is sure to make good what is wrong from here.
    pub(crate) fn deep(&mut self) {
        self.deep_at = Some(Instant::now());
    }

    /// A request to the provider takes long. That delays what is wanted, and is no excuse for leaving it undone.
    pub(crate) fn slow(&mut self) {
        self.slow_at = Some(Instant::now());
        self.shallow_at = self.slow_at;
    }

    /// From `since` on, and for this long from now, an agent may act on what was so at `since`.
    pub(crate) fn blind(&mut self, since: Instant, long: Duration) {
        let since = if self.is_blind() { since.min(self.blind.0) } else { since };
        self.blind = (since, self.blind.1.max(Instant::now() + long));
    }

    pub(crate) fn is_blind(&self) -> bool {
        Instant::now() < self.blind.1
    }

    /// Whether something other than latency may keep a close from being sent.
    fn excuses_closes(&self) -> bool {
        let lately = |at: Option<Instant>, long| at.is_some_and(|at| Instant::now() < at + long);
        let disturbed = self.storm.is_some() || self.scarce.is_some() || self.hanging.is_some();
        let waiting = !self.armed.is_empty() || !self.events.is_empty() || self.outage || self.is_blind();
        let faulty =
            self.unusual || self.went_back || lately(self.fault_at, SHALLOW) || lately(self.deep_at, DEEP);
        disturbed || waiting || faulty
    }

    /// The leader has ended a pass and left this `surplus`.
    pub(crate) fn passed(&mut self, surplus: &BTreeMap<MachineId, Points>) {
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

    /// Whether a call may still be stuck.
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

    /// M3: a denied request is sent again once a minute at most, whatever else happens.
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

    /// What becomes of an event that comes now.
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
        // M3: whatever fails, an agent calls no faster than its pauses allow.
        let passed = (now - self.credited_at).as_secs();
        self.credited_at += Duration::from_secs(passed);
        self.credit = (self.credit + 12 * passed).min(10 * BURST);
        match self.credit.checked_sub(if kind.is_store() { 1 } else { 3 }) {
            Some(left) => self.credit = left,
            // An agent that does not wait would never let time go on.
            None => {
                self.violated(format!("M3: agent {who} calls without pausing"));
                panic!("an agent that would go on like this for ever");
            }
        }
        match kind {
            Kind::Open | Kind::Close | Kind::Mend => self.provider_changes += 1,
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

    /// Whether a look that sees nothing is sure to be doubted, because the look before saw what there is.
    fn doubtful(&self, kind: Kind) -> bool {
        if kind == Kind::ReadMachines {
            return self.bare_at.is_none_or(|at| Instant::now() > at + 2 * RESYNC);
        }
        !self.emptied
    }

    /// Whether what a call did to a machine was right at some moment since it was begun, or shortly before.
    pub(crate) fn judge(&mut self, machine: MachineId, before: Points, after: Points, begun: Instant) {
        if before == after {
            return;
        }
        let (opened, closed) = (after.minus(before), before.minus(after));
        self.judge_restored(machine, opened, closed);
        // S4: no content of the store opens what policy denies.
        let denied = opened.and(Points::forbidden());
        if !denied.is_empty() {
            self.violated(format!("S4: {machine} opened{denied}, which policy denies"));
        }
        let known = if self.is_blind() { begun.min(self.blind.0) } else { begun };
        let since = known.checked_sub(GRACE).unwrap_or(known);
        // S1, S2: opened is only what was asked for just now; what cannot be read asks for nothing.
        let mut asked = self.history.ever(machine, since);
        // Who did not hear of a change of the flag puts what the flag said then together with what a unit asks for now.
        if self.is_blind() && !self.oracle.has_frozen(machine) {
            asked = asked.or(self.history.ever_asked(machine, since).mixed());
        }
        let unasked = opened.minus(asked);
        if !unasked.is_empty() {
            self.violated(format!("S1: {machine} opened{unasked}, which nobody asks for"));
        }
        // S2, S5: closed is only what somebody gave up; never what is wanted all along, nor what a unit had that cannot
        // be read.
        let robbed = closed.and(self.history.always(machine, since));
        if !robbed.is_empty() && Instant::now() >= self.crowded_until {
            self.violated(format!("S2: {machine} closed{robbed}, which is wanted"));
        }
        self.oracle.lost(machine, closed);
        let now = Instant::now();
        self.history.remember(&self.oracle, now);
    }

    /// S2: a rule of which all is wanted is closed only if another one lets the same through: there is no such lack of room
    /// that adjacent ports could not have been joined in time.
    pub(crate) fn judge_closes(
        &mut self,
        machine: MachineId,
        closed: impl Iterator<Item = Points>,
        after: Points,
        begun: Instant,
    ) {
        let known = if self.is_blind() { begun.min(self.blind.0) } else { begun };
        let always = self.history.always(machine, known.checked_sub(GRACE).unwrap_or(known));
        if Instant::now() < self.meddled_until {
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
