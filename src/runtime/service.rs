//! The lifecycle of the roles of one process: start them, run until a signal comes or a role fails,
//! then stop them in order and within a bound. The work of a role must not be in here.

use std::fmt::Display;
use std::io;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, LocalSet};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

use super::shutdown::Shutdown;

/// How long a pass that is under way may take once its role is asked to stop.
pub const LAST_PASS: Duration = Duration::from_secs(15);

/// How long the roles of one stage may take to stop. It is longer than any bound inside a role.
const STOP_WITHIN: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the {0} role panicked")]
    Panicked(&'static str),
    #[error("the {0} role ended before it was asked to stop")]
    Ended(&'static str),
    #[error("the {0} role does not stop")]
    DoesNotStop(&'static str),
    #[error("the last pass does not end")]
    LastPass,
}

/// The effect of a role that ends before it was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnEnd {
    /// The other roles stop in order, and the process fails.
    StopOthers,
    /// The process fails at once: the other roles cannot work without this one.
    AbortOthers,
    /// The failure is logged, and the other roles run on.
    Continue,
}

/// The roles of one process. Each is a task of the thread that calls [`Service::run`], so that a
/// panic in one of them does not end the others.
#[derive(Debug)]
pub struct Service<E> {
    shutdown: Shutdown,
    roles: Roles<E>,
}

impl<E: From<Error> + Display + 'static> Service<E> {
    /// Catches the signals that end the process, from now on. Requires a tokio runtime.
    ///
    /// # Errors
    /// If the signals cannot be caught.
    pub fn new() -> io::Result<Self> {
        Ok(Self { shutdown: Shutdown::listen()?, roles: Roles::default() })
    }

    /// Adds a role to the current stage. It runs once [`Service::run`] is called, and has to end
    /// when its receiver turns true or loses its sender.
    pub fn start<F>(
        &mut self,
        name: &'static str,
        on_end: OnEnd,
        role: impl FnOnce(watch::Receiver<bool>) -> F,
    ) where
        F: Future<Output = Result<(), E>> + 'static,
    {
        self.roles.start(name, on_end, role);
    }

    /// Begins another stage. The roles of a stage stop together, those of the last stage first.
    pub fn next_stage(&mut self) {
        self.roles.stage += 1;
    }

    /// Runs all roles until a signal comes or one of them fails.
    ///
    /// # Errors
    /// The first failure of a role that is not [`OnEnd::Continue`], also while the roles stop.
    pub async fn run(mut self) -> Result<(), E> {
        self.roles.run(self.shutdown.asked()).await
    }
}

#[derive(Debug)]
struct Roles<E> {
    tasks: LocalSet,
    running: Vec<Role<E>>,
    stage: usize,
}

#[derive(Debug)]
struct Role<E> {
    name: &'static str,
    on_end: OnEnd,
    stage: usize,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<(), E>>,
}

impl<E> Default for Roles<E> {
    fn default() -> Self {
        Self { tasks: LocalSet::new(), running: Vec::new(), stage: 0 }
    }
}

impl<E: From<Error> + Display + 'static> Roles<E> {
    fn start<F>(&mut self, name: &'static str, on_end: OnEnd, role: impl FnOnce(watch::Receiver<bool>) -> F)
    where
        F: Future<Output = Result<(), E>> + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        let task = self.tasks.spawn_local(role(stopped));
        self.running.push(Role { name, on_end, stage: self.stage, stop, task });
    }

    async fn run(self, signal: impl Future<Output = &'static str>) -> Result<(), E> {
        let Self { tasks, mut running, .. } = self;
        tasks
            .run_until(async move {
                let ended = tokio::select! {
                    signal = signal => {
                        info!(signal, "stopping");
                        Ok(())
                    }
                    failed = first_failure(&mut running) => failed,
                };
                stop(running, ended).await
            })
            .await
    }
}

/// Waits for a failure that ends the process. Roles that have ended are no longer in `running`,
/// and neither are those that are to be aborted.
async fn first_failure<E: From<Error> + Display>(running: &mut Vec<Role<E>>) -> Result<(), E> {
    while !running.is_empty() {
        let (ended, at, _) = select_all(running.iter_mut().map(|role| &mut role.task)).await;
        let role = running.remove(at);
        let failure = role.outcome(ended).err().unwrap_or_else(|| Error::Ended(role.name).into());
        match role.on_end {
            OnEnd::Continue => role.warn(&failure),
            OnEnd::StopOthers => return Err(failure),
            OnEnd::AbortOthers => {
                running.clear();
                return Err(failure);
            }
        }
    }
    Ok(())
}

/// Stops the roles stage by stage. Returns the first failure, which may be `ended`.
async fn stop<E: From<Error> + Display>(
    mut running: Vec<Role<E>>,
    mut ended: Result<(), E>,
) -> Result<(), E> {
    while let Some(stage) = running.iter().map(|role| role.stage).max() {
        let (last, earlier): (Vec<_>, Vec<_>) = running.into_iter().partition(|role| role.stage == stage);
        running = earlier;
        for role in &last {
            role.stop.send_replace(true);
        }
        let deadline = Instant::now() + STOP_WITHIN;
        for mut role in last {
            let outcome = match timeout_at(deadline, &mut role.task).await {
                Ok(ended) => role.outcome(ended),
                Err(_) => Err(Error::DoesNotStop(role.name).into()),
            };
            match outcome {
                Err(failure) if role.on_end == OnEnd::Continue || ended.is_err() => role.warn(&failure),
                outcome => ended = ended.and(outcome),
            }
        }
    }
    ended
}

