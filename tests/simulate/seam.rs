//! The place where agents meet their world: every call of theirs passes here, is counted, may fail, and is judged by what
//! it did. What must hold of single calls is looked at here, at the moment of the call; what must hold of the world as a
//! whole is in `checks`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::MemoryStore;
use portcullis::store::election::LEASE;
use portcullis::store::memory::Backup;
use portcullis_provider::Memory;
use portcullis_provider::provider::MachineNumber;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::agents::{Control, RESYNC};
use crate::faults::{Coverage, Fault, Kind, Mishap};
use crate::oracle::{GRACE, History, Oracle};
use crate::points::Points;
use crate::random::Random;

/// A server forgets a client that it has not heard of for this long.
pub(crate) const SESSION: Duration = Duration::from_secs(10);

/// Calls that an agent may have made more than time and events alone allow for (M3).
const BURST: u64 = 400;

#[derive(Clone)]
pub(crate) struct Seam {
    shared: Arc<Mutex<Shared>>,
    pub controls: Arc<Vec<Control>>,
    pub store: MemoryStore,
    pub provider: Memory,
    midst: Arc<[Notify; 2]>,
}

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
    /// The provider refuses a change as a whole if any of it is already so.
    pub strict: bool,
    /// The last who asked for all lists were told that they are empty. Who is told so twice in a row may believe it.
    emptied: bool,
    /// The same of the list of machines alone, and when.
    bare_at: Option<Instant>,
    /// The last fault that retries make good, and the last that only a resync is sure to.
    pub shallow_at: Option<Instant>,
    pub deep_at: Option<Instant>,
    pub changed_at: Instant,
    /// Until then an agent may not know what it should.
    pub blind_until: Instant,
    pub writes: BTreeMap<MachineId, Writes>,
    pub report_writes: u64,
    pub provider_calls: u64,
    /// Requests that change instances or their groups.
    pub provisioned: u64,
    /// Per agent the machines that it was last shown an instance of.
    pub listed: Vec<BTreeSet<MachineNumber>>,
    pub past: Option<Backup>,
    /// Per agent the machines that it has seen in this life and not failed to change since.
    trusted: Vec<BTreeSet<MachineId>>,
    /// Who took the lock last, and when.
    pub lead: Option<(usize, Instant)>,
    credit: u64,
    credited_at: Instant,
    pub violations: Vec<String>,
    began: Instant,
    log: Option<String>,
}

