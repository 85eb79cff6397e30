//! An agent that a test plays: the internal protocol without systemd. Units whose names begin with
//! `slow` stay in their job until the test ends it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::dbus::connect::{ConnectError, Peer, Security, connect};
use portcullis::fleet::dbus::errors::{CallError, NO_SUCH_UNIT};
use portcullis::fleet::dbus::internal::ManagerProxy;
use portcullis::fleet::dbus::names::{INTERNAL_AGENT_INTERFACE, INTERNAL_AGENT_PATH};
use portcullis::fleet::dbus::socket::Activity;
use portcullis::fleet::dbus::values::Properties;
use portcullis::model::Glob;
use tokio::task::JoinHandle;
use zbus::message::{Header, Type};
use zbus::{Connection, Message, OwnedObjectPath, OwnedVariant};

use crate::world::soon;

#[derive(Debug, Default)]
struct State {
    /// Active states by unit.
    units: BTreeMap<String, String>,
    subscribed: BTreeSet<String>,
    calls: Vec<String>,
    /// Heartbeats begin after the registration.
    is_registered: bool,
}

pub(crate) struct Agent {
    pub(crate) connection: Connection,
    pub(crate) activity: Activity,
    state: Arc<Mutex<State>>,
    serving: JoinHandle<()>,
}

/// Why an agent is not registered.
#[derive(Debug)]
pub(crate) enum NotRegistered {
    Connect(ConnectError),
    Refused(CallError),
}

impl Agent {
    pub(crate) async fn register(address: &ManagerAddress, name: &str) -> Result<Self, NotRegistered> {
        Self::register_with(address, name, &Security::Plain).await
    }

    pub(crate) async fn register_with(
        address: &ManagerAddress,
        name: &str,
        security: &Security,
    ) -> Result<Self, NotRegistered> {
        let peer = connect(address, security).await.map_err(NotRegistered::Connect)?;
        let (connection, activity) = (peer.connection.clone(), peer.activity.clone());
        let state = Arc::new(Mutex::new(State::default()));
        let serving = tokio::spawn(serve(peer, Arc::clone(&state)));
        let manager = ManagerProxy::new(&connection).await.unwrap();
        let registered = soon("answer to Register", manager.register(name)).await;
        registered.map_err(|error| NotRegistered::Refused(error.into()))?;
        state.lock().unwrap().is_registered = true;
        Ok(Self { connection, activity, state, serving })
    }

