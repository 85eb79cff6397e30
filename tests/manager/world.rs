//! A private bus, a manager on it, and a client.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt as _;
use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::dbus::accept::TcpPolicy;
use portcullis::fleet::dbus::bus::Bus;
use portcullis::fleet::dbus::errors::CallError;
use portcullis::fleet::dbus::names::BUS_NAME;
use portcullis::fleet::manager::bus::BusConnection;
use portcullis::fleet::manager::{Leadership, Manager, NodeRule, Timing};
use portcullis::net::listener::Listener;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedObjectPath};

pub(crate) const MANAGER: &str = "/org/containers/hirte";
/// Only a hang reaches it, even on a busy machine.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Waits for something that has to happen.
pub(crate) async fn soon<T>(what: &str, wanted: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, wanted).await.unwrap_or_else(|_| panic!("no {what} within {HANG:?}"))
}

/// A `dbus-daemon` that lets every user own and call everything: the manager decides.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) address: String,
}

impl Daemon {
    pub(crate) fn start(dir: &TempDir) -> Self {
        let config = dir.path().join("bus.conf");
        let socket = dir.path().join("bus");
        let text = format!(
            "<busconfig><type>session</type><listen>unix:path={}</listen><auth>EXTERNAL</auth>\
             <policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/>\
             <allow send_type=\"method_call\"/><allow send_destination=\"*\"/>\
             <allow receive_sender=\"*\"/></policy></busconfig>",
            socket.display()
        );
        std::fs::write(&config, text).unwrap();
        let mut child = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", config.display()))
            .args(["--nofork", "--print-address"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("dbus-daemon");
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self { child, address: address.trim().to_owned() }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) struct World {
    pub(crate) manager: Manager,
    /// Plain TCP on a loopback address.
    pub(crate) tcp: ManagerAddress,
    pub(crate) unix: ManagerAddress,
    pub(crate) bus: String,
    stop: watch::Sender<bool>,
    on_bus: Mutex<Option<JoinHandle<()>>>,
    _tcp: JoinHandle<()>,
    _unix: JoinHandle<()>,
    daemon: Daemon,
    _dir: TempDir,
}

/// Heartbeats that are fast enough for a test, and a limit that a busy machine does not reach.
pub(crate) fn patient() -> Timing {
    Timing { heartbeat_interval: Duration::from_millis(200), silence_limit: Duration::from_secs(60) }
}

impl World {
    pub(crate) async fn start(nodes: &[&str]) -> Self {
        Self::with(nodes, patient(), TcpPolicy { tls: None, allow_plain: false }, None).await
    }

    pub(crate) async fn with(
        nodes: &[&str],
        timing: Timing,
        policy: TcpPolicy,
        group: Option<String>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Other users connect to the bus.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), mode).unwrap();
        let daemon = Daemon::start(&dir);
        let manager = Manager::new(timing, Leadership::Leading);
        manager.set_nodes(nodes.iter().map(|name| (name.parse().unwrap(), NodeRule::default())).collect());
        let (stop, stopped) = watch::channel(false);
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), 1_000).unwrap();
        let tcp = listener.local_addr().unwrap().to_string().parse().unwrap();
        let (on_tcp, stop_tcp) = (manager.clone(), stopped.clone());
        let _tcp = tokio::spawn(async move { on_tcp.serve_tcp(listener, policy, stop_tcp).await });
        let socket: PathBuf = dir.path().join("manager");
        let local = UnixListener::bind(&socket).unwrap();
        let (on_unix, stop_unix) = (manager.clone(), stopped.clone());
        let _unix = tokio::spawn(async move { on_unix.serve_unix(local, stop_unix).await });
        let bus = Bus::Address(daemon.address.clone());
        let connected = BusConnection::connect(&bus).await.unwrap();
        let serving = manager.clone();
        let on_bus = tokio::spawn(async move { serving.serve_bus(connected, &bus, group, stopped).await });
        Self {
            manager,
            tcp,
            unix: ManagerAddress::Unix(socket),
            bus: daemon.address.clone(),
            stop,
            on_bus: Mutex::new(Some(on_bus)),
            _tcp,
            _unix,
            daemon,
            _dir: dir,
        }
    }

    /// Stops the manager as SIGTERM does, and waits until the bus has all signals.
    pub(crate) async fn stop(&self) {
        self.stop.send_replace(true);
        let on_bus = self.on_bus.lock().unwrap().take().expect("not stopped yet");
        soon("end of the manager", on_bus).await.unwrap();
    }

    /// Stops the process of the bus, or continues it.
    pub(crate) fn pause_bus(&self, is_paused: bool) {
        use rustix::process::{Pid, Signal, kill_process};
        let signal = if is_paused { Signal::STOP } else { Signal::CONT };
        kill_process(Pid::from_child(&self.daemon.child), signal).unwrap();
    }

    pub(crate) async fn client(&self) -> Client {
        let connection = Builder::address(self.bus.as_str()).build().await.unwrap();
        let rule = zbus::MatchRule::builder().msg_type(Type::Signal).sender(BUS_NAME).build().unwrap();
        let signals = MessageStream::for_match_rule(rule, &connection, None).await.unwrap();
        Client::new(connection, signals)
    }
}

