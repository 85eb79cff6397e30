//! Restarts of systemd and of its bus: no result of a job and no change of a unit is lost.

use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::values::{JobResult, JobType};
use portcullis::fleet::systemd::{JobRequest, Subscriptions, Systemd, UnitControl as _};

use crate::contract::{result, states_until};
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
    crate::harness::wait_for("an active unit", crate::harness::HANG, || {
        (node.property(UNIT, "ActiveState") == "active").then_some(())
    });
    node.systemctl(&["start", "dbus.service"]);
    assert_eq!(result(slow).await, JobResult::Done);
    assert_eq!(result(start("quick.service").await.unwrap()).await, JobResult::Done);
}
