//! The agents as processes: started, killed, stopped, frozen and started again, with a tree and a provider whose every
//! call passes the seam.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use portcullis::firewall::agent::Agent;
use portcullis::firewall::boot::Boot;
use portcullis::firewall::policy::Policy;
use portcullis::firewall::provisioner::Provisioner;
use portcullis::firewall::run::{Progress, run_provisioning};
use portcullis::model::MachineId;
use portcullis::store::acl::{Acl, Roles};
use portcullis::store::memory::{Backup, MemoryFeed};
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Answer, Error as TreeError, Event, Feed, Node, Read, Tree, Write};
use portcullis::store::{Credential, MemoryStore, MemoryTree};
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall, Subject};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::faults::{Fault, Kind, Mishap};
use crate::instances::SimMachines;
use crate::seam::{SESSION, Seam};

/// Long, so that a world without deep faults must come right by events and retries alone.
pub(crate) const RESYNC: Duration = Duration::from_secs(240);

/// How long the command waits for the last pass once it is asked to end.
const LAST_PASS: Duration = Duration::from_secs(15);

/// A server that stays behind for longer is taken out by its ensemble.
const BEHIND: Duration = Duration::from_secs(3);
const RESTART: Duration = Duration::from_millis(500);

/// One process from outside.
#[derive(Default)]
pub(crate) struct Control {
    crash: Notify,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    stop: Option<watch::Sender<bool>>,
    frozen: bool,
    waker: Option<Waker>,
    tree: Option<MemoryTree>,
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn crash(&self) {
        self.crash.notify_one();
    }

    pub(crate) fn stop(&self) {
        if let Some(stop) = &self.lock().stop {
            stop.send_replace(true);
        }
    }

    pub(crate) fn freeze(&self, frozen: bool) {
        let mut inner = self.lock();
        inner.frozen = frozen;
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
    }

    /// The store has forgotten its session.
    pub(crate) fn expire(&self, store: &MemoryStore) {
        let tree = self.lock().tree.clone();
        if let Some(tree) = tree {
            store.expire(&tree);
        }
    }
}

/// A process's work, which stands still while the process is frozen.
struct Freezable<'c, F> {
    control: &'c Control,
    work: Pin<Box<F>>,
}

impl<F: Future> Future for Freezable<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        {
            let mut inner = self.control.lock();
            if inner.frozen {
                inner.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
        }
        self.work.as_mut().poll(context)
    }
}

/// What a process is started with.
#[derive(Clone)]
pub(crate) struct Start {
    pub who: usize,
    pub credential: Credential,
    pub roles: Roles,
    /// Instances are theirs to launch and to end.
    pub provisions: bool,
}

/// A process and whoever starts it again when it has ended.
pub(crate) async fn supervise(seam: Seam, start: Start) {
    let control = &seam.controls[start.who];
    loop {
        let tree = seam.store.connect(Some(&start.credential));
        let (stop, stopped) = watch::channel(false);
        let jitter = {
            let mut shared = seam.lock();
            shared.born(start.who);
            shared.log(format_args!("agent {} starts", start.who));
            // A new session may meet a server that is behind, until it writes or syncs.
            if let Some(past) = shared.past.take() {
                fall_behind(&tree, &past);
            }
            shared.random.fork()
        };
        *control.lock() = Inner { stop: Some(stop), tree: Some(tree.clone()), ..Inner::default() };
        let tree = SimTree { inner: tree, seam: seam.clone(), who: start.who };
        let crashed = tokio::select! {
            biased;
            () = control.crash.notified() => true,
            orderly = Freezable { control, work: Box::pin(live(tree.clone(), &seam, &start, jitter, stopped)) } => !orderly,
        };
        control.lock().tree = None;
        if crashed {
            // Nobody tells the store: it waits for the session to run out.
            seam.lock().shallow();
            tokio::spawn(async move {
                sleep(SESSION).await;
                drop(tree);
            });
        } else {
            drop(tree);
        }
        sleep(RESTART).await;
    }
}

/// The server of this session is behind, and catches up by itself after a while.
fn fall_behind(tree: &MemoryTree, past: &Backup) {
    tree.fall_behind(past);
    let tree = tree.clone();
    tokio::spawn(async move {
        sleep(BEHIND).await;
        tree.sync().await
    });
}

