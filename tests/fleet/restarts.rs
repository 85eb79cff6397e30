//! Restarts of systemd and of its bus: no result of a job and no change of a unit is lost.

use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::values::{JobResult, JobType};
use portcullis::fleet::systemd::{Event, JobRequest, Subscriptions, Systemd, UnitControl as _};
use tokio::time::timeout;
use zbus::Message;
use zbus::connection::Builder;
use zbus::fdo::DBusProxy;
use zbus::names::OwnedBusName;

use crate::contract::{result, states_until};
use crate::harness::{HANG, wait_for};
use crate::node::Node;

const UNIT: &str = "slow.service";

/// Executes the command `restart` while a job runs, and expects the job's result.
async fn restart_during_a_job(restart: &[&str]) {
    let node = Node::start();
    let (control, mut events) = Systemd::connect(Bus::Address(node.address()));
    control.watch(Subscriptions::from_iter([UNIT])).await.unwrap();
    let start = || JobRequest::new(JobType::Start, UNIT, "replace");
    let job = control.queue_job(start()).await.unwrap();
    control.refresh(vec![UNIT.to_owned()]);
    states_until(&mut events, UNIT, "activating").await;
    node.systemctl(restart);
    node.let_slow_start();
    assert_eq!(result(job).await, JobResult::Done);
    states_until(&mut events, UNIT, "active").await;
    // Signals and calls work as before.
    let stop = control.queue_job(JobRequest::new(JobType::Stop, UNIT, "replace")).await.unwrap();
    assert_eq!(result(stop).await, JobResult::Done);
    states_until(&mut events, UNIT, "inactive").await;
}

#[tokio::test]
async fn a_job_survives_a_restart_of_the_bus() {
    restart_during_a_job(&["restart", "dbus.service"]).await;
}

#[tokio::test]
async fn a_job_survives_a_new_execution_of_systemd() {
    restart_during_a_job(&["daemon-reexec"]).await;
}

#[tokio::test]
async fn a_job_that_ends_without_a_bus_has_a_result() {
    let node = Node::start();
    let (control, _events) = Systemd::connect(Bus::Address(node.address()));
    let start = |unit| control.queue_job(JobRequest::new(JobType::Start, unit, "replace"));
    let slow = start(UNIT).await.unwrap();
    // The private socket of systemd still works.
    node.systemctl(&["stop", "dbus.service", "dbus.socket"]);
    node.let_slow_start();
    wait_for("an active unit", HANG, || (node.property(UNIT, "ActiveState") == "active").then_some(()));
    node.systemctl(&["start", "dbus.service"]);
    assert_eq!(result(slow).await, JobResult::Done);
    assert_eq!(result(start("quick.service").await.unwrap()).await, JobResult::Done);
}

#[tokio::test]
async fn units_that_come_and_go_without_a_bus_are_reported() {
    let node = Node::start();
    let (control, mut events) = Systemd::connect(Bus::Address(node.address()));
    node.systemctl(&["start", "quick.service"]);
    control.watch(Subscriptions::from_iter(["quick*", "templated@*"])).await.unwrap();
    control.refresh(vec!["quick.service".to_owned()]);
    states_until(&mut events, "quick.service", "active").await;
    // The private socket of systemd still works.
    node.systemctl(&["stop", "dbus.service", "dbus.socket"]);
    node.systemctl(&["stop", "quick.service"]);
    node.systemctl(&["start", "templated@1.service"]);
    wait_for("the end of the unit in systemd", HANG, || {
        (!node.systemctl(&["list-units", "--all", "--plain"]).contains("quick.service")).then_some(())
    });
    node.systemctl(&["start", "dbus.service"]);
    let (mut is_gone, mut is_active) = (false, false);
    while !(is_gone && is_active) {
        match timeout(HANG, events.recv()).await.expect("an event").unwrap() {
            Event::UnitRemoved(unit) => is_gone |= unit == "quick.service",
            Event::Unit(unit, state) => {
                is_active |= unit == "templated@1.service" && state.active == "active";
            }
            Event::UnitNew(_) | Event::JobRunning(_) => {}
        }
    }
}

/// Returns the only connection to a bus besides those of systemd and of the caller.
async fn third_name(bus: &DBusProxy<'_>) -> OwnedBusName {
    let systemd = bus.get_name_owner("org.freedesktop.systemd1".try_into().unwrap()).await.unwrap();
    let own = bus.inner().connection().unique_name().unwrap();
    let names = bus.list_names().await.unwrap();
    let is_third = |name: &&OwnedBusName| {
        name.as_str().starts_with(':') && ![systemd.as_str(), own.as_str()].contains(&name.as_str())
    };
    names.iter().find(is_third).expect("the connection of the agent").clone()
}

#[tokio::test]
async fn signals_of_another_sender_than_systemd_are_ignored() {
    let node = Node::start();
    let (control, mut events) = Systemd::connect(Bus::Address(node.address()));
    control.watch(Subscriptions::from_iter([UNIT])).await.unwrap();
    let job = control.queue_job(JobRequest::new(JobType::Start, UNIT, "replace")).await.unwrap();
    control.refresh(vec![UNIT.to_owned()]);
    states_until(&mut events, UNIT, "activating").await;
    let forger = Builder::address(node.address().as_str()).build().await.unwrap();
    let bus = DBusProxy::new(&forger).await.unwrap();
    let to = third_name(&bus).await;
    let (root, unit) = ("/org/freedesktop/systemd1", "/org/freedesktop/systemd1/unit/slow_2eservice");
    let path = zbus::ObjectPath::try_from(format!("{root}/job/{}", job.id)).unwrap();
    let removed = Message::signal(root, "org.freedesktop.systemd1.Manager", "JobRemoved");
    let removed = removed.destination(to.as_ref()).build(&(job.id, path, UNIT, "failed")).unwrap();
    let properties = std::collections::HashMap::from([("ActiveState", zbus::Variant::from("failed"))]);
    let changed = Message::signal(unit, "org.freedesktop.DBus.Properties", "PropertiesChanged");
    let body = ("org.freedesktop.systemd1.Unit", properties, Vec::<&str>::new());
    let changed = changed.destination(to.as_ref()).build(&body).unwrap();
    for forged in [removed, changed] {
        forger.send(&forged).await.unwrap();
    }
    // The reply shows that the bus has passed on the signals.
    bus.list_names().await.unwrap();
    node.let_slow_start();
    assert_eq!(result(job).await, JobResult::Done);
    let states = states_until(&mut events, UNIT, "active").await;
    assert!(states.iter().all(|(active, _)| active != "failed"), "{states:?}");
}
