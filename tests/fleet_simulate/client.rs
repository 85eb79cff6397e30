//! Clients of the manager's API, and what an observer has received.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::StreamExt as _;
use portcullis::fleet::dbus::errors::CallError;
use portcullis::fleet::dbus::values::Properties;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zbus::message::Type;
use zbus::{Connection, Message, OwnedObjectPath};

use crate::network::Network;

pub(crate) const MANAGER: &str = "/org/containers/hirte";

/// The longest time that a call may take: the time of a call to a node, and a margin.
const ANSWERED: Duration = Duration::from_secs(25);

/// The signals of one manager.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// How often each job was announced and ended.
    pub(crate) jobs: BTreeMap<u32, (usize, usize)>,
    /// The nodes of the announced jobs.
    pub(crate) nodes: Vec<String>,
    /// The active state of each unit of each node.
    pub(crate) units: BTreeMap<(String, String), String>,
}

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) connection: Connection,
    seen: Arc<Mutex<Seen>>,
    reading: JoinHandle<()>,
}

impl Client {
    /// Connects as an operator. A manager has to run.
    pub(crate) async fn open(network: &Network) -> Self {
        let mut peer = network.operator().await.expect("a manager");
        let connection = peer.connection.clone();
        let seen = Arc::<Mutex<Seen>>::default();
        let noted = Arc::clone(&seen);
        let reading = tokio::spawn(async move {
            while let Some(Ok(message)) = peer.messages.next().await {
                if message.message_type() == Type::Signal {
                    note(&message, &mut noted.lock().expect("a lock"));
                }
            }
        });
        Self { connection, seen, reading }
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("a lock")
    }

    /// Waits until the manager has closed the connection.
    pub(crate) async fn ended(&mut self) {
        (&mut self.reading).await.expect("the end of a connection");
    }

    pub(crate) async fn call<B>(&self, path: &str, member: &str, body: &B) -> Result<Message, CallError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        call(&self.connection, path, member, body).await
    }

    /// Returns the names of the objects below a path.
    pub(crate) async fn children(&self, kind: &str) -> Vec<String> {
        let reply = self.call(&format!("{MANAGER}/{kind}"), "Introspect", &()).await.expect("introspection");
        let document: String = reply.body().deserialize().expect("a document");
        let names = document.split("<node name=\"").skip(1);
        names.map(|rest| rest.split('"').next().unwrap_or_default().to_owned()).collect()
    }

    pub(crate) async fn monitor(&self) -> Result<String, CallError> {
        let reply = self.call(MANAGER, "CreateMonitor", &()).await?;
        let path: OwnedObjectPath = reply.body().deserialize().expect("a path");
        Ok(path.as_str().to_owned())
    }

    pub(crate) async fn status(&self) -> String {
        let body = ("org.containers.hirte.Manager", "Status");
        let reply = self.call(MANAGER, "Get", &body).await.expect("a property");
        let value: zbus::OwnedVariant = reply.body().deserialize().expect("a value");
        value.try_into().expect("a text")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

/// Makes a call, which has to be answered in time.
pub(crate) async fn call<B>(
    connection: &Connection,
    path: &str,
    member: &str,
    body: &B,
) -> Result<Message, CallError>
where
    B: serde::Serialize + zbus::DynamicType,
{
    let called = connection.call_method(None::<&str>, path, None::<&str>, member, body);
    let answer = timeout(ANSWERED, called).await;
    answer.unwrap_or_else(|_| panic!("no answer to {member} of {path}")).map_err(CallError::from)
}

/// Notes a signal.
fn note(signal: &Message, seen: &mut Seen) {
    let (header, body) = (signal.header(), signal.body());
    match header.member().map(|member| member.as_str()).unwrap_or_default() {
        "JobNew" => {
            let (id, _, node, _): (u32, OwnedObjectPath, String, String) = body.deserialize().expect("a job");
            seen.jobs.entry(id).or_default().0 += 1;
            seen.nodes.push(node);
        }
        "JobRemoved" => {
            let (id, ..): (u32, OwnedObjectPath, String, String, String) = body.deserialize().expect("a job");
            seen.jobs.entry(id).or_default().1 += 1;
        }
        "UnitPropertiesChanged" => {
            let (node, unit, properties): (String, String, Properties) =
                body.deserialize().expect("a change");
            let active = <&str>::try_from(&properties["ActiveState"]).expect("a state").to_owned();
            seen.units.insert((node, unit), active);
        }
        "UnitRemoved" => {
            let (node, unit, _): (String, String, String) = body.deserialize().expect("a removal");
            seen.units.remove(&(node, unit));
        }
        _ => {}
    }
}
