//! Jobs: order of signals, modes, cancellation, and the end of every job.

use std::collections::HashSet;

use futures_util::future::join_all;
use portcullis::fleet::dbus::errors;
use portcullis::fleet::manager::Leadership;

use crate::agent::{Agent, counts};
use crate::world::{World, job_path};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_announced_runs_and_ends_once() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    for (unit, member) in
        [("a.service", "StartUnit"), ("a.service", "StopUnit"), ("early.service", "RestartUnit")]
    {
        let id = client.job("n1", member, unit, "fail").await.unwrap();
        let new = client.signal("JobNew").await;
        assert_eq!(new.body().deserialize::<(u32, zbus::OwnedObjectPath, String, String)>().unwrap().0, id);
        assert_eq!(client.removed().await, (id, "done".to_owned()));
        let gone = client.call(&job_path(id), "Cancel", &()).await.unwrap_err();
        assert_eq!(gone.name, errors::UNKNOWN_OBJECT);
    }
    let refused = client.job("n1", "StartUnit", "missing.service", "fail").await.unwrap_err();
    assert_eq!(
        (refused.name.as_str(), refused.message.as_str()),
        (errors::NO_SUCH_UNIT, "Unit missing.service not found.")
    );
    assert_eq!(client.removed().await.1, "failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modes_and_cancellation_apply_to_the_queued_and_the_running_job() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let slow = "slow.service";
    let running = client.job("n1", "StartUnit", slow, "fail").await.unwrap();
    assert_eq!(client.property::<String>(&job_path(running), "Job", "State").await, "running");
    assert_eq!(client.property::<String>(&job_path(running), "Job", "JobType").await, "Start");
    let queued = client.job("n1", "StopUnit", slow, "fail").await.unwrap();
    assert_eq!(client.property::<String>(&job_path(queued), "Job", "State").await, "waiting");
    let refused = client.job("n1", "StartUnit", slow, "fail").await.unwrap_err();
    assert_eq!(refused.name, errors::JOB_QUEUED);
    let replacing = client.job("n1", "RestartUnit", slow, "replace").await.unwrap();
    assert_eq!(client.removed().await, (queued, "cancelled".to_owned()));
    client.call(&job_path(running), "Cancel", &()).await.unwrap();
    assert_eq!(client.removed().await, (running, "cancelled".to_owned()));
    agent.called("RestartUnit slow.service").await;
    agent.emit("JobDone", &(replacing, "timeout")).await;
    assert_eq!(client.removed().await, (replacing, "timeout".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_fifty_concurrent_callers_gets_one_job_and_one_end() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut observer = world.client().await;
    let mut clients = Vec::new();
    for _ in 0..50 {
        clients.push(world.client().await);
    }
    let started = clients.iter().enumerate().map(|(at, client)| {
        client.job("n1", "StartUnit", "slow.service", if at % 2 == 0 { "replace" } else { "fail" })
    });
    let answers = join_all(started).await;
    let ids: Vec<u32> = answers.iter().filter_map(|answer| answer.as_ref().ok()).copied().collect();
    assert_eq!(ids.len(), ids.iter().collect::<HashSet<_>>().len(), "two callers have one job");
    // A 'fail' has a job only if it arrives before two others.
    assert!(ids.len() >= 25, "each 'replace' has a job: {ids:?}");
    for refused in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(refused.name, errors::JOB_QUEUED);
    }
    // All but the running and the queued job were replaced.
    let mut ended = Vec::new();
    for _ in 2..ids.len() {
        ended.push(observer.removed().await);
    }
    assert!(ended.iter().all(|(_, result)| result == "cancelled"), "{ended:?}");
    let left: Vec<u32> =
        ids.iter().copied().filter(|id| !ended.iter().any(|(other, _)| other == id)).collect();
    for _ in 0..2 {
        for id in &left {
            agent.emit("JobDone", &(*id, "done")).await;
        }
        ended.push(observer.removed().await);
    }
    let of: Vec<u32> = ended.iter().map(|(id, _)| *id).collect();
    assert!(counts(of).values().all(|count| *count == 1));
    assert_eq!(ended.len(), ids.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_end_when_their_node_is_lost() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let running = client.job("n1", "StartUnit", "slow.service", "fail").await.unwrap();
    let queued = client.job("n1", "StopUnit", "slow.service", "fail").await.unwrap();
    agent.kill();
    let mut ended = [client.removed().await, client.removed().await];
    ended.sort();
    assert_eq!(ended, [(running, "failed".to_owned()), (queued, "cancelled".to_owned())]);
    client.until_status("n1", "offline").await;
    // The successor registers at once, and starts with an empty queue.
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    client.until_status("n1", "online").await;
    let id = client.job("n1", "StartUnit", "a.service", "fail").await.unwrap();
    assert_eq!(client.removed().await, (id, "done".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_end_with_cancelled_when_the_manager_stops() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let running = client.job("n1", "StartUnit", "slow.service", "fail").await.unwrap();
    let queued = client.job("n1", "StopUnit", "slow.service", "fail").await.unwrap();
    world.stop().await;
    let mut ended = [client.removed().await, client.removed().await];
    ended.sort();
    assert_eq!(ended, [(running, "cancelled".to_owned()), (queued, "cancelled".to_owned())]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_names_the_leader() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let running = client.job("n1", "StartUnit", "slow.service", "fail").await.unwrap();
    world.manager.set_leadership(Leadership::Standby { leader: Some("192.0.2.1:842".to_owned()) });
    assert_eq!(client.removed().await, (running, "cancelled".to_owned()));
    let refused = client.job("n1", "StartUnit", "a.service", "fail").await.unwrap_err();
    assert_eq!(refused.name, errors::NOT_LEADER);
    assert!(refused.message.contains("192.0.2.1:842"), "{refused}");
    let refused = Agent::register(&world.tcp, "n1").await.map(|_| ()).unwrap_err();
    assert!(format!("{refused:?}").contains("NotLeader"), "{refused:?}");
    world.manager.set_leadership(Leadership::Leading);
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    client.job("n1", "StartUnit", "a.service", "fail").await.unwrap();
}
