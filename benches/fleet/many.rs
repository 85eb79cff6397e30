//! Hundreds of agents with a systemd in memory, which run in this process, and one real manager.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use portcullis::fleet::agent::{Agent, Settings};
use portcullis::fleet::dbus::accept::TcpPolicy;
use portcullis::fleet::dbus::connect::Security;
use portcullis::fleet::dbus::values::NodeUnitRow;
use portcullis::fleet::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use portcullis::fleet::manager::report::FailedUnits;
use portcullis::fleet::manager::{Leadership, Manager, NodeRule, Timing};
use portcullis::fleet::systemd::{Behaviour, MemorySystemd};
use portcullis::net::listener::Listener;
use portcullis::net::tls::{ClientAuth, ClientFiles, ClientTls, IdentityFiles, ServerFiles, ServerTls};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use zbus::connection::Builder;
use zbus::{Connection, OwnedVariant};

use crate::fleet::{Authority, Process, Site};
use crate::{Row, ms, spread};

/// Set in the environment of a manager that this program runs, with the paths of its files.
pub(crate) const SERVE: &str = "PORTCULLIS_BENCH_SERVE";

const NODES: usize = 100;
const UNITS: usize = 200;
const STORM: usize = 500;
const LISTS: usize = 50;
const MANAGER: &str = "org.containers.hirte.Manager";

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("node{number}")).collect()
}

/// Agents that run until this value is dropped.
struct Agents {
    runtime: Runtime,
    _stop: watch::Sender<bool>,
}

impl Agents {
    fn start(names: &[String], address: &str, authority: &Authority) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        let (stop, stopped) = watch::channel(false);
        let units: Vec<String> = (0..UNITS).map(|number| format!("service-{number}.service")).collect();
        let units: Vec<(&str, Behaviour)> =
            units.iter().map(|unit| (unit.as_str(), Behaviour::Quick)).collect();
        for name in names {
            let identity = Some(authority.issue(name));
            let files = ClientFiles { ca: Some(authority.file()), identity, ..ClientFiles::default() };
            let security = Security::Tls { tls: ClientTls::load(files).unwrap(), server_name: None };
            let settings = Settings {
                name: name.parse().unwrap(),
                managers: watch::channel(vec![address.parse().unwrap()]).1,
                security,
                heartbeat_interval: HEARTBEAT_INTERVAL,
                silence_limit: SILENCE_LIMIT,
                jitter: |most| most.mul_f64(f64::from(std::process::id() % 100) / 100.0),
            };
            let (systemd, events) = MemorySystemd::new(&units);
            runtime.spawn(Agent::new(settings, systemd, events).run(stopped.clone()));
        }
        Self { runtime, _stop: stop }
    }
}

/// A client on the bus.
struct Client(Connection);

impl Client {
    async fn open(site: &Site) -> Self {
        Self(Builder::address(site.bus.address.as_str()).build().await.unwrap())
    }

    async fn status(&self) -> Option<String> {
        let body = (MANAGER, "Status");
        let interface = Some("org.freedesktop.DBus.Properties");
        let path = "/org/containers/hirte";
        let reply = self.0.call_method(Some("org.containers.hirte"), path, interface, "Get", &body).await;
        let value: OwnedVariant = reply.ok()?.body().deserialize().unwrap();
        value.try_into().ok()
    }