    /// Sends a signal of the agent.
    pub(crate) async fn emit<B>(&self, member: &str, body: &B)
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        emit(&self.connection, member, body).await;
    }

    /// Sets a unit, and reports the change if it is subscribed to.
    pub(crate) async fn set_unit(&self, unit: &str, active: &str) {
        let observed = {
            let mut state = self.state.lock().unwrap();
            state.units.insert(unit.to_owned(), active.to_owned());
            state.subscribed.iter().any(|pattern| Glob::new(pattern).matches(unit))
        };
        if observed {
            self.emit("UnitPropertiesChanged", &(unit, properties(active))).await;
        }
    }

    /// Waits until a call was received.
    pub(crate) async fn called(&self, call: &str) {
        self.called_times(call, 1).await;
    }

    /// Waits until a call was received this often.
    pub(crate) async fn called_times(&self, call: &str, times: usize) {
        let count = || self.state.lock().unwrap().calls.iter().filter(|found| *found == call).count();
        let received = async {
            while count() < times {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        soon(call, received).await;
    }

    /// Ends the connection as the death of the process does.
    pub(crate) fn kill(self) {
        self.activity.end("killed");
        self.serving.abort();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.serving.abort();
        self.activity.end("dropped");
    }
}

pub(crate) fn properties(active: &str) -> Properties {
    let values = [("LoadState", "loaded"), ("ActiveState", active), ("SubState", "sub")];
    let owned = |text: &str| OwnedVariant::try_from(zbus::Variant::from(text.to_owned())).unwrap();
    values.into_iter().map(|(name, value)| (name.to_owned(), owned(value))).collect()
}

async fn emit<B>(connection: &Connection, member: &str, body: &B)
where
    B: serde::Serialize + zbus::DynamicType,
{
    let (path, interface) = (INTERNAL_AGENT_PATH, INTERNAL_AGENT_INTERFACE);
    // The manager may be gone.
    let _ = connection.emit_signal(None::<()>, path, interface, member, body).await;
}

async fn serve(mut peer: Peer, state: Arc<Mutex<State>>) {
    let connection = peer.connection.clone();
    let mut beat = tokio::time::interval(std::time::Duration::from_millis(200));
    loop {
        tokio::select! {
            _ = beat.tick() => {
                let is_registered = state.lock().unwrap().is_registered;
                if is_registered {
                    emit(&connection, "Heartbeat", &()).await;
                }
            }
            message = peer.next() => match message {
                Some(message) if message.message_type() == Type::MethodCall => {
                    answer(&connection, &message, &state).await;
                }
                Some(_) => {}
                None => return,
            },
        }
    }
}

async fn reply<B>(connection: &Connection, header: &Header<'_>, body: &B)
where
    B: serde::Serialize + zbus::DynamicType,
{
    // The manager may be gone.
    let _ = connection.reply(header, body).await;
}

async fn answer(connection: &Connection, call: &Message, state: &Mutex<State>) {
    let (header, body) = (call.header(), call.body());
    let member = header.member().unwrap().as_str().to_owned();
    let first: String = match body.deserialize::<zbus::Structure<'_>>() {
        Ok(arguments) => match arguments.fields().first() {
            Some(zbus::Variant::Str(text)) => text.to_string(),
            Some(zbus::Variant::U32(id)) => id.to_string(),
            _ => String::new(),
        },
        Err(_) => String::new(),
    };
    state.lock().unwrap().calls.push(format!("{member} {first}").trim().to_owned());
    if first == "missing.service" {
        let text = "Unit missing.service not found.";
        let _ = connection.reply_error(&header, NO_SUCH_UNIT, &text).await;
        return;
    }
    match member.as_str() {
        "StartUnit" | "StopUnit" | "ReloadUnit" | "RestartUnit" | "StartTransientUnit" => {
            let arguments: zbus::Structure<'_> = body.deserialize().unwrap();
            let Some(zbus::Variant::U32(id)) = arguments.fields().last() else { panic!("no id") };
            // The result may come first.
            if first.starts_with("early") {
                emit(connection, "JobDone", &(id, "done")).await;
            }
            reply(connection, &header, &()).await;
            if !first.starts_with("slow") && !first.starts_with("early") {
                emit(connection, "JobDone", &(id, "done")).await;
            }
        }
        "JobCancel" => {
            let id: u32 = body.deserialize().unwrap();
            emit(connection, "JobDone", &(id, "cancelled")).await;
        }
        "Subscribe" => {
            let matching: Vec<(String, String)> = {
                let mut state = state.lock().unwrap();
                state.subscribed.insert(first.clone());
                let glob = Glob::new(&first);
                let units = state.units.iter().filter(|(unit, _)| glob.matches(unit));
                units.map(|(unit, active)| (unit.clone(), active.clone())).collect()
            };
            for (unit, active) in matching {
                emit(connection, "UnitPropertiesChanged", &(unit, properties(&active))).await;
            }
        }
        "Unsubscribe" => {
            state.lock().unwrap().subscribed.remove(&first);
        }
        // Never answered.
        "ListUnits" if state.lock().unwrap().units.contains_key("stuck-list.service") => {}
        "ListUnits" => {
            let listed = rows(&state.lock().unwrap().units);
            reply(connection, &header, &listed).await;
        }
        "ListUnitFiles" => reply(connection, &header, &vec![("/a.service", "enabled")]).await,
        "ReadJournal" => reply(connection, &header, &vec!["{}"]).await,
        "GetUnitProperties" => reply(connection, &header, &properties("active")).await,
        "GetUnitProperty" => reply(connection, &header, &zbus::Variant::from(1_u32)).await,
        "GetUnitFileState" if first == "number.service" => reply(connection, &header, &7_u32).await,
        "GetUnitFileState" => reply(connection, &header, &"enabled").await,
        "GetDefaultTarget" => reply(connection, &header, &"multi-user.target").await,
        "EnableUnitFiles" => reply(connection, &header, &(true, vec![("symlink", "a", "b")])).await,
        "DisableUnitFiles" | "SetDefaultTarget" => {
            reply(connection, &header, &vec![("unlink", "a", "")]).await;
        }
        // Never answered: the node is lost meanwhile.
        "FreezeUnit" if first == "stuck.service" => {}
        _ => reply(connection, &header, &()).await,
    }
}

type Row = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

fn rows(units: &BTreeMap<String, String>) -> Vec<Row> {
    let root = || OwnedObjectPath::try_from("/").unwrap();
    let row = |(unit, active): (&String, &String)| {
        let text = str::to_owned;
        let (load, sub) = (text("loaded"), text("sub"));
        (unit.clone(), text("about"), load, active.clone(), sub, text(""), root(), 0, text(""), root())
    };
    units.iter().map(row).collect()
}

/// Counts how often each value occurs.
pub(crate) fn counts<T: std::hash::Hash + Eq>(values: impl IntoIterator<Item = T>) -> HashMap<T, usize> {
    let mut counts = HashMap::new();
    for value in values {
        *counts.entry(value).or_default() += 1;
    }
    counts
}
