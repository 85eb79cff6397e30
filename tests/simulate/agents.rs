//! The agents as processes, which are started, killed, stopped, frozen and restarted. Every call to
//! their tree and their provider passes through `interceptor`.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use portcullis::firewall::controller::FirewallController;
use portcullis::firewall::leader_loop::{Progress, run_provisioning};
use portcullis::firewall::policy::Policy;
use portcullis::provision::controller::Provisioner;
use portcullis::provision::user_data::BootConfig;
use portcullis::store::acl::Roles;
use portcullis::store::rollback::RollbackGuard;
use portcullis::store::{Credential, MemoryStore, MemoryTree};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use crate::firewall::SimFirewall;
use crate::instances::SimMachines;
use crate::interceptor::{Interceptor, SESSION};
use crate::restored::CheckpointFile;
use crate::tree::{SimTree, fall_behind};

/// Long, so that a world without deep faults has to converge by events and retries alone.
pub(crate) const RESYNC: Duration = Duration::from_secs(240);

/// How long the agent command waits for the last pass after a stop request.
const LAST_PASS: Duration = Duration::from_secs(15);

const RESTART: Duration = Duration::from_millis(500);

/// Controls one process from outside.
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

    /// Expires the session of the process.
    pub(crate) fn expire(&self, store: &MemoryStore) {
        let tree = self.lock().tree.clone();
        if let Some(tree) = tree {
            store.expire(&tree);
        }
    }
}

/// The work of a process, which is not polled while the process is frozen.
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

/// Start parameters of a process.
#[derive(Clone)]
pub(crate) struct Start {
    pub agent: usize,
    pub credential: Credential,
    pub roles: Roles,
    /// The agent launches and terminates instances.
    pub provisions: bool,
    pub checkpoint: Arc<CheckpointFile>,
}

/// Runs a process and restarts it whenever it ends.
pub(crate) async fn supervise(interceptor: Interceptor, start: Start) {
    let control = &interceptor.controls[start.agent];
    loop {
        let tree = interceptor.store.connect(Some(&start.credential));
        let (stop, stopped) = watch::channel(false);
        let jitter = {
            let mut shared = interceptor.lock();
            shared.started(start.agent);
            shared.log(format_args!("agent {} starts", start.agent));
            // A new session may connect to a server that lags, until the session writes or syncs.
            if let Some(past) = shared.past.take() {
                fall_behind(&tree, &past);
            }
            shared.random.fork()
        };
        *control.lock() = Inner { stop: Some(stop), tree: Some(tree.clone()), ..Inner::default() };
        let tree = SimTree { inner: tree, interceptor: interceptor.clone(), agent: start.agent };
        let process = Box::pin(run_process(tree.clone(), &interceptor, &start, jitter, stopped));
        let crashed = tokio::select! {
            biased;
            () = control.crash.notified() => true,
            orderly = Freezable { control, work: process } => !orderly,
        };
        control.lock().tree = None;
        if crashed {
            // A crash does not close the session; the store waits for the session timeout.
            interceptor.lock().record_retry_fault();
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

/// Runs a process once. Returns false if it did not stop in time after a stop request.
async fn run_process(
    tree: SimTree,
    interceptor: &Interceptor,
    start: &Start,
    mut jitter: crate::random::Random,
    mut stopped: watch::Receiver<bool>,
) -> bool {
    let firewall = SimFirewall { interceptor: interceptor.clone(), agent: start.agent };
    let mut provisioner_jitter = jitter.fork();
    let policy = Policy::with_own_ports([]);
    let clock = {
        let interceptor = interceptor.clone();
        move || interceptor.lock().time_of_day_ms()
    };
    let provisioner_clock = clock.clone();
    let guard = Arc::new(RollbackGuard::of_controller(&start.roles, start.checkpoint.clone()));
    let mut controller =
        FirewallController::new(tree.clone(), firewall, policy, start.roles.clone(), move || jitter.next())
            .with_clock(clock)
            .with_guard(Arc::clone(&guard));
    let (progress, passed) = watch::channel(Progress::default());
    let stop = stopped.clone();
    let mut provisioner = start.provisions.then(|| {
        let boot = BootConfig::new(
            "simulated".parse().expect("a name"),
            "zk:2181".parse().expect("an address"),
            None,
            start.roles.clone(),
        );
        let machines = SimMachines { interceptor: interceptor.clone(), agent: start.agent };
        Provisioner::new(tree.clone(), machines, boot, move || provisioner_jitter.next())
            .with_clock(provisioner_clock)
            .with_guard(guard)
    });
    let provisioner = provisioner.as_mut();
    let mut running = std::pin::pin!(run_provisioning(
        &mut controller,
        provisioner,
        &tree,
        &start.roles,
        RESYNC,
        &progress,
        stop
    ));
    let stop_requested = async { drop(stopped.wait_for(|stop| *stop).await) };
    let early = tokio::select! {
        ended = &mut running => Some(ended),
        () = stop_requested => None,
        () = count_passes(interceptor, start.agent, passed) => None,
    };
    let ended = match early {
        Some(ended) => ended,
        None => match timeout(LAST_PASS, running).await {
            Ok(ended) => ended,
            // L2: an agent stops when requested, unless one of its calls takes too long.
            Err(_) if !interceptor.lock().slow_lately() => {
                interceptor.lock().violated(format!("L2: agent {} does not stop", start.agent));
                return false;
            }
            Err(_) => return false,
        },
    };
    // L2: an agent ends only after a stop request.
    let stop_requested = *stopped.borrow();
    if ended.is_err() || !stop_requested {
        interceptor.lock().violated(format!("L2: agent {} ended: {ended:?}", start.agent));
    }
    true
}

/// Records each pass of an agent; does not end.
async fn count_passes(interceptor: &Interceptor, agent: usize, mut passed: watch::Receiver<Progress>) {
    let mut passes = 0;
    while passed.changed().await.is_ok() {
        let so_far = passed.borrow_and_update().passes;
        if so_far > std::mem::replace(&mut passes, so_far) {
            interceptor.passed(agent);
        }
    }
    std::future::pending::<()>().await;
}
