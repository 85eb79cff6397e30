//! The contract of `UnitControl`: the same expectations for systemd in memory and for a real one.

use std::collections::BTreeMap;
use std::time::Duration;

use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::values::{JobResult, JobType};
use portcullis::fleet::systemd::{
    Behaviour, Event, JobRequest, MemorySystemd, QueuedJob, Subscriptions, Systemd, UnitControl, UnitState,
};
use tokio::sync::mpsc;

use crate::harness::HANG;
use crate::node::Node;

/// A systemd with the units of `tests/fleet/units`.
struct World<C> {
    control: C,
    events: mpsc::Receiver<Event>,
    node: Option<Node>,
}

fn memory() -> World<MemorySystemd> {
    use Behaviour::{Dependent, Failing, Masked, Quick, Slow, Stubborn, TooSlow};
    let units = [
        ("quick.service", Quick),
        ("slow.service", Slow),
        ("failing.service", Failing),
        ("dependent.service", Dependent),
        ("timeout.service", TooSlow),
        ("stubborn.service", Stubborn),
        ("reloadable.service", Quick),
        ("templated@.service", Quick),
        ("masked.service", Masked),
    ];
    let (control, events) = MemorySystemd::new(&units);
    World { control, events, node: None }
}

fn real() -> World<Systemd> {
    let node = Node::start();
    let (control, events) = Systemd::connect(Bus::Address(node.address()));
    World { control, events, node: Some(node) }
}

/// Lets slow services finish their start.
trait LetSlowStart {
    fn let_slow_start(&self);
}

impl LetSlowStart for World<MemorySystemd> {
    fn let_slow_start(&self) {
        self.control.let_slow_start();
    }
}

impl LetSlowStart for World<Systemd> {
    fn let_slow_start(&self) {
        self.node.as_ref().unwrap().let_slow_start();
    }
}

/// Runs a test once with each implementation.
macro_rules! contract {
    ($($name:ident),+ $(,)?) => {
        mod in_memory {
            $(#[tokio::test]
            async fn $name() {
                super::$name(super::memory()).await;
            })+
        }
        mod on_systemd {
            $(#[tokio::test]
            async fn $name() {
                super::$name(super::real()).await;
            })+
        }
    };
}

contract!(
    jobs_end_with_their_results,
    a_running_job_can_be_cancelled_joined_and_replaced,
    wrong_requests_are_refused_with_the_names_of_systemd,
    units_can_be_killed_frozen_and_reset,
    unit_files_are_enabled_and_disabled,
    transient_units_run,
    each_change_is_one_event,
);

async fn queue(control: &impl UnitControl, kind: JobType, unit: &str) -> QueuedJob {
    control.queue_job(JobRequest::new(kind, unit, "replace")).await.unwrap()
}

pub(crate) async fn result(job: QueuedJob) -> JobResult {
    tokio::time::timeout(HANG, job.done).await.expect("a result").unwrap()
}

async fn run(control: &impl UnitControl, kind: JobType, unit: &str) -> &'static str {
    result(queue(control, kind, unit).await).await.as_str()
}

async fn states(control: &impl UnitControl, unit: &str) -> (String, String, Option<String>) {
    let UnitState { active, sub, result, .. } = control.state(unit).await.unwrap();
    (active, sub, result)
}

async fn refused(control: &impl UnitControl, kind: JobType, unit: &str, mode: &str) -> String {
    control.queue_job(JobRequest::new(kind, unit, mode)).await.unwrap_err().name
}

async fn jobs_end_with_their_results<C: UnitControl>(world: World<C>) {
    let control = &world.control;
    for (kind, unit, expected) in [
        (JobType::Start, "quick.service", "done"),
        (JobType::Start, "quick.service", "done"),
        (JobType::Restart, "quick.service", "done"),
        (JobType::Start, "templated@1.service", "done"),
        (JobType::Start, "reloadable.service", "done"),
        (JobType::Reload, "reloadable.service", "done"),
        (JobType::Start, "failing.service", "failed"),
        (JobType::Start, "dependent.service", "dependency"),
        (JobType::Start, "timeout.service", "timeout"),
        (JobType::Stop, "quick.service", "done"),
        (JobType::Stop, "quick.service", "done"),
    ] {
        assert_eq!(run(control, kind, unit).await, expected, "{kind} {unit}");
    }
    let success = |active: &str, sub: &str| (active.to_owned(), sub.to_owned(), Some("success".to_owned()));
    assert_eq!(states(control, "quick.service").await, success("inactive", "dead"));
    assert_eq!(states(control, "templated@1.service").await, success("active", "running"));
    assert_eq!(control.jobs().await.unwrap(), []);
}

