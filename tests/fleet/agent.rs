//! The agent on a real node, with a manager that this test plays: the contract in
//! `fleet::dbus::internal`.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::StreamExt as _;
use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::agent::{Agent, Settings};
use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::connect::Security;
use portcullis::fleet::dbus::internal::AgentProxy;
use portcullis::fleet::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use portcullis::fleet::systemd::Systemd;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zbus::connection::{AuthMechanism, Builder};
use zbus::message::Type;
use zbus::proxy::CacheProperties;
use zbus::{Connection, Guid, Message, MessageStream, OwnedVariant};

use crate::harness::HANG;
use crate::node::Node;

/// A manager that this test plays, with one agent.
struct World {
    node: Node,
    listener: TcpListener,
    agent: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

impl World {
    async fn start(silence_limit: Duration) -> Self {
        let node = Node::start();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        // The first address does not answer; the agent tries the next one.
        let managers = ["127.0.0.1:1".to_owned(), format!("127.0.0.1:{port}")];
        let managers: Vec<ManagerAddress> = managers.iter().map(|address| address.parse().unwrap()).collect();
        let settings = Settings {
            name: "n1".parse().unwrap(),
            managers: watch::channel(managers).1,
            security: Security::Plain,
            heartbeat_interval: HEARTBEAT_INTERVAL.min(silence_limit / 3),
            silence_limit,
            jitter: |most| most / 2,
        };
        let (control, events) = Systemd::connect(Bus::Address(node.address()));
        let (stop, stopped) = watch::channel(false);
        let agent = tokio::spawn(Agent::new(settings, control, events).run(stopped));
        Self { node, listener, agent, stop }
    }

    /// Accepts a connection of the agent, and answers its registration.
    async fn accept(&self) -> Link {
        let accepted = timeout(HANG, self.listener.accept()).await.expect("a connection").unwrap();
        let stream = accepted.0.into_std().unwrap();
        let builder = Builder::tcp_stream(stream).server(Guid::generate()).p2p();
        let connection = builder.auth_mechanism(AuthMechanism::Anonymous);
        let mut messages = connection.build_message_stream().await.unwrap();
        let connection = Connection::from(&messages);
        let register = timeout(HANG, messages.next()).await.expect("a call").unwrap().unwrap();
        assert_eq!(register.header().member().unwrap().as_str(), "Register");
        assert_eq!(register.body().deserialize::<&str>().unwrap(), "n1");
        connection.reply(&register.header(), &()).await.unwrap();
        let agent = AgentProxy::builder(&connection).cache_properties(CacheProperties::No);
        Link { agent: agent.build().await.unwrap(), messages }
    }

    async fn end(self) {
        self.stop.send_replace(true);
        timeout(HANG, self.agent).await.expect("the end of the agent").unwrap();
    }
}

/// A connection with a registered agent.
struct Link {
    agent: AgentProxy<'static>,
    messages: MessageStream,
}

impl Link {
    /// Returns the next signal with this name. Others are passed over.
    async fn signal(&mut self, name: &str) -> Message {
        loop {
            let message = timeout(HANG, self.messages.next()).await.expect("a signal").unwrap().unwrap();
            let is_signal = message.message_type() == Type::Signal;
            if is_signal && message.header().member().is_some_and(|member| member.as_str() == name) {
                return message;
            }
        }
    }

    async fn job_done(&mut self) -> (u32, String) {
        self.signal("JobDone").await.body().deserialize().unwrap()
    }

