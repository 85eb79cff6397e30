//! Tests of the order of signals and replies: each test sends the messages of the client's peer
//! itself; `tests/fleet` runs the client with a real manager.

use std::os::unix::net::UnixStream;

use futures_util::future::join;
use zbus::connection::{AuthMechanism, Builder};
use zbus::{Guid, Message, MessageStream, ObjectPath, OwnedVariant, Str};

use super::*;
use crate::fleet::dbus::names::{MANAGER_INTERFACE, MONITOR_INTERFACE};
use crate::fleet::dbus::values::{JobMode, JobType};

const OURS: &str = "/org/containers/hirte/job/7";
/// More signals than zbus queues for a stream that is not read.
const MANY: usize = 300;

/// Returns a client, and the peer's side of its connection.
async fn connected() -> (Client, Connection, MessageStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let client = Builder::unix_stream(ours).p2p().auth_mechanism(AuthMechanism::Anonymous);
    let peer = Builder::unix_stream(theirs).p2p().auth_mechanism(AuthMechanism::Anonymous);
    let (client, peer) = join(client.build(), peer.server(Guid::generate()).build()).await;
    let (client, peer) = (client.unwrap(), peer.unwrap());
    let calls = MessageStream::from(&peer);
    (Client::peer_to_peer(client, Duration::from_secs(60)), peer, calls)
}

async fn next_call(calls: &mut MessageStream, member: &str) -> Message {
    loop {
        let call = calls.next().await.unwrap().unwrap();
        if call.header().member().is_some_and(|called| called.as_str() == member) {
            return call;
        }
    }
}

fn job_removed(job: &str, result: &str) -> Message {
    let signal = Message::signal(MANAGER_PATH, MANAGER_INTERFACE, "JobRemoved");
    signal.build(&(7_u32, ObjectPath::try_from(job).unwrap(), "n1", "a.service", result)).unwrap()
}

fn start() -> JobRequest<'static> {
    JobRequest { node: "n1", unit: "a.service", kind: JobType::Start, mode: JobMode::Replace }
}

async fn reply_job(peer: &Connection, call: &Message) {
    peer.reply(&call.header(), &ObjectPath::try_from(OURS).unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_result_that_arrives_before_the_reply_is_not_lost() {
    let (client, peer, mut calls) = connected().await;
    let script = async {
        let call = next_call(&mut calls, "StartUnit").await;
        peer.send(&job_removed(OURS, "failed")).await.unwrap();
        for _ in 0..MANY {
            peer.send(&job_removed("/org/containers/hirte/job/8", "done")).await.unwrap();
        }
        reply_job(&peer, &call).await;
    };
    let (job, ()) = join(client.run_job(start(), Some(Duration::from_secs(60))), script).await;
    assert_eq!(job.unwrap(), Job { id: 7, result: Some("failed".to_owned()) });
}

#[tokio::test]
async fn results_of_other_jobs_do_not_end_the_wait() {
    let (client, peer, mut calls) = connected().await;
    let script = async {
        let call = next_call(&mut calls, "StartUnit").await;
        reply_job(&peer, &call).await;
        peer.send(&job_removed("/org/containers/hirte/job/8", "failed")).await.unwrap();
        peer.send(&job_removed(OURS, "done")).await.unwrap();
    };
    let (job, ()) = join(client.run_job(start(), Some(Duration::from_secs(60))), script).await;
    assert_eq!(job.unwrap().result.as_deref(), Some("done"));
}

#[tokio::test]
async fn the_loss_of_the_manager_ends_the_wait() {
    let (client, peer, mut calls) = connected().await;
    let script = async {
        let call = next_call(&mut calls, "StartUnit").await;
        reply_job(&peer, &call).await;
        drop((peer, calls));
    };
    let (job, ()) = join(client.run_job(start(), Some(Duration::from_secs(600))), script).await;
    assert!(matches!(job, Err(ClientError::ManagerLost)), "{job:?}");
}

#[tokio::test]
async fn a_wait_ends_at_its_limit_and_without_a_limit_the_client_does_not_wait() {
    let (client, peer, mut calls) = connected().await;
    let script = async {
        for _ in 0..2 {
            let call = next_call(&mut calls, "StartUnit").await;
            reply_job(&peer, &call).await;
        }
    };
    let jobs = async {
        let limited = client.run_job(start(), Some(Duration::from_millis(1))).await;
        (limited, client.run_job(start(), None).await)
    };
    let ((limited, queued), ()) = join(jobs, script).await;
    assert!(matches!(limited, Err(ClientError::JobGoesOn { id: 7, .. })), "{limited:?}");
    assert_eq!(queued.unwrap(), Job { id: 7, result: None });
}

#[tokio::test]
async fn an_unknown_object_is_an_unknown_node() {
    let (client, peer, mut calls) = connected().await;
    let script = async {
        let call = next_call(&mut calls, "KillUnit").await;
        let name = "org.freedesktop.DBus.Error.UnknownObject";
        peer.reply_error(&call.header(), name, &"no object").await.unwrap();
    };
    let (killed, ()) = join(client.kill("n-1", "a.service", "all", 15), script).await;
    assert!(matches!(&killed, Err(ClientError::NoSuchNode(node)) if node == "n-1"), "{killed:?}");
}

#[tokio::test]
async fn a_monitor_reports_every_change_also_before_the_reply() {
    let (client, peer, mut calls) = connected().await;
    let path = format!("{MANAGER_PATH}/monitor/1");
    let script = async {
        let call = next_call(&mut calls, "CreateMonitor").await;
        peer.reply(&call.header(), &ObjectPath::try_from(path.as_str()).unwrap()).await.unwrap();
        let call = next_call(&mut calls, "Subscribe").await;
        for monitor in [path.as_str(), "/org/containers/hirte/monitor/2"] {
            for at in 0..MANY {
                let active = OwnedVariant::from(Str::from("active"));
                let state = Properties::from([("ActiveState".to_owned(), active)]);
                let signal = Message::signal(monitor, MONITOR_INTERFACE, "UnitPropertiesChanged");
                peer.send(&signal.build(&("n1", format!("{at}.service"), state)).unwrap()).await.unwrap();
            }
        }
        peer.reply(&call.header(), &1_u32).await.unwrap();
        for node in ["n1", "n2"] {
            let signal = Message::signal(MANAGER_PATH, MANAGER_INTERFACE, "NodeConnectionStateChanged");
            peer.send(&signal.build(&(node, "offline")).unwrap()).await.unwrap();
        }
        let removed = Message::signal(path.as_str(), MONITOR_INTERFACE, "UnitRemoved");
        peer.send(&removed.build(&("n1", "0.service", "virtual")).unwrap()).await.unwrap();
        drop((peer, calls));
    };
    let mut changes = Vec::new();
    let (ended, ()) = join(client.monitor("n1", "*", |change| changes.push(change)), script).await;
    assert!(matches!(ended, Err(ClientError::ManagerLost)), "{ended:?}");
    assert_eq!(changes.len(), MANY + 2);
    let last = changes.split_off(MANY);
    for (at, change) in changes.iter().enumerate() {
        let expected = format!("{at}.service");
        let Change::Unit { unit, state, .. } = change else { panic!("{change:?}") };
        assert_eq!((unit, state.active.as_str()), (&expected, "active"));
    }
    let (node, status, unit) = ("n1".to_owned(), "offline".to_owned(), "0.service".to_owned());
    let lost = Change::Node { node: node.clone(), status };
    assert_eq!(last, [lost, Change::Removed { node, unit, is_node_lost: true }]);
}
