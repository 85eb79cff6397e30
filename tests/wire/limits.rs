//! The keeper's limits from the side of a client: which requests are refused and how, and that
//! other clients are still served.

use std::io::Read as _;
use std::net::TcpStream;

use portcullis::keeper::acl;
use portcullis::keeper::state::TreeLimits;
use portcullis::keeper::{Config, Keeper, Limits};

use crate::harness::wire::{Client, Create, Put, REPLY_DEADLINE, Take, op};

fn keeper(limits: Limits) -> (Keeper, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let config = Config { limits, ..Config::new(dir.path(), ([127, 0, 0, 1], 0).into()) };
    (Keeper::start(config).expect("a keeper"), dir)
}

fn command(keeper: &Keeper, command: &str) -> String {
    use std::io::Write as _;
    let mut stream = TcpStream::connect(keeper.local_addr()).expect("connected");
    stream.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    stream.write_all(command.as_bytes()).expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn connections_beyond_the_limit_are_closed_and_counted() {
    let (keeper, _dir) = keeper(Limits { max_connections: 2, ..Limits::default() });
    let mut first = Client::connect(keeper.local_addr());
    let second = Client::connect(keeper.local_addr());
    let mut third = TcpStream::connect(keeper.local_addr()).expect("the system accepts");
    third.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    // Closed or reset, without a reply.
    assert_eq!(third.read(&mut [0; 1]).unwrap_or(0), 0);
    assert_eq!(first.call(op::PING, &Put::new()).err, 0);
    drop(second);
    let counted = crate::harness::wait_for("a free connection", REPLY_DEADLINE, || {
        Some(command(&keeper, "mntr")).filter(|answer| !answer.is_empty())
    });
    let refused =
        counted.lines().find_map(|line| line.strip_prefix("zk_connection_rejected\t")).expect("a count");
    assert!(refused.parse::<u32>().expect("a number") >= 1, "{counted}");
}

#[test]
fn client_that_does_not_read_delays_only_itself() {
    const ASKED: usize = 2_000;
    let (keeper, _dir) = keeper(Limits { max_outstanding_bytes: 64 << 10, ..Limits::default() });
    let (mut greedy, mut healthy) =
        (Client::connect(keeper.local_addr()), Client::connect(keeper.local_addr()));
    healthy.create("/big", &[7; 10_000], Create::Persistent);
    let body = Put::new().bytes("/big").bool(false);
    let xids: Vec<i32> = (0..ASKED).map(|_| greedy.send(op::GET_DATA, &body).expect("sent")).collect();
    for _ in 0..10 {
        assert_eq!(Take(&healthy.call(op::GET_DATA, &body).body).bytes().len(), 10_000);
    }
    for xid in xids {
        let reply = greedy.receive().expect("every reply after it reads again");
        assert_eq!((reply.xid, Take(&reply.body).bytes().len()), (xid, 10_000));
    }
}

#[test]
fn full_tree_refuses_growth_and_serves_other_requests() {
    const QUOTA_EXCEEDED: i32 = -125;
    let tree = TreeLimits { max_nodes: 6, ..TreeLimits::default() };
    let (keeper, _dir) = keeper(Limits { tree, ..Limits::default() });
    let mut client = Client::connect(keeper.local_addr());
    let create = |path: &str| Put::new().bytes(path).bytes(b"").open_acl().int(0);
    let made: Vec<i32> =
        ["/a", "/b", "/c"].iter().map(|path| client.call(op::CREATE, &create(path)).err).collect();
    assert_eq!(made, [0, 0, QUOTA_EXCEEDED]);
    assert_eq!(client.call(op::GET_DATA, &Put::new().bytes("/a").bool(false)).err, 0);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes("/a").int(-1)).err, 0);
    assert_eq!(client.call(op::CREATE, &create("/c")).err, 0);
}

fn statistic(keeper: &Keeper, name: &str) -> u64 {
    let text = command(keeper, "mntr");
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("zk_{name}\t")));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

#[test]
fn unread_replies_of_all_clients_are_bounded() {
    const LIMIT: u64 = 8 << 20;
    let (keeper, _dir) = keeper(Limits { max_buffer_bytes: LIMIT as usize, ..Limits::default() });
    let mut healthy = Client::connect(keeper.local_addr());
    healthy.create("/big", &[7; 1_000_000], Create::Persistent);
    let body = Put::new().bytes("/big").bool(false);
    let mut greedy: Vec<Client> = (0..12).map(|_| Client::connect(keeper.local_addr())).collect();
    for client in &mut greedy {
        // The kernel buffers some megabytes for each connection; the keeper buffers the rest.
        for _ in 0..20 {
            if client.send(op::GET_DATA, &body).is_err() {
                break;
            }
        }
        assert_eq!(Take(&healthy.call(op::GET_DATA, &body).body).bytes().len(), 1_000_000);
    }
    assert!(statistic(&keeper, "buffers_closed") >= 1, "no connection was closed");
    assert!(statistic(&keeper, "buffer_bytes") <= LIMIT, "the buffers exceed their limit");
    assert_eq!(statistic(&keeper, "connection_rejected"), 0);
}