/// One life. Returns whether it ended as it was asked to.
async fn live(
    tree: SimTree,
    seam: &Seam,
    start: &Start,
    mut jitter: crate::random::Random,
    mut stopped: watch::Receiver<bool>,
) -> bool {
    let firewall = SimFirewall { seam: seam.clone(), who: start.who };
    let mut fate = jitter.fork();
    let policy = Policy::with_own_ports([]);
    let mut agent = Agent::new(tree.clone(), firewall, policy, start.roles.clone(), move || jitter.next())
        .with_clock(|| 0);
    let (progress, _) = watch::channel(Progress::default());
    let asked = stopped.clone();
    let mut provisioner = start.provisions.then(|| {
        let boot = Boot::new(
            "simulated".parse().expect("a name"),
            "zk:2181".parse().expect("an address"),
            start.roles.clone(),
        );
        let machines = SimMachines { seam: seam.clone(), who: start.who };
        Provisioner::new(tree.clone(), machines, boot, move || fate.next())
    });
    let provisioner = provisioner.as_mut();
    let mut running = std::pin::pin!(run_provisioning(
        &mut agent,
        provisioner,
        &tree,
        &start.roles,
        RESYNC,
        &progress,
        asked
    ));
    let asked = async { drop(stopped.wait_for(|stop| *stop).await) };
    let early = tokio::select! {
        ended = &mut running => Some(ended),
        () = asked => None,
    };
    let ended = match early {
        Some(ended) => ended,
        None => match timeout(LAST_PASS, running).await {
            Ok(ended) => ended,
            // L2: who is asked to end does so, unless a call of its own takes too long.
            Err(_) if !seam.lock().slow_lately() => {
                seam.lock().violated(format!("L2: agent {} does not stop", start.who));
                return false;
            }
            Err(_) => return false,
        },
    };
    // L2: nothing but being asked to ends an agent.
    let asked = *stopped.borrow();
    if ended.is_err() || !asked {
        seam.lock().violated(format!("L2: agent {} ended: {ended:?}", start.who));
    }
    true
}

#[derive(Clone)]
pub(crate) struct SimTree {
    inner: MemoryTree,
    seam: Seam,
    who: usize,
}

impl SimTree {
    async fn call<V: Send>(
        &self,
        kind: Kind,
        effect: impl Future<Output = Result<V, TreeError>> + Send,
    ) -> Result<V, TreeError> {
        self.faulty(kind, effect).await.1
    }

    async fn faulty<V: Send>(
        &self,
        kind: Kind,
        effect: impl Future<Output = Result<V, TreeError>> + Send,
    ) -> (Option<Fault>, Result<V, TreeError>) {
        let lost = || TreeError::Ambiguous { hosts: "simulated".to_owned() };
        let fault = self.seam.before(self.who, kind, None).await;
        match fault {
            Some(Fault::LostBefore) if kind.is_write() => return (fault, Err(lost())),
            Some(Fault::LostBefore) => {
                return (fault, Err(TreeError::Unreachable { hosts: "simulated".to_owned() }));
            }
            Some(Fault::Expired) => {
                self.seam.store.expire(&self.inner);
                if kind.is_write() {
                    return (fault, Err(lost()));
                }
            }
            Some(Fault::Stale) => fall_behind(&self.inner, &self.seam.store.backup()),
            _ => {}
        }
        let result = effect.await;
        match &result {
            Ok(_) if kind == Kind::WriteLock => self.seam.took_lock(self.who),
            Ok(_) if matches!(kind, Kind::WriteReports | Kind::WriteRecord) => self.seam.reported(self.who),
            Ok(_) => {}
            Err(err) => self.seam.lock().log(format_args!("    refused: {err}")),
        }
        self.seam.after(self.who, fault).await;
        (fault, if fault == Some(Fault::LostAfter) { Err(lost()) } else { result })
    }
}

impl Tree for SimTree {
    type Feed = SimFeed;

    async fn get(&self, path: &NodePath) -> Result<Node, TreeError> {
        self.call(Kind::Get, self.inner.get(path)).await
    }