async fn a_running_job_can_be_cancelled_joined_and_replaced<C: UnitControl>(world: World<C>)
where
    World<C>: LetSlowStart,
{
    let control = &world.control;
    let first = queue(control, JobType::Start, "slow.service").await;
    let second = queue(control, JobType::Start, "slow.service").await;
    assert_eq!(first.id, second.id, "systemd merges equal jobs");
    assert_eq!(control.jobs().await.unwrap(), [(first.id, "slow.service".to_owned())]);
    let rows = control.list_units().await.unwrap();
    let row = rows.iter().find(|row| row.0 == "slow.service").unwrap();
    assert_eq!((row.7, row.8.as_str()), (first.id, "start"));
    control.cancel_job(first.id).await.unwrap();
    assert_eq!((result(first).await, result(second).await), (JobResult::Cancelled, JobResult::Cancelled));
    control.cancel_job(999_999).await.unwrap();

    let start = queue(control, JobType::Start, "slow.service").await;
    let destructive = "org.freedesktop.systemd1.TransactionIsDestructive";
    assert_eq!(refused(control, JobType::Stop, "slow.service", "fail").await, destructive);
    assert_eq!(run(control, JobType::Stop, "slow.service").await, "done");
    assert_eq!(result(start).await, JobResult::Cancelled);

    let start = queue(control, JobType::Start, "slow.service").await;
    world.let_slow_start();
    assert_eq!(result(start).await, JobResult::Done);
    assert_eq!(states(control, "slow.service").await.0, "active");
}

async fn wrong_requests_are_refused_with_the_names_of_systemd<C: UnitControl>(world: World<C>) {
    let control = &world.control;
    let invalid = "org.freedesktop.DBus.Error.InvalidArgs";
    let long = format!("{}.service", "x".repeat(300));
    for (unit, mode, name) in [
        ("unknown.service", "replace", "org.freedesktop.systemd1.NoSuchUnit"),
        ("masked.service", "replace", "org.freedesktop.systemd1.UnitMasked"),
        ("quick.service", "sideways", invalid),
        (&long, "replace", invalid),
        ("no spaces.service", "replace", invalid),
    ] {
        assert_eq!(refused(control, JobType::Start, unit, mode).await, name, "{unit} {mode}");
    }
    run(control, JobType::Start, "quick.service").await;
    for (who, signal) in [("main", 0), ("main", 999), ("everybody", 15)] {
        let error = control.kill("quick.service", who, signal).await.unwrap_err();
        assert_eq!(error.name, invalid, "{who} {signal}: {error}");
    }
    assert_eq!(control.state(&long).await.unwrap_err().name, invalid);
    assert_eq!(control.state("unknown.service").await.unwrap().load, "not-found");
    assert_eq!(control.state("masked.service").await.unwrap().load, "masked");
    let error = control.property("quick.service", "", "Colour").await.unwrap_err();
    assert_eq!(error.name, "org.freedesktop.DBus.Error.UnknownProperty");
    let missing = control.enable(vec!["unknown.service".to_owned()], false, false).await.unwrap_err();
    assert_eq!(missing.name, "org.freedesktop.systemd1.NoSuchUnit");
}

async fn units_can_be_killed_frozen_and_reset<C: UnitControl>(world: World<C>) {
    let control = &world.control;
    run(control, JobType::Start, "stubborn.service").await;
    let stop = queue(control, JobType::Stop, "stubborn.service").await;
    control.kill("stubborn.service", "all", 15).await.unwrap();
    assert_eq!(control.jobs().await.unwrap().len(), 1, "the service ignores SIGTERM");
    control.kill("stubborn.service", "all", 9).await.unwrap();
    assert_eq!(result(stop).await, JobResult::Done);
    assert_eq!(states(control, "stubborn.service").await.2.as_deref(), Some("signal"));
    control.reset_failed(Some("stubborn.service")).await.unwrap();
    assert_eq!(states(control, "stubborn.service").await.0, "inactive");

    assert_eq!(run(control, JobType::Start, "failing.service").await, "failed");
    assert_eq!(states(control, "failing.service").await.0, "failed");
    control.reset_failed(None).await.unwrap();
    assert_eq!(states(control, "failing.service").await.0, "inactive");

    run(control, JobType::Start, "quick.service").await;
    for (freeze, expected) in [(true, "frozen"), (false, "running")] {
        if freeze {
            control.freeze("quick.service").await.unwrap();
        } else {
            control.thaw("quick.service").await.unwrap();
        }
        // systemd answers before it has read the state of the control group.
        let is_reached = async || {
            let state = control.property("quick.service", "", "FreezerState").await.unwrap();
            <&str>::try_from(&*state).unwrap() == expected
        };
        let reached = async { while !is_reached().await {} };
        tokio::time::timeout(HANG, reached).await.expect(expected);
    }
}