/// Restricts the root of the tree to `ann:pw` and returns a client with that identity.
fn close_root(keeper: &Keeper) -> Client {
    let mut ann = Client::connect(keeper.local_addr());
    authenticate(&mut ann);
    let acl = Put::new().bytes("/").int(1).int(31).bytes("digest").bytes("ann:RYbu6l5aZwqon8VWmkcGvezdzfc=");
    assert_eq!(ann.call(7, &acl.int(-1)).err, 0);
    ann
}

fn authenticate(client: &mut Client) {
    client.send_as(-4, op::AUTH, &Put::new().int(0).bytes("digest").bytes("ann:pw")).expect("sent");
    assert_eq!(client.receive().expect("an answer").err, 0);
}

#[test]
fn new_client_evicts_the_oldest_unauthenticated_one() {
    let (keeper, _dir) = keeper(Limits { max_connections: 4, ..Limits::default() });
    let addr = keeper.local_addr();
    let mut ann = close_root(&keeper);
    let mut unauthenticated: Vec<Client> = (0..3).map(|_| Client::connect(addr)).collect();
    let mut second = Client::connect(addr);
    authenticate(&mut second);
    assert_eq!(second.get("/").map(|_| ()), Ok(()));
    assert!(
        crate::harness::wire::closed(&mut unauthenticated[0].stream),
        "the oldest unauthenticated client is still connected"
    );
    assert_eq!(unauthenticated[1].call(op::PING, &Put::new()).err, 0);
    // After all clients have authenticated, one more is refused.
    unauthenticated[1..].iter_mut().for_each(authenticate);
    let mut late = TcpStream::connect(addr).expect("the system accepts");
    late.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    assert_eq!(late.read(&mut [0; 1]).unwrap_or(0), 0);
    assert_eq!(ann.call(op::PING, &Put::new()).err, 0);
}

#[test]
fn one_identity_cannot_take_all_connections() {
    const KEPT: usize = 60;
    let connect_as_bob = |addr| {
        let mut bob = Client::connect(addr);
        bob.send_as(-4, op::AUTH, &Put::new().int(0).bytes("digest").bytes("bob:pw")).expect("sent");
        assert_eq!(bob.receive().expect("an answer").err, 0);
        bob
    };
    // With one connection more than an identity keeps, and the control: with as many.
    for (bobs, evicted) in [(KEPT + 1, true), (KEPT, false)] {
        let (keeper, _dir) = keeper(Limits { max_connections: 1 + bobs, ..Limits::default() });
        let addr = keeper.local_addr();
        let mut ann = close_root(&keeper);
        let bob = acl::digest("bob:pw");
        let node = Put::new().bytes("/bob").bytes("").int(1).int(1).bytes("digest").bytes(&bob).int(0);
        assert_eq!(ann.call(op::CREATE, &node).err, 0);
        let mut bobs: Vec<Client> = (0..bobs).map(|_| connect_as_bob(addr)).collect();
        let mut late = TcpStream::connect(addr).expect("the system accepts");
        if evicted {
            assert!(crate::harness::wire::closed(&mut bobs[0].stream), "the oldest of them");
        } else {
            late.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
            assert_eq!(late.read(&mut [0; 1]).unwrap_or(0), 0, "accepted");
            assert_eq!(bobs[0].call(op::PING, &Put::new()).err, 0);
        }
        assert_eq!(bobs[1].call(op::PING, &Put::new()).err, 0);
        assert_eq!(ann.get("/").map(|_| ()), Ok(()));
    }
}

#[test]
fn unauthenticated_client_is_closed_after_the_timeout() {
    let (keeper, _dir) = keeper(Limits { unauthenticated_ms: 1, ..Limits::default() });
    let addr = keeper.local_addr();
    let mut anonymous = Client::connect(addr);
    let mut ann = close_root(&keeper);
    let mut guessing = Client::connect(addr);
    guessing.send_as(-4, op::AUTH, &Put::new().int(0).bytes("digest").bytes("ann:guess")).expect("sent");
    assert!(crate::harness::wire::closed(&mut anonymous.stream));
    let _answer = guessing.receive();
    assert!(crate::harness::wire::closed(&mut guessing.stream), "an identity that no access list names");
    assert_eq!(ann.get("/").map(|_| ()), Ok(()), "closed although it has authenticated");
    assert!(statistic(&keeper, "unauthenticated_closed") >= 2);
}
