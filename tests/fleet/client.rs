//! A client of the public API on a bus. It remembers the signals about jobs, and the ends of the
//! manager's connection to the bus.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use portcullis::fleet::dbus::errors::CallError;
use portcullis::fleet::dbus::names::BUS_NAME;
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedObjectPath};

use crate::harness::HANG;

pub(crate) const MANAGER: &str = "/org/containers/hirte";

/// A signal about a job. Managers that run one after another number their jobs from the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Signal {
    /// How many managers have ended before this one.
    manager: usize,
    job: String,
    node: String,
    unit: String,
    /// Empty in `JobNew`.
    result: String,
}

#[derive(Debug, Default)]
struct Record {
    new: Vec<Signal>,
    removed: Vec<Signal>,
    /// How often the manager has lost its name on the bus.
    ends: usize,
    /// How often a node went offline.
    offline: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct Client {
    connection: Connection,
    record: Arc<Mutex<Record>>,
}

/// The end of a job, as its caller observed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Result(String),
    /// The call failed: the name of the error.
    Refused(String),
    /// The manager ended before the job did.
    ManagerEnded,
}

impl Client {
    pub(crate) async fn connect(bus: &str) -> Self {
        let connection = Builder::address(bus).build().await.unwrap();
        let record = Arc::<Mutex<Record>>::default();
        // One stream keeps the order of the signals.
        let mut stream = MessageStream::from(&connection);
        let noted = Arc::clone(&record);
        tokio::spawn(async move {
            while let Some(Ok(message)) = stream.next().await {
                if message.message_type() == Type::Signal {
                    note(&mut noted.lock().unwrap(), &message);
                }
            }
        });
        for sender in [BUS_NAME, "org.freedesktop.DBus"] {
            let (to, rule) = ("org.freedesktop.DBus", format!("type='signal',sender='{sender}'"));
            let path = "/org/freedesktop/DBus";
            connection.call_method(Some(to), path, Some(to), "AddMatch", &rule).await.unwrap();
        }
        Self { connection, record }
    }

    pub(crate) async fn call<B>(&self, path: &str, member: &str, body: &B) -> Result<Message, CallError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let call = self.connection.call_method(Some(BUS_NAME), path, None::<&str>, member, body);
        let bounded = tokio::time::timeout(HANG, call).await;
        bounded.unwrap_or_else(|_| panic!("no reply to {member} at {path}")).map_err(CallError::from)
    }

    /// Calls a method that creates a job, and waits until the job ends.
    pub(crate) async fn job(&self, node: &str, member: &str, unit: &str, mode: &str) -> Answer {
        let before = self.record.lock().unwrap().ends;
        let path: OwnedObjectPath = match self.call(&node_path(node), member, &(unit, mode)).await {
            Ok(reply) => reply.body().deserialize().unwrap(),
            Err(error) => return Answer::Refused(error.name),
        };
        let what = format!("{member} {unit} on {node}: end of {}", path.as_str());
        eventually(&what, || {
            let record = self.record.lock().unwrap();
            let ours = |end: &&Signal| end.manager >= before && end.job == path.as_str();
            match record.removed.iter().find(ours) {
                Some(end) => {
                    assert_eq!((end.node.as_str(), end.unit.as_str()), (node, unit));
                    Some(Answer::Result(end.result.clone()))
                }
                None => (record.ends > before).then_some(Answer::ManagerEnded),
            }
        })
        .await
    }

    /// Returns how often a manager has reported that a node went offline.
    pub(crate) fn times_offline(&self) -> usize {
        self.record.lock().unwrap().offline
    }

    /// Returns names and states of all nodes; none while no manager is on the bus.
    pub(crate) async fn nodes(&self) -> Vec<(String, String)> {
        let Ok(reply) = self.call(MANAGER, "ListNodes", &()).await else { return Vec::new() };
        let rows: Vec<(String, OwnedObjectPath, String)> = reply.body().deserialize().unwrap();
        rows.into_iter().map(|(name, _, status)| (name, status)).collect()
    }

    /// Waits until a node has a status.
    pub(crate) async fn until(&self, node: &str, status: &str) {
        let end = Instant::now() + HANG;
        while !self.nodes().await.contains(&(node.to_owned(), status.to_owned())) {
            assert!(Instant::now() < end, "{node} is not {status}: {:?}", self.nodes().await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until every job of the present manager has ended, and checks that none has ended twice
    /// and that no object is left.
    pub(crate) async fn all_jobs_have_ended_once(&self) {
        let count = |record: &Record, new: &Signal| {
            let same = |end: &&Signal| (end.manager, &end.job) == (new.manager, &new.job);
            record.removed.iter().filter(same).count()
        };
        eventually("end of all jobs", || {
            let record = self.record.lock().unwrap();
            let mut present = record.new.iter().filter(|new| new.manager == record.ends);
            present.all(|new| count(&record, new) > 0).then_some(())
        })
        .await;
        {
            let record = self.record.lock().unwrap();
            for new in &record.new {
                let ends = count(&record, new);
                let lost = ends == 0 && new.manager < record.ends;
                assert!(ends == 1 || lost, "{} has {ends} ends: {record:?}", new.job);
            }
        }
        let reply = self.call(&format!("{MANAGER}/job"), "Introspect", &()).await.unwrap();
        let xml: String = reply.body().deserialize().unwrap();
        assert!(!xml.contains("<node name="), "jobs are left:\n{xml}");
    }
}

/// Polls until there is a value. The limit is reached only if something hangs.
pub(crate) async fn eventually<T>(what: &str, mut fact: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + HANG;
    loop {
        if let Some(found) = fact() {
            return found;
        }
        assert!(Instant::now() < end, "no {what} within {HANG:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn note(record: &mut Record, message: &Message) {
    let header = message.header();
    match header.member().map(|member| member.as_str()) {
        Some("JobNew") => {
            let (_, job, node, unit): (u32, OwnedObjectPath, String, String) =
                message.body().deserialize().unwrap();
            let (manager, job, result) = (record.ends, job.as_str().to_owned(), String::new());
            record.new.push(Signal { manager, job, node, unit, result });
        }
        Some("JobRemoved") => {
            let (_, job, node, unit, result): (u32, OwnedObjectPath, String, String, String) =
                message.body().deserialize().unwrap();
            record.removed.push(Signal {
                manager: record.ends,
                job: job.as_str().to_owned(),
                node,
                unit,
                result,
            });
        }
        Some("NodeConnectionStateChanged") => {
            let (_, status): (String, String) = message.body().deserialize().unwrap();
            record.offline += usize::from(status == "offline");
        }
        Some("NameOwnerChanged") => {
            let (name, old, _): (String, String, String) = message.body().deserialize().unwrap();
            record.ends += usize::from(name == BUS_NAME && !old.is_empty());
        }
        _ => {}
    }
}

/// Returns the path of a node whose name needs no escapes.
fn node_path(name: &str) -> String {
    format!("{MANAGER}/node/{name}")
}