impl<E: From<Error> + Display> Role<E> {
    fn outcome(&self, ended: Result<Result<(), E>, JoinError>) -> Result<(), E> {
        ended.unwrap_or_else(|_| Err(Error::Panicked(self.name).into()))
    }

    fn warn(&self, failure: &E) {
        warn!(role = self.name, error = format!("{failure:#}"), "role failed");
    }
}

/// Waits until a role is asked to stop. A sender that is gone counts as a request. Cancel-safe.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Runs `work` until it ends by itself or the role is asked to stop, and then for a last pass.
///
/// # Errors
/// That of `work`, or [`Error::LastPass`] if it does not end.
pub async fn until_stopped<W, E: From<W> + From<Error>>(
    work: impl Future<Output = Result<(), W>>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), E> {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        biased;
        ended = &mut work => return Ok(ended?),
        () = stopped(&mut stop) => {}
    }
    Ok(timeout(LAST_PASS, work).await.map_err(|_| Error::LastPass)??)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::{pending, ready};
    use std::rc::Rc;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("no disk")]
        Disk,
        #[error(transparent)]
        Service(#[from] Error),
    }

    type Log = Rc<RefCell<Vec<&'static str>>>;

    /// Adds a role that logs its name when it is asked to stop.
    fn add(roles: &mut Roles<Failure>, name: &'static str, log: &Log) {
        let log = Rc::clone(log);
        roles.start(name, OnEnd::StopOthers, |mut stop| async move {
            stopped(&mut stop).await;
            log.borrow_mut().push(name);
            Ok(())
        });
    }

    fn message(ended: Result<(), Failure>) -> String {
        ended.expect_err("a failure").to_string()
    }

    #[tokio::test(start_paused = true)]
    async fn a_signal_stops_the_last_stage_first() {
        let (mut roles, log) = (Roles::default(), Log::default());
        for name in ["store", "tracker"] {
            add(&mut roles, name, &log);
            roles.stage += 1;
        }
        add(&mut roles, "agent", &log);
        add(&mut roles, "beats", &log);
        roles.run(ready("SIGTERM")).await.unwrap();
        assert_eq!(*log.borrow(), ["agent", "beats", "tracker", "store"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_stops_or_aborts_the_others_or_is_only_logged() {
        for (on_end, expected, others) in [
            (OnEnd::StopOthers, "no disk", &["store"][..]),
            (OnEnd::AbortOthers, "no disk", &[]),
            (OnEnd::Continue, "the agent role panicked", &["store"]),
        ] {
            let (mut roles, log) = (Roles::default(), Log::default());
            add(&mut roles, "store", &log);
            roles.start("keeper", on_end, |_| ready(Err(Failure::Disk)));
            roles.start("agent", OnEnd::StopOthers, |_| async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                panic!("a defect")
            });
            let ended = roles.run(pending()).await;
            assert_eq!(message(ended), expected, "{on_end:?}");
            assert_eq!(*log.borrow(), others, "{on_end:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_role_that_ends_early_or_does_not_stop_is_a_failure() {
        let mut roles = Roles::default();
        roles.start("agent", OnEnd::StopOthers, |_| ready(Ok(())));
        assert_eq!(message(roles.run(pending()).await), "the agent role ended before it was asked to stop");
        let (mut roles, log) = (Roles::default(), Log::default());
        add(&mut roles, "store", &log);
        roles.stage += 1;
        roles.start("agent", OnEnd::StopOthers, |_| pending());
        let begun = Instant::now();
        assert_eq!(message(roles.run(ready("SIGINT")).await), "the agent role does not stop");
        assert_eq!((begun.elapsed(), &log.borrow()[..]), (STOP_WITHIN, &["store"][..]));
    }

    #[tokio::test(start_paused = true)]
    async fn work_is_cut_off_only_after_a_request_to_stop() {
        let (stop, stopped) = watch::channel(false);
        let long = 10 * LAST_PASS;
        let works = async {
            tokio::time::sleep(long).await;
            Ok::<_, Failure>(())
        };
        until_stopped::<_, Failure>(works, stopped.clone()).await.unwrap();
        let failed = until_stopped::<_, Failure>(ready(Err(Failure::Disk)), stopped.clone());
        assert_eq!(message(failed.await), "no disk");
        let begun = Instant::now();
        let asking = async {
            tokio::time::sleep(long).await;
            stop.send_replace(true);
        };
        let hangs = until_stopped::<Failure, Failure>(pending(), stopped);
        let (ended, ()) = tokio::join!(hangs, asking);
        assert_eq!(message(ended), "the last pass does not end");
        assert_eq!(begun.elapsed(), long + LAST_PASS);
    }
}
