//! Failures of connections: interrupted, silent, or to a process that is no store.

use super::operations::{deploy, fresh, operator, service};
use super::{block_on, site};
use crate::harness::scenario::for_both_kinds;
use crate::harness::wire::{Client, Create};
use crate::harness::{HANG, Kind, Options, Store, ports};
use portcullis::store::records::Placement;
use portcullis::store::tree::{Error, Event, Feed, Tree, Write};
use portcullis::store::{Address, Environment, Flag, ZkTree, paths};
use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

for_both_kinds![
    reads_survive_a_cut_connection,
    a_write_with_a_lost_answer_is_read_back,
    a_command_ends_when_the_store_is_lost,
    a_command_ends_when_the_store_stops_answering,
    a_feed_reports_everything_after_every_reconnect,
    an_expired_session_is_replaced,
    a_chroot_is_created_with_the_environment,
    an_environment_can_use_the_whole_store,
];

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

#[track_caller]
fn is_unreachable(to: &Address) {
    let start = Instant::now();
    let refusal = block_on(ZkTree::connect(to, None)).unwrap_err();
    assert_eq!(refusal.to_string(), format!("cannot reach the store at {}", to.hosts()));
    assert!(refusal.is_transient());
    assert!(start.elapsed() < HANG, "took {:?}", start.elapsed());
}

#[test]
fn nothing_listens() {
    is_unreachable(&address(&format!("127.0.0.1:{}/x", ports::free())));
}

#[test]
fn a_silent_or_foreign_listener_is_reported() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    is_unreachable(&address(&silent.local_addr().unwrap().to_string()));

    let chatty = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = address(&chatty.local_addr().unwrap().to_string());
    std::thread::spawn(move || {
        for stream in chatty.incoming() {
            // The side under test may have closed already.
            let _ = stream.and_then(|mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        }
    });
    is_unreachable(&to);
}

#[test]
fn an_unknown_host_is_reported() {
    is_unreachable(&address("no-such-host.invalid:2181"));
}

/// A relay in front of a store that can cut its connections, refuse new ones, and swallow answers.
struct Relay {
    port: u16,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    closed: AtomicBool,
    /// Requests are passed on, answers are not.
    mute: AtomicBool,
    /// The next write is passed on, its answer is not.
    mute_next_write: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Relay {
    fn before(store: &Store) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let gate = Arc::new(Gate::default());
        let (shared, target) = (Arc::clone(&gate), store.addr());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.closed.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(target) else { continue };
                shared.pair(client, server);
            }
        });
        Self { port, gate }
    }

    fn address(&self, chroot: &str) -> Address {
        address(&format!("127.0.0.1:{}{chroot}", self.port))
    }

    fn cut(&self) {
        for stream in self.gate.streams.lock().unwrap().drain(..) {
            // The connection may be closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn close(&self) {
        self.gate.closed.store(true, Ordering::SeqCst);
        self.cut();
    }

    fn open(&self) {
        self.gate.mute.store(false, Ordering::SeqCst);
        self.gate.closed.store(false, Ordering::SeqCst);
    }

    fn mute(&self) {
        self.gate.mute.store(true, Ordering::SeqCst);
    }

    fn mute_next_write(&self) {
        self.gate.mute_next_write.store(true, Ordering::SeqCst);
    }
}

/// Whether a chunk of requests holds a multi. Requests of these tests fit in a chunk.
fn holds_write(mut chunk: &[u8]) -> bool {
    const MULTI: [u8; 4] = 14i32.to_be_bytes();
    while chunk.len() >= 12 {
        if chunk[8..12] == MULTI {
            return true;
        }
        let length = u32::from_be_bytes(chunk[..4].try_into().unwrap()) as usize;
        chunk = chunk.get(4 + length..).unwrap_or_default();
    }
    false
}