    async fn exists(&self, path: &NodePath) -> Result<bool, TreeError> {
        self.call(Kind::Get, self.inner.exists(path)).await
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, TreeError> {
        let kind = if *path == paths::machines() { Kind::ReadMachines } else { Kind::ReadMany };
        let (fault, names) = self.faulty(kind, self.inner.children(path)).await;
        if fault == Some(Fault::Empty) { Ok(Vec::new()) } else { names }
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, TreeError>>, TreeError> {
        let lists = matches!(reads.first(), Some(Read::Children(path)) if *path == paths::services());
        let kind = if lists { Kind::ReadLists } else { Kind::ReadMany };
        let (fault, answers) = self.faulty(kind, self.inner.read_each(reads)).await;
        let mut answers = answers?;
        if fault == Some(Fault::Empty) {
            // Services, units and machines are asked for in this order; without the last nothing would be done at all.
            for answer in answers.iter_mut().take(2) {
                if let Ok(Answer::Children(Some(names))) = answer {
                    names.clear();
                }
            }
        }
        Ok(answers)
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), TreeError> {
        self.call(Kind::of_write(&writes), self.inner.write(writes)).await
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), TreeError> {
        self.call(Kind::WriteCorner, self.inner.set_acl(path, acl)).await
    }

    async fn sync(&self) -> Result<(), TreeError> {
        self.call(Kind::Sync, self.inner.sync()).await
    }

    async fn watch(&self, path: &NodePath) -> Result<SimFeed, TreeError> {
        let inner = self.call(Kind::Watch, self.inner.watch(path)).await?;
        Ok(SimFeed { inner, seam: self.seam.clone(), again: None, late: None })
    }
}

/// A feed that loses, doubles and reorders its events when it is told to.
pub(crate) struct SimFeed {
    inner: MemoryFeed,
    seam: Seam,
    again: Option<Event>,
    late: Option<(Event, Instant)>,
}

impl Feed for SimFeed {
    async fn next(&mut self) -> Result<Event, TreeError> {
        loop {
            if let Some(event) = self.again.take() {
                return Ok(event);
            }
            if let Some((_, until)) = self.late {
                // Whatever comes first overtakes the one that is late.
                let other = timeout_at(until, self.inner.next()).await;
                self.again = self.late.take().map(|(event, _)| event);
                if let Ok(other) = other {
                    return other;
                }
                continue;
            }
            let event = self.inner.next().await?;
            if event == Event::Everything {
                return Ok(event);
            }
            match self.seam.lock().next_event() {
                None => return Ok(event),
                Some(Mishap::EventDoubled) => {
                    self.again = Some(event.clone());
                    return Ok(event);
                }
                Some(Mishap::EventReordered) => {
                    self.late = Some((event, Instant::now() + Duration::from_millis(30)));
                }
                Some(_) => {}
            }
        }
    }
}

#[derive(Clone)]
pub(crate) struct SimFirewall {
    seam: Seam,
    who: usize,
}

pub(crate) fn id(machine: MachineNumber) -> MachineId {
    MachineId::new(machine.get())
}

impl SimFirewall {
    /// One request about one machine.
    async fn half(
        &self,
        kind: Kind,
        machine: MachineNumber,
        change: Change,
        begun: Instant,
    ) -> Result<(), Error> {
        let fault = self.seam.before(self.who, kind, Some(id(machine))).await;
        let error = fault.and_then(|fault| fault.provider_error(Some(machine)));
        let open = || self.seam.reachable(id(machine));
        let before = open();
        let result = match error {
            Some(error) if fault != Some(Fault::LostAfter) => Err(error),
            error => {
                let done = if self.refuses(machine, &change) {
                    Err(Error::Conflict { what: Subject::Machine(machine) })
                } else {
                    let applied = self.seam.provider.apply(machine, &change).await;
                    applied.opened.and(applied.closed)
                };
                error.map_or(done, Err)
            }
        };
        self.seam.wrote(self.who, kind, id(machine), (before, open()), begun, result.is_ok());
        self.seam.after(self.who, fault).await;
        result
    }

    /// As EC2 does it: a batch of which any part is already so is refused whole.
    fn refuses(&self, machine: MachineNumber, change: &Change) -> bool {
        let Some(rules) = self.seam.provider.actual(machine).filter(|_| self.seam.lock().strict) else {
            return false;
        };
        !change.open.is_disjoint(&rules.owned) || !change.close.is_subset(&rules.owned)
    }
}

impl Firewall for SimFirewall {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        let fault = self.seam.before(self.who, Kind::Observe, None).await;
        if let Some(error) = fault.and_then(|fault| fault.provider_error(None)) {
            return Err(error);
        }
        let seen = self.seam.provider.observe(machines).await;
        self.seam.after(self.who, fault).await;
        if let Ok(seen) = &seen {
            self.seam.saw(self.who, seen.keys().copied().map(id));
        }
        seen
    }

    async fn apply(&self, machine: MachineNumber, change: &Change) -> Applied {
        let begun = Instant::now();
        self.seam.changing(self.who, id(machine));
        if change.is_empty() {
            return Applied::as_one(self.half(Kind::Mend, machine, Change::default(), begun).await);
        }
        let mut applied = Applied::as_one(Ok(()));
        if !change.open.is_empty() {
            let open = Change { open: change.open.clone(), close: BTreeSet::new() };
            applied.opened = self.half(Kind::Open, machine, open, begun).await;
        }
        if !change.close.is_empty() {
            let close = Change { open: BTreeSet::new(), close: change.close.clone() };
            applied.closed = self.half(Kind::Close, machine, close, begun).await;
        }
        applied
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.seam.provider.rules_per_family()
    }
}
