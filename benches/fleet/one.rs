//! One node with a real systemd: the time of a job, and the memory of the agent.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::{Connection, MatchRule, MessageStream, OwnedObjectPath, Structure, Variant};

use crate::fleet::{Process, Site};
use crate::harness::HANG;
use crate::node::Node;
use crate::world::node_path;
use crate::{Row, ms, spread};

const ROUNDS: usize = 600;
const JOBS: usize = 1_000;
const UNIT: &str = "bench.service";

/// A manager of systemd units on a bus: systemd itself, or ours.
struct Starter {
    connection: Connection,
    signals: MessageStream,
    name: &'static str,
    path: String,
    interface: &'static str,
}

impl Starter {
    async fn open(bus: &str, name: &'static str, path: String, interface: &'static str) -> Self {
        let connection = Builder::address(bus).build().await.unwrap();
        let rule = MatchRule::builder().msg_type(Type::Signal).sender(name).member("JobRemoved");
        let rule = rule.build().unwrap();
        let signals = MessageStream::for_match_rule(rule, &connection, None).await.unwrap();
        Self { connection, signals, name, path, interface }
    }

    /// Starts the unit, and returns the time until the end of the job.
    async fn start(&mut self) -> Duration {
        let begun = Instant::now();
        let (name, path, interface) = (self.name, self.path.as_str(), Some(self.interface));
        let body = (UNIT, "replace");
        let reply = self.connection.call_method(Some(name), path, interface, "StartUnit", &body).await;
        let reply = reply.unwrap();
        let job: OwnedObjectPath = reply.body().deserialize().unwrap();
        loop {
            let signal = self.signals.next().await.unwrap().unwrap();
            let body = signal.body();
            let ended: Structure<'_> = body.deserialize().unwrap();
            if matches!(&ended.fields()[1], Variant::ObjectPath(path) if path.as_str() == job.as_str()) {
                assert_eq!(ended.fields().last().unwrap(), &Variant::from("done"));
                return begun.elapsed();
            }
        }
    }
}

/// A node, a manager and an agent.
struct Fleet {
    node: Node,
    site: Site,
    agent: Process,
    _manager: Process,
}

impl Fleet {
    fn start() -> Self {
        let node = Node::start();
        let unit = "[Service]\nType=oneshot\nExecStart=/bin/true\n";
        std::fs::write(node.file("units").join(UNIT), unit).unwrap();
        node.systemctl(&["daemon-reload"]);
        let site = Site::new(&["n1".to_owned()]);
        let (manager, address) = site.manager("127.0.0.1:0");
        let identity = site.authority.issue("n1");
        let (certificate, key) = (identity.certificates.to_str().unwrap(), identity.key.to_str().unwrap());
        let ca = site.authority.file();
        let bus = node.address();
        let options = ["agent", "--name", "n1", "--manager", &address, "--bus", &bus];
        let tls = ["--tls-cert", certificate, "--tls-key", key, "--ca-file", ca.to_str().unwrap()];
        let agent = Process::start(&[&options[..], &tls].concat());
        Self { node, site, agent, _manager: manager }
    }

    async fn ours(&self) -> Starter {
        let bus = &self.site.bus.address;
        let starter =
            Starter::open(bus, "org.containers.hirte", node_path("n1"), "org.containers.hirte.Node").await;
        let online = || async {
            let body = ("org.containers.hirte.Node", "Status");
            let interface = Some("org.freedesktop.DBus.Properties");
            let connection = &starter.connection;
            let reply =
                connection.call_method(Some(starter.name), starter.path.as_str(), interface, "Get", &body);
            let reply = reply.await.unwrap();
            let body = reply.body();
            body.deserialize::<Variant<'_>>().unwrap() == Variant::from("online")
        };
        let begun = Instant::now();
        while !online().await {
            assert!(begun.elapsed() < HANG);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        starter
    }

    async fn systemd(&self) -> Starter {
        let (name, path) = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1".to_owned());
        let interface = "org.freedesktop.systemd1.Manager";
        let starter = Starter::open(&self.node.address(), name, path, interface).await;
        let subscribed = starter.connection.call_method(
            Some(name),
            starter.path.as_str(),
            Some(interface),
            "Subscribe",
            &(),
        );
        subscribed.await.unwrap();
        starter
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Starts the same unit directly and through the manager in turns, so that both have the same
/// neighbours.
pub(crate) fn overhead() -> Vec<Row> {
    let fleet = Fleet::start();
    let (direct, ours) = block_on(async {
        let (mut systemd, mut manager) = (fleet.systemd().await, fleet.ours().await);
        for _ in 0..50 {
            systemd.start().await;
            manager.start().await;
        }
        let (mut direct, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            direct.push(systemd.start().await);
            ours.push(manager.start().await);
        }
        (spread(direct), spread(ours))
    });
    let row = |what, direct: Duration, ours: Duration, goal: &'static str, most: f64| {
        let over = ms(ours) - ms(direct);
        let ours = format!("{over:.2} ms ({:.2} - {:.2})", ms(ours), ms(direct));
        Row { what, ours, theirs: goal, goal, met: over <= most }
    };
    vec![
        row("overhead of a remote start, least", direct.0, ours.0, "0.20 ms", 0.20),
        row("overhead of a remote start, median", direct.1, ours.1, "0.40 ms", 0.40),
    ]
}

pub(crate) fn memory() -> Vec<Row> {
    let fleet = Fleet::start();
    let row = |what| {
        let (used, own) = fleet.agent.megabytes();
        let ours = format!("{used:.1} MB (own {own:.1})");
        Row { what, ours, theirs: "3.5 MB", goal: "8 MB", met: used <= 8.0 }
    };
    block_on(async {
        let mut manager = fleet.ours().await;
        let idle = row("memory of the agent, idle");
        for _ in 0..JOBS {
            manager.start().await;
        }
        vec![idle, row("memory of the agent after 1,000 jobs")]
    })
}