impl Gate {
    fn pair(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let clone = |stream: &TcpStream| stream.try_clone().unwrap();
        self.streams.lock().unwrap().extend([clone(&client), clone(&server)]);
        for (from, to, answers) in [(clone(&client), clone(&server), false), (server, client, true)] {
            let gate = Arc::clone(self);
            std::thread::spawn(move || gate.pump(from, to, answers));
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, answers: bool) {
        let mut buffer = [0; 4096];
        while let Ok(count) = from.read(&mut buffer) {
            if !answers && holds_write(&buffer[..count]) && self.mute_next_write.swap(false, Ordering::SeqCst)
            {
                self.mute.store(true, Ordering::SeqCst);
            }
            let swallow = answers && self.mute.load(Ordering::SeqCst);
            if count == 0 || (!swallow && to.write_all(&buffer[..count]).is_err()) {
                break;
            }
        }
        // When one side ends, the other is closed, too.
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

/// Whether a znode exists; needs no right on it.
fn exists(client: &mut Client, path: &str) -> bool {
    const NO_NODE: i32 = -101;
    client.get(path) != Err(NO_NODE)
}

/// A bootstrapped environment with a service, behind a relay.
fn behind_a_relay(kind: Kind, name: &str) -> (Store, Relay, Address) {
    let store = Store::start(kind, Options::default());
    let direct = site(&store, name);
    block_on(async {
        let environment = fresh(&direct, Placement::Local).await;
        environment.deploy(&deploy("web", 1)).await.unwrap();
        environment.into_tree().close().await;
    });
    let relay = Relay::before(&store);
    let address = relay.address(direct.chroot());
    (store, relay, address)
}

async fn open(address: &Address) -> Environment<ZkTree> {
    let tree = ZkTree::connect(address, Some(&operator())).await.unwrap();
    Environment::open(tree).await.unwrap()
}

fn reads_survive_a_cut_connection(kind: Kind) {
    let (_store, relay, address) = behind_a_relay(kind, "cut");
    block_on(async {
        let environment = open(&address).await;
        for _ in 0..5 {
            relay.cut();
            environment.service(&service("web")).await.unwrap();
        }
    });
}

fn a_write_with_a_lost_answer_is_read_back(kind: Kind) {
    let (store, relay, address) = behind_a_relay(kind, "muted");
    block_on(async {
        let environment = open(&address).await;
        let before = environment.tree().get(&paths::machines()).await.unwrap().version;
        relay.mute_next_write();
        let chroot = address.chroot().to_owned();
        let addr = store.addr();
        // Once the write has reached the store, its answer is lost with the connection.
        let breaker = std::thread::spawn(move || {
            let mut client = Client::connect(addr);
            crate::harness::wait_for("the flag", HANG, || {
                exists(&mut client, &format!("{chroot}/services/service-0000000000/exposed")).then_some(())
            });
            relay.close();
            relay.open();
            relay
        });
        assert_eq!(environment.expose(&service("web")).await.unwrap(), Flag::Changed);
        let _relay = breaker.join().unwrap();
        assert_eq!(environment.expose(&service("web")).await.unwrap(), Flag::AlreadySo);
        assert_eq!(environment.tree().get(&paths::machines()).await.unwrap().version, before);
    });
}

fn a_command_ends_when_the_store_is_lost(kind: Kind) {
    let (mut store, _relay, _) = behind_a_relay(kind, "dies");
    let address = address(&format!("{}/dies", store.addr()));
    block_on(async {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(9);
        let tree = ZkTree::connect(&address, Some(&operator())).await.unwrap().until(deadline);
        let environment = Environment::open(tree).await.unwrap();
        store.kill9();
        let start = Instant::now();
        let refusal = environment.expose(&service("web")).await.unwrap_err();
        assert_eq!(refusal.to_string(), format!("cannot reach the store at {}", address.hosts()));
        assert!(start.elapsed() < HANG, "took {:?}", start.elapsed());
    });
    store.restart();
    block_on(async {
        let environment = open(&address).await;
        assert_eq!(environment.expose(&service("web")).await.unwrap(), Flag::Changed);
    });
}

fn a_command_ends_when_the_store_stops_answering(kind: Kind) {
    let (_store, relay, address) = behind_a_relay(kind, "stops");
    block_on(async {
        let environment = open(&address).await;
        relay.mute();
        let start = Instant::now();
        let refusal = environment.deploy(&deploy("new", 1)).await.unwrap_err();
        assert!(start.elapsed() < HANG, "took {:?}", start.elapsed());
        assert!(refusal.to_string().contains(&address.hosts()), "{refusal}");
        relay.close();
        relay.open();
        environment.deploy(&deploy("new", 1)).await.unwrap();
    });
}

/// Waits for an event, passing over others.
async fn wait_for(feed: &mut impl Feed, wanted: &Event) {
    tokio::time::timeout(HANG, async { while feed.next().await.unwrap() != *wanted {} })
        .await
        .expect("no such event");
}

fn a_feed_reports_everything_after_every_reconnect(kind: Kind) {
    let (store, relay, address) = behind_a_relay(kind, "feed");
    let direct = super::address_of(&store, "feed");
    block_on(async {
        let environment = open(&address).await;
        let writer = open(&direct).await;
        let mut feed = environment.tree().watch(&paths::root()).await.unwrap();
        assert_eq!(feed.next().await, Ok(Event::Everything));
        let (id, _) = writer.service(&service("web")).await.unwrap();
        for _ in 0..3 {
            relay.cut();
            wait_for(&mut feed, &Event::Everything).await;
            // The watch is set again: later changes are reported.
            writer.expose(&service("web")).await.unwrap();
            wait_for(&mut feed, &Event::Changed(paths::exposed(id))).await;
            writer.unexpose(&service("web")).await.unwrap();
            wait_for(&mut feed, &Event::Changed(paths::exposed(id))).await;
        }
    });
}

fn an_expired_session_is_replaced(kind: Kind) {
    let (store, relay, address) = behind_a_relay(kind, "expired");
    let direct = super::address_of(&store, "expired");
    block_on(async {
        let environment = open(&address).await;
        let mut feed = environment.tree().watch(&paths::root()).await.unwrap();
        assert_eq!(feed.next().await, Ok(Event::Everything));
        let agent = paths::machine_agent(portcullis::model::MachineId::new(0));
        let acl = environment.info().roles.operators();
        let write = Write::Create { path: agent.clone(), data: Vec::new(), acl, ephemeral: true };
        environment.tree().write(vec![write]).await.unwrap();
        relay.close();
        // Another client observes the end of the session.
        let other = open(&direct).await;
        let gone = async {
            while other.tree().exists(&agent).await.unwrap() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(40), gone).await.expect("the session does not expire");
        relay.open();
        wait_for(&mut feed, &Event::Everything).await;
        assert_eq!(environment.service(&service("web")).await.unwrap().0.number(), 0);
        other.expose(&service("web")).await.unwrap();
        let (id, _) = other.service(&service("web")).await.unwrap();
        wait_for(&mut feed, &Event::Changed(paths::exposed(id))).await;
    });
}

fn a_chroot_is_created_with_the_environment(kind: Kind) {
    let store = Store::start(kind, Options::default());
    let nested = address(&format!("{}/juju/prod", store.addr()));
    block_on(async {
        let tree = ZkTree::connect(&nested, Some(&operator())).await.unwrap();
        let refusal = Environment::open(tree.clone()).await.map(|_| ()).unwrap_err().to_string();
        assert_eq!(refusal, "the environment is not bootstrapped");
        let wanted = super::operations::wanted(Placement::Local);
        let refusal = Environment::bootstrap(tree, &wanted).await.map(|_| ()).unwrap_err().to_string();
        assert_eq!(refusal, "the parent of the address's chroot does not exist");
        let environment = fresh(&address(&format!("{}/juju", store.addr())), Placement::Local).await;
        environment.deploy(&deploy("web", 1)).await.unwrap();
        // Its root is closed to others, so another environment cannot use it.
        let stranger = ZkTree::connect(&address(&format!("{}/juju", store.addr())), None).await.unwrap();
        assert_eq!(stranger.children(&paths::root()).await, Err(Error::NoAuth(paths::root())));
    });
    let mut client = Client::connect(store.addr());
    assert!(exists(&mut client, "/juju/initialized"));
}

fn an_environment_can_use_the_whole_store(kind: Kind) {
    let store = Store::start(kind, Options::default());
    let root = address(&store.addr().to_string());
    block_on(async {
        fresh(&root, Placement::Local).await;
        let stranger = ZkTree::connect(&root, None).await.unwrap();
        assert_eq!(stranger.children(&paths::root()).await, Err(Error::NoAuth(paths::root())));
    });
    let other = Store::start(kind, Options::default());
    Client::connect(other.addr()).create("/kafka", b"", Create::Persistent);
    let root = address(&other.addr().to_string());
    block_on(async {
        let tree = ZkTree::connect(&root, Some(&operator())).await.unwrap();
        let wanted = super::operations::wanted(Placement::Local);
        let refusal = Environment::bootstrap(tree, &wanted).await.map(|_| ()).unwrap_err().to_string();
        assert_eq!(
            refusal,
            "the store's root holds 'kafka', which is not ours; add a chroot to the address, HOST:PORT/NAME"
        );
    });
    Client::connect(other.addr()).create("/kafka/still-open", b"", Create::Persistent);
}