    /// Receives changes until the unit has this state. Returns all states.
    async fn states_until(&mut self, unit: &str, active: &str) -> Vec<String> {
        let mut states = Vec::new();
        loop {
            let message = self.signal("UnitPropertiesChanged").await;
            let body = message.body();
            let (of, properties): (String, HashMap<String, OwnedVariant>) = body.deserialize().unwrap();
            assert_eq!((of.as_str(), properties.len()), (unit, 5), "{properties:?}");
            let state = <&str>::try_from(&*properties["ActiveState"]).unwrap().to_owned();
            states.push(state.clone());
            if state == active {
                return states;
            }
        }
    }
}

fn error_name(error: zbus::Error) -> String {
    match error {
        zbus::Error::MethodError(name, ..) => name.to_string(),
        other => other.to_string(),
    }
}

#[tokio::test]
async fn calls_and_jobs_are_executed_by_systemd() {
    let world = World::start(SILENCE_LIMIT).await;
    let mut link = world.accept().await;
    let agent = link.agent.clone();
    agent.start_unit("quick.service", "replace", 1).await.unwrap();
    assert_eq!(link.job_done().await, (1, "done".to_owned()));
    assert_eq!(world.node.property("quick.service", "ActiveState"), "active");
    agent.start_unit("failing.service", "replace", 2).await.unwrap();
    assert_eq!(link.job_done().await, (2, "failed".to_owned()));
    let unknown = agent.start_unit("unknown.service", "replace", 3).await.unwrap_err();
    assert_eq!(error_name(unknown), "org.freedesktop.systemd1.NoSuchUnit");

    // A job is cancelled also if the request overtakes systemd's reply.
    let (start, cancel) = tokio::join!(agent.start_unit("slow.service", "replace", 4), agent.job_cancel(4));
    start.unwrap();
    cancel.unwrap();
    assert_eq!(link.job_done().await, (4, "cancelled".to_owned()));
    agent.job_cancel(77).await.unwrap();

    let properties = agent.get_unit_properties("quick.service", "").await.unwrap();
    assert_eq!(<&str>::try_from(&*properties["SubState"]).unwrap(), "running");
    let all = agent.get_unit_properties("quick.service", "org.freedesktop.systemd1.Service").await.unwrap();
    assert!(all.len() > 50 && all.contains_key("MainPID"), "{}", all.len());
    let units = agent.list_units().await.unwrap();
    assert!(units.iter().any(|row| row.0 == "quick.service" && row.3 == "active"));
    assert_eq!(agent.get_unit_file_state("quick.service").await.unwrap(), "disabled");
    assert_eq!(agent.enable_unit_files(&["quick.service"], false, false).await.unwrap().1.len(), 1);
    assert_eq!(agent.disable_unit_files(&["quick.service"], false).await.unwrap().len(), 1);
    agent.freeze_unit("quick.service").await.unwrap();
    agent.thaw_unit("quick.service").await.unwrap();
    agent.kill_unit("quick.service", "all", 9).await.unwrap();
    agent.reset_failed_unit("failing.service").await.unwrap();
    agent.reset_failed().await.unwrap();
    agent.reload().await.unwrap();
    assert_eq!(agent.get_default_target().await.unwrap(), "default.target");
    let connection = agent.inner().connection();
    let path = agent.inner().path();
    let interface = Some("org.containers.hirte.internal.Agent");
    let wrong = connection.call_method(None::<&str>, path, interface, "StartUnit", &(1u32,)).await;
    assert!(wrong.unwrap_err().to_string().contains("the arguments have other types"));
    let unknown = connection.call_method(None::<&str>, path, interface, "Explode", &()).await;
    assert!(unknown.unwrap_err().to_string().contains("the agent has no such method"));
    world.end().await;
}

#[tokio::test]
async fn subscriptions_report_the_state_and_each_change_once() {
    let world = World::start(SILENCE_LIMIT).await;
    let mut link = world.accept().await;
    let agent = link.agent.clone();
    let unit = "quick.service";
    agent.subscribe(unit).await.unwrap();
    assert_eq!(link.states_until(unit, "inactive").await, ["inactive"]);
    // A second subscription that matches too reports the state again, but each change only once.
    agent.start_unit(unit, "replace", 1).await.unwrap();
    assert_eq!(link.states_until(unit, "active").await, ["active"]);
    agent.subscribe("qui*").await.unwrap();
    assert_eq!(link.states_until(unit, "active").await, ["active"]);
    world.node.systemctl(&["stop", unit]);
    let states = link.states_until(unit, "inactive").await;
    assert!(states == ["deactivating", "inactive"] || states == ["inactive"], "{states:?}");
    agent.unsubscribe(unit).await.unwrap();
    agent.start_unit(unit, "replace", 2).await.unwrap();
    assert_eq!(link.states_until(unit, "active").await, ["active"]);
    agent.unsubscribe("qui*").await.unwrap();
    world.node.systemctl(&["restart", unit]);
    agent.start_unit("slow.service", "replace", 3).await.unwrap();
    world.node.let_slow_start();
    // The result of a later job is the next signal about anything but heartbeats.
    loop {
        let message = timeout(HANG, link.messages.next()).await.expect("a signal").unwrap().unwrap();
        let header = message.header();
        let name = header.member().map(|member| member.as_str()).unwrap_or_default();
        assert!(name != "UnitPropertiesChanged", "{message:?}");
        if name == "JobDone" && message.body().deserialize::<(u32, &str)>().unwrap().0 == 3 {
            break;
        }
    }
    world.end().await;
}

/// More units than the replies that a bus allows one connection to await.
const MANY: usize = 300;

#[tokio::test]
async fn a_glob_reports_every_unit_that_it_matches() {
    let world = World::start(HANG).await;
    let names: Vec<String> = (0..MANY).map(|at| format!("many{at}.service")).collect();
    let unit = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStop=/bin/true\n";
    for name in &names {
        std::fs::write(world.node.file("units").join(name), unit).unwrap();
    }
    let all = format!("[Unit]\nWants={}\n", names.join(" "));
    std::fs::write(world.node.file("units/all.target"), all).unwrap();
    let mut link = world.accept().await;
    world.node.systemctl(&["daemon-reload"]);
    world.node.systemctl(&["start", "all.target", &names[0]]);
    link.agent.subscribe("many*.service").await.unwrap();
    let mut reported = HashSet::new();
    while reported.len() < MANY {
        let message = link.signal("UnitPropertiesChanged").await;
        let (name, properties): (String, HashMap<String, OwnedVariant>) =
            message.body().deserialize().unwrap();
        if <&str>::try_from(&*properties["ActiveState"]) == Ok("active") {
            reported.insert(name);
        }
    }
    world.end().await;
}

#[tokio::test]
async fn a_subscription_takes_effect_when_systemd_is_reachable() {
    // This manager sends no heartbeats.
    let world = World::start(HANG).await;
    let mut link = world.accept().await;
    world.node.systemctl(&["stop", "dbus.service", "dbus.socket"]);
    link.agent.subscribe("quick.service").await.unwrap();
    world.node.systemctl(&["start", "dbus.service"]);
    link.states_until("quick.service", "inactive").await;
    world.end().await;
}

#[tokio::test]
async fn a_lost_manager_is_found_again_and_jobs_are_joined() {
    let world = World::start(SILENCE_LIMIT).await;
    let mut link = world.accept().await;
    link.agent.subscribe("slow.service").await.unwrap();
    link.agent.start_unit("slow.service", "replace", 9).await.unwrap();
    link.states_until("slow.service", "activating").await;
    drop(link);
    // The next connection does not get the results and changes of the last one. The job still runs
    // in systemd, and another call joins it.
    let mut link = world.accept().await;
    link.agent.start_unit("slow.service", "replace", 1).await.unwrap();
    world.node.let_slow_start();
    assert_eq!(link.job_done().await, (1, "done".to_owned()));
    assert_eq!(world.node.property("slow.service", "ActiveState"), "active");
    link.signal("Heartbeat").await;
    world.end().await;
}

#[tokio::test]
async fn a_silent_manager_is_left() {
    let world = World::start(Duration::from_millis(900)).await;
    // This manager sends no heartbeat.
    let silent = world.accept().await;
    let _next = world.accept().await;
    drop(silent);
    world.end().await;
}