/// A client of the public API, which remembers all signals.
pub(crate) struct Client {
    pub(crate) connection: Connection,
    signals: mpsc::UnboundedReceiver<Message>,
    reading: JoinHandle<()>,
}

impl Client {
    pub(crate) fn new(connection: Connection, mut messages: MessageStream) -> Self {
        let (sender, signals) = mpsc::unbounded_channel();
        let reading = tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let is_beat = message.header().member().is_some_and(|member| *member == "Heartbeat");
                if message.message_type() == Type::Signal && !is_beat && sender.send(message).is_err() {
                    break;
                }
            }
        });
        Self { connection, signals, reading }
    }

    pub(crate) async fn call<B>(&self, path: &str, member: &str, body: &B) -> Result<Message, CallError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let called = self.connection.call_method(Some(BUS_NAME), path, None::<&str>, member, body);
        soon(member, called).await.map_err(CallError::from)
    }

    /// Sends a call, whose reply is ignored.
    pub(crate) async fn send<B>(&self, path: &str, member: &str, body: &B)
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let call = Message::method_call(path, member).destination(BUS_NAME);
        self.connection.send(&call.build(body).unwrap()).await.unwrap();
    }

    /// Calls a method that returns a job.
    pub(crate) async fn job(
        &self,
        node: &str,
        member: &str,
        unit: &str,
        mode: &str,
    ) -> Result<u32, CallError> {
        let reply = self.call(&node_path(node), member, &(unit, mode)).await?;
        let path: OwnedObjectPath = reply.body().deserialize().unwrap();
        Ok(path.as_str().rsplit('/').next().unwrap().parse().unwrap())
    }

    pub(crate) async fn property<T>(&self, path: &str, interface: &str, name: &str) -> T
    where
        T: TryFrom<zbus::OwnedVariant>,
        T::Error: std::fmt::Debug,
    {
        let interface = format!("org.containers.hirte.{interface}");
        let reply = self.call(path, "Get", &(interface, name)).await.unwrap();
        let value: zbus::OwnedVariant = reply.body().deserialize().unwrap();
        value.try_into().unwrap()
    }

    /// Returns the next signal with this name; others are skipped.
    pub(crate) async fn signal(&mut self, member: &str) -> Message {
        let next = async {
            loop {
                let message = self.signals.recv().await.expect("a connection");
                if message.header().member().is_some_and(|found| *found == member) {
                    return message;
                }
            }
        };
        soon(member, next).await
    }

    /// Returns id and result of the next `JobRemoved`.
    pub(crate) async fn removed(&mut self) -> (u32, String) {
        let message = self.signal("JobRemoved").await;
        let body = message.body();
        let (id, path, _, _, result): (u32, OwnedObjectPath, String, String, String) =
            body.deserialize().unwrap();
        assert_eq!(path.as_str(), job_path(id));
        (id, result)
    }

    /// Waits until the manager has closed the connection.
    pub(crate) async fn closed(&mut self) {
        soon("end of the connection", &mut self.reading).await.unwrap();
    }

    /// Waits until a node has a status.
    pub(crate) async fn until_status(&mut self, node: &str, status: &str) {
        while self.property::<String>(&node_path(node), "Node", "Status").await != status {
            self.signal("NodeConnectionStateChanged").await;
        }
    }

    pub(crate) async fn disconnect(self) {
        self.reading.abort();
        self.connection.close().await.unwrap();
    }
}

pub(crate) fn node_path(name: &str) -> String {
    format!("{MANAGER}/node/{}", portcullis::fleet::name::escape(name))
}

pub(crate) fn job_path(id: u32) -> String {
    format!("{MANAGER}/job/{id}")
}