impl Shared {
    fn new(random: Random, agents: usize, log: bool) -> Self {
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
            strict: false,
            emptied: false,
            bare_at: None,
            shallow_at: None,
            deep_at: None,
            changed_at: now,
            blind_until: now,
            writes: BTreeMap::new(),
            report_writes: 0,
            provider_calls: 0,
            provisioned: 0,
            listed: vec![BTreeSet::new(); agents],
            past: None,
            trusted: vec![BTreeSet::new(); agents],
            lead: None,
            credit: BURST,
            credited_at: now,
            violations: Vec::new(),
            began: now,
            log: log.then(String::new),
        }
    }

    /// On the world's own clock.
    fn millis(&self, at: Instant) -> u128 {
        (at - self.began).as_millis()
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
        self.shallow_at = Some(Instant::now());
    }

    /// Only a resync is sure to make good what is wrong from here.
    pub(crate) fn deep(&mut self) {
        self.deep_at = Some(Instant::now());
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
        self.deep_at.is_some_and(|at| Instant::now() < at + Duration::from_secs(90))
    }

    pub(crate) fn born(&mut self, who: usize) {
        self.trusted[who].clear();
        self.listed[who].clear();
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
            self.blind_until = Instant::now() + RESYNC + GRACE;
        }
        Some(mishap)
    }

    fn called(&mut self, who: usize, kind: Kind, machine: Option<MachineId>) {
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
        if kind.is_store() {
            return;
        }
        self.provider_calls += 1;
    }

    fn choose(&mut self, kind: Kind, provider: &Memory) -> Option<Fault> {
        let at = self.armed.iter().position(|armed| {
            armed.kind.is_none_or(|wanted| wanted == kind)
                && armed.fault.possible_at(kind)
                && (armed.fault != Fault::Empty || self.doubtful(kind, provider))
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

    /// Whether a look that sees no units is sure to be doubted: there is much to lose, and the look before saw it.
    fn doubtful(&self, kind: Kind, provider: &Memory) -> bool {
        if kind == Kind::ReadMachines {
            return self.bare_at.is_none_or(|at| Instant::now() > at + 2 * RESYNC);
        }
        let readable =
            self.oracle.machines.iter().filter(|(id, m)| !m.corrupt && !self.oracle.has_frozen(**id));
        let actual = readable.filter_map(|(id, _)| provider.actual(MachineNumber::new(id.number())));
        let rules: usize = actual.map(|rules| rules.owned.len()).sum();
        let mut lags = false;
        provider.configure(|settings| lags = settings.lag_calls > 0);
        rules >= 10 && !lags && !self.emptied
    }

    /// Whether what a call did to a machine was right at some moment since it was begun, or shortly before.
    fn judge(&mut self, machine: MachineId, before: Points, after: Points, begun: Instant) {
        if before == after {
            return;
        }
        let (opened, closed) = (after.minus(before), before.minus(after));
        // S4: no content of the store opens what policy denies.
        let denied = opened.and(Points::forbidden());
        if !denied.is_empty() {
            self.violated(format!("S4: {machine} opened{denied}, which policy denies"));
        }
        if Instant::now() < self.blind_until {
            self.oracle.lost(machine, closed);
            return;
        }
        let since = begun.checked_sub(GRACE).unwrap_or(begun);
        // S1, S2: opened is only what was asked for just now; what cannot be read asks for nothing.
        let unasked = opened.minus(self.history.ever(machine, since));
        if !unasked.is_empty() {
            self.violated(format!("S1: {machine} opened{unasked}, which nobody asks for"));
        }
        // S2, S5: closed is only what somebody gave up; never what is wanted all along, nor what a unit had that cannot
        // be read.
        let robbed = closed.and(self.history.always(machine, since));
        if !robbed.is_empty() {
            self.violated(format!("S2: {machine} closed{robbed}, which is wanted"));
        }
        self.oracle.lost(machine, closed);
        let now = Instant::now();
        self.history.remember(&self.oracle, now);
    }
}

impl Seam {
    pub(crate) fn new(
        random: Random,
        agents: usize,
        store: MemoryStore,
        provider: Memory,
        log: bool,
    ) -> Self {
        Seam {
            shared: Arc::new(Mutex::new(Shared::new(random, agents, log))),
            controls: Arc::new((0..agents).map(|_| Control::default()).collect()),
            store,
            provider,
            midst: Arc::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is open on a machine; `None` if it has no group.
    pub(crate) fn open_on(&self, machine: MachineId) -> Option<Points> {
        let rules = self.provider.actual(MachineNumber::new(machine.number()))?;
        let mut open = Points::NONE;
        for rule in &rules.owned {
            match Points::of_rule(rule) {
                Some(points) => open = open.or(points),
                None => self.lock().violated(format!("S1: {machine} has {rule}, which nobody ever spoke of")),
            }
        }
        Some(open)
    }

    /// What is open on a machine, whoever opened it.
    pub(crate) fn reachable(&self, machine: MachineId) -> Points {
        let rules = self.provider.actual(MachineNumber::new(machine.number()));
        let exact = rules.into_iter().flat_map(|rules| rules.foreign).filter_map(|foreign| foreign.exact);
        let theirs = exact.filter_map(|rule| Points::of_rule(&rule)).fold(Points::NONE, Points::or);
        self.open_on(machine).unwrap_or_default().or(theirs)
    }

    /// The beginning of every call: decides what becomes of it, and does what comes before its effect.
    pub(crate) async fn before(&self, who: usize, kind: Kind, machine: Option<MachineId>) -> Option<Fault> {
        let fault = {
            let mut shared = self.lock();
            shared.called(who, kind, machine);
            let fault = shared.choose(kind, &self.provider);
            if let Some(fault) = fault {
                shared.coverage.struck(fault, kind);
                shared.log(format_args!("    {fault:?}"));
                match fault {
                    Fault::Slow | Fault::Paused | Fault::Midst | Fault::Stale | Fault::Expired => {
                        shared.deep();
                    }
                    _ => shared.shallow(),
                }
            }
            fault
        };
        match fault {
            Some(Fault::CrashBefore) => self.die(who).await,
            Some(Fault::Stop) => self.controls[who].stop(),
            Some(Fault::Slow) => {
                let long = self.lock().random.pick(&[900, 2_500, 6_000]);
                sleep(Duration::from_millis(long)).await;
                self.lock().deep();
            }
            Some(Fault::Paused) => {
                let long = self.lock().random.pick(&[1_000, 4_000, 25_000]);
                self.freeze(who, Duration::from_millis(long));
                tokio::task::yield_now().await;
            }
            Some(Fault::Midst) => {
                self.midst[0].notify_one();
                self.midst[1].notified().await;
            }
            _ => {}
        }
        fault
    }

    /// The end of every call that had its effect.
    pub(crate) async fn after(&self, who: usize, fault: Option<Fault>) {
        if fault == Some(Fault::CrashAfter) {
            self.die(who).await;
        }
    }

    async fn die(&self, who: usize) {
        self.controls[who].crash();
        std::future::pending::<()>().await;
    }

    /// Somebody waits for the world to do something in the middle of a call.
    pub(crate) async fn midst(&self) {
        self.midst[0].notified().await;
    }

    pub(crate) fn go_on(&self) {
        self.midst[1].notify_one();
    }

    /// The process stands still for a while. If that is too long, the store forgets it.
    pub(crate) fn freeze(&self, who: usize, long: Duration) {
        self.controls[who].freeze(true);
        let seam = self.clone();
        tokio::spawn(async move {
            sleep(long.min(SESSION)).await;
            if long > SESSION {
                seam.controls[who].expire(&seam.store);
                sleep(long - SESSION).await;
            }
            seam.controls[who].freeze(false);
            let mut shared = seam.lock();
            shared.log(format_args!("agent {who} goes on"));
            shared.deep();
        });
    }

    /// S6: nobody who was replaced writes anything more.
    pub(crate) fn reported(&self, who: usize) {
        let mut shared = self.lock();
        shared.report_writes += 1;
        if let Some((leader, _)) = shared.lead
            && leader != who
        {
            shared.violated(format!("S6: agent {who} reports though {leader} leads"));
        }
    }

    pub(crate) fn took_lock(&self, who: usize) {
        let mut shared = self.lock();
        shared.log(format_args!("    agent {who} leads"));
        shared.lead = Some((who, Instant::now()));
    }

    /// A change is about to be sent.
    pub(crate) fn changing(&self, who: usize, machine: MachineId) {
        let mut shared = self.lock();
        // S6: who was replaced begins nothing once its lease is over.
        if let Some((leader, since)) = shared.lead
            && leader != who
            && Instant::now() >= since + LEASE
        {
            let since = shared.millis(since);
            shared.violated(format!("S6: agent {who} acts though {leader} leads since {since}"));
        }
        // S3: nothing but machines of the tree is ever changed. One that is gone may be so since a moment.
        if machine.number() >= FOREIGN {
            shared.violated(format!("S3: {machine} is none of ours"));
        }
        // After a failure nobody knows what a machine has: a change is planned from what was seen since, or it would
        // be refused for ever by a provider that takes a batch as a whole.
        if !shared.trusted[who].contains(&machine) {
            shared.violated(format!("S2: agent {who} changes {machine} without having looked"));
        }
    }

    pub(crate) fn saw(&self, who: usize, machines: impl Iterator<Item = MachineId>) {
        self.lock().trusted[who].extend(machines);
    }

    /// What came of one half of a change.
    pub(crate) fn wrote(
        &self,
        who: usize,
        kind: Kind,
        machine: MachineId,
        change: (Points, Points),
        begun: Instant,
        ok: bool,
    ) {
        let mut shared = self.lock();
        let writes = shared.writes.entry(machine).or_default();
        match kind {
            Kind::Open => writes.opens += 1,
            Kind::Close => writes.closes += 1,
            _ => writes.mends += 1,
        }
        if !ok {
            shared.trusted[who].remove(&machine);
        }
        shared.log(format_args!(
            "    {} -> {} points, {}",
            change.0.len(),
            change.1.len(),
            if ok { "ok" } else { "failed" }
        ));
        shared.judge(machine, change.0, change.1, begun);
    }

    pub(crate) fn take_log(&self) -> String {
        self.lock().log.take().unwrap_or_default()
    }
}

/// Machines from here on belong to somebody else.
pub(crate) const FOREIGN: u32 = 900;