    async fn all_online(&self) {
        while self.status().await.as_deref() != Some("up") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn list_units(&self) -> Duration {
        let begun = Instant::now();
        let path = "/org/containers/hirte";
        let reply =
            self.0.call_method(Some("org.containers.hirte"), path, Some(MANAGER), "ListUnits", &()).await;
        let reply = reply.unwrap();
        let time = begun.elapsed();
        let rows: Vec<NodeUnitRow> = reply.body().deserialize().unwrap();
        assert_eq!(rows.len(), NODES * UNITS);
        time
    }
}

pub(crate) fn list() -> Vec<Row> {
    let names = names(NODES);
    let site = Site::new(&names);
    let (_manager, address) = site.manager("127.0.0.1:0");
    let agents = Agents::start(&names, &address, &site.authority);
    let (least, median) = agents.runtime.block_on(async {
        let client = Client::open(&site).await;
        client.all_online().await;
        let mut times = Vec::new();
        for _ in 0..LISTS {
            times.push(client.list_units().await);
        }
        spread(times)
    });
    vec![Row {
        what: "ListUnits of 100 nodes with 200 units, median (least)",
        ours: format!("{:.0} ms ({:.0})", ms(median), ms(least)),
        theirs: "",
        goal: "100 ms",
        met: median < Duration::from_millis(100),
    }]
}

fn row(what: &'static str, manager: &Process) -> Row {
    let (used, own) = manager.megabytes();
    let ours = format!("{used:.1} MB (own {own:.1})");
    Row { what, ours, theirs: "3.7 MB", goal: "10 MB", met: used <= 10.0 }
}

pub(crate) fn memory() -> Vec<Row> {
    let names = names(NODES);
    let mut rows = Vec::new();
    {
        let site = Site::new(&names);
        let (manager, address) = site.manager("127.0.0.1:0");
        let agents = Agents::start(&names, &address, &site.authority);
        agents.runtime.block_on(async {
            let client = Client::open(&site).await;
            client.all_online().await;
            rows.push(row("memory of the manager with 100 nodes, idle", &manager));
            client.list_units().await;
            rows.push(row("memory of the manager after one ListUnits", &manager));
        });
    }
    let authority = Authority::new();
    let identity = authority.issue("127.0.0.1");
    let files = [identity.certificates, identity.key, authority.file()];
    let files = files.map(|path| path.to_str().unwrap().to_owned());
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut manager = Process::of(command.env(SERVE, files.join(":")));
    let address = manager.printed("listening on ");
    let _agents = Agents::start(&names, &address, &authority);
    // The manager reads all units soon after nodes have connected.
    std::thread::sleep(Duration::from_secs(8));
    rows.push(row("memory of the manager after reads of failed units", &manager));
    rows
}

/// Runs a manager that reads failed units, as that of an environment does, without its store.
pub(crate) fn serve() {
    let files = std::env::var(SERVE).unwrap();
    let [certificates, key, ca] = files.split(':').collect::<Vec<_>>()[..] else { panic!("{files}") };
    let identity = IdentityFiles { certificates: certificates.into(), key: key.into() };
    let files = ServerFiles { identity, client_ca: Some((ca.into(), ClientAuth::Required)) };
    let policy = TcpPolicy { tls: Some(ServerTls::load(files).unwrap()), allow_plain: false };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let manager = Manager::new(Timing::default(), Leadership::Leading);
        let rules: BTreeMap<_, _> =
            names(NODES).iter().map(|name| (name.parse().unwrap(), NodeRule::default())).collect();
        manager.set_nodes(rules);
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), 1_000).unwrap();
        let mut out = std::io::stdout().lock();
        writeln!(out, "listening on {}", listener.local_addr().unwrap()).unwrap();
        out.flush().unwrap();
        let (_stop, stopped) = watch::channel(false);
        let found = watch::Sender::new(FailedUnits::new());
        tokio::join!(manager.serve_tcp(listener, policy, stopped), manager.follow_failed_units(&found));
    });
}

/// All agents connect at once after a restart of the manager.
pub(crate) fn storm() -> Vec<Row> {
    let names = names(STORM);
    let site = Site::new(&names);
    let (manager, address) = site.manager("127.0.0.1:0");
    let agents = Agents::start(&names, &address, &site.authority);
    let time = agents.runtime.block_on(async {
        let client = Client::open(&site).await;
        client.all_online().await;
        drop(manager);
        // The agents have noticed the end, and are in their pauses.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (_manager, _) = site.manager(&address);
        let begun = Instant::now();
        client.all_online().await;
        begun.elapsed()
    });
    vec![Row {
        what: "500 agents online after a restart of the manager",
        ours: format!("{:.2} s", time.as_secs_f64()),
        theirs: "",
        goal: "5 s",
        met: time <= Duration::from_secs(5),
    }]
}