async fn unit_files_are_enabled_and_disabled<C: UnitControl>(world: World<C>) {
    let control = &world.control;
    let quick = || vec!["quick.service".to_owned()];
    assert_eq!(control.unit_file_state("quick.service").await.unwrap(), "disabled");
    let (_, changes) = control.enable(quick(), false, false).await.unwrap();
    assert_eq!((changes.len(), changes[0].0.as_str()), (1, "symlink"));
    control.reload().await.unwrap();
    assert_eq!(control.unit_file_state("quick.service").await.unwrap(), "enabled");
    assert_eq!(control.state("quick.service").await.unwrap().file, "enabled");
    assert_eq!(control.disable(quick(), false).await.unwrap().len(), 1);
    control.reload().await.unwrap();
    assert_eq!(control.unit_file_state("quick.service").await.unwrap(), "disabled");
    let files: BTreeMap<_, _> = control.list_unit_files().await.unwrap().into_iter().collect();
    let masked = files.iter().find(|(file, _)| file.ends_with("/masked.service")).unwrap();
    assert!(masked.1.starts_with("masked"), "{masked:?}");
    assert_eq!(control.default_target().await.unwrap(), "default.target");
}

async fn transient_units_run<C: UnitControl>(world: World<C>) {
    let control = &world.control;
    let command = vec![("/bin/sleep".to_owned(), vec!["sleep".to_owned(), "infinity".to_owned()], false)];
    let command = zbus::OwnedVariant::try_from(zbus::Variant::new(command)).unwrap();
    let request = || JobRequest {
        transient: Some((vec![("ExecStart".to_owned(), command.try_clone().unwrap())], Vec::new())),
        ..JobRequest::new(JobType::Start, "transient.service", "fail")
    };
    assert_eq!(result(control.queue_job(request()).await.unwrap()).await, JobResult::Done);
    assert_eq!(states(control, "transient.service").await.0, "active");
    let error = control.queue_job(request()).await.unwrap_err();
    assert_eq!(error.name, "org.freedesktop.systemd1.UnitExists");
    assert_eq!(run(control, JobType::Stop, "transient.service").await, "done");
}

/// Receives events of a unit until it has this state. Returns the states on the way.
pub(crate) async fn states_until(
    events: &mut mpsc::Receiver<Event>,
    unit: &str,
    active: &str,
) -> Vec<(String, String)> {
    let mut states = Vec::new();
    loop {
        let event = tokio::time::timeout(HANG, events.recv()).await.expect("an event").expect("systemd");
        let Event::Unit(of, state) = event else { continue };
        assert_eq!(of, unit, "only watched units are reported");
        let last = state.active == active;
        states.push((state.active, state.sub));
        if last {
            return states;
        }
    }
}

async fn each_change_is_one_event<C: UnitControl>(mut world: World<C>) {
    let World { control, events, .. } = &mut world;
    let unit = "quick.service";
    control.watch(Subscriptions::from_iter(["qui*.service"])).await.unwrap();
    control.refresh(vec![unit.to_owned()]);
    assert_eq!(states_until(events, unit, "inactive").await.len(), 1);
    for _ in 0..3 {
        run(control, JobType::Start, unit).await;
        // Another unit, which is not watched.
        run(control, JobType::Restart, "reloadable.service").await;
        let mut states = states_until(events, unit, "active").await;
        assert_eq!(states.pop(), Some(("active".to_owned(), "running".to_owned())));
        // systemd may have unloaded the inactive unit, and the start loads it again.
        assert!(states.is_empty() || states == [("inactive".to_owned(), "dead".to_owned())], "{states:?}");
        run(control, JobType::Stop, unit).await;
        let states = states_until(events, unit, "inactive").await;
        assert!(states.len() <= 2 && states.windows(2).all(|pair| pair[0] != pair[1]), "{states:?}");
    }
    control.watch(Subscriptions::default()).await.unwrap();
    run(control, JobType::Start, unit).await;
    let late = tokio::time::timeout(Duration::from_millis(200), events.recv()).await;
    assert!(matches!(late, Err(_) | Ok(Some(Event::UnitRemoved(_)))), "unit is not watched: {late:?}");
}
