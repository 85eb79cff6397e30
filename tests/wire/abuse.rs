//! Requests of a hostile client against the keeper, each with its positive control: the same
//! request within its limits, or from an authorised client. ZooKeeper 3.8.0 is not tested, because
//! it has these vulnerabilities.

use crate::harness::scenario::{Site, on_store};
use crate::harness::wire::{Client, Create, Lost, Put, Reply, Take, closed, op};
use crate::harness::{Kind, Options, Store};

on_store![
    keeper, Keeper, crate::with_super_user;
    reply_beyond_the_frame_limit_is_refused,
    multi_with_too_large_results_is_refused_without_writes,
    identities_of_one_connection_are_limited,
    long_credential_is_refused,
    access_lists_are_resolved_only_within_their_limit,
    invalid_watch_paths_are_refused,
    watch_path_bytes_are_limited,
    watches_are_limited,
    events_go_only_to_clients_that_may_read_the_node,
    watches_require_the_right_to_read,
    missed_events_go_only_to_clients_that_may_read_the_node,
];

const MARSHALLING: i32 = -5;
const BAD_ARGUMENTS: i32 = -8;
const NO_AUTH: i32 = -102;
const INVALID_ACL: i32 = -114;
const AUTH_FAILED: i32 = -115;
const QUOTA_EXCEEDED: i32 = -125;

/// The operation code of `setACL`.
const SET_ACL: i32 = 7;

const CREATED: i32 = 1;
const DELETED: i32 = 2;
const CHANGED: i32 = 3;
const PERSISTENT: i32 = 0;
const RECURSIVE: i32 = 1;

/// `ann:pw`, as access lists name it.
const ANN: &str = "ann:RYbu6l5aZwqon8VWmkcGvezdzfc=";

fn get_each(paths: &[&str]) -> Put {
    let one = |body: Put, path: &&str| body.int(op::GET_DATA).bool(false).int(-1).bytes(path).bool(false);
    paths.iter().fold(Put::new(), one).int(-1).bool(true).int(-1)
}

fn authenticate(client: &mut Client, credentials: &str) -> Result<Reply, Lost> {
    let body = Put::new().int(0).bytes("digest").bytes(credentials);
    client.send_as(-4, op::AUTH, &body)?;
    client.receive()
}

fn ann(site: &Site) -> Client {
    let mut client = Client::connect(site.addr);
    assert_eq!(authenticate(&mut client, "ann:pw").expect("an answer").err, 0);
    client
}

/// A node that ann alone may read.
fn create_secret(client: &mut Client, path: &str) {
    let body = Put::new().bytes(path).bytes("x").int(1).int(31).bytes("digest").bytes(ANN).int(0);
    assert_eq!(client.call(op::CREATE, &body).err, 0, "create {path}");
}

fn reply_beyond_the_frame_limit_is_refused(site: &Site) {
    let path = site.path("/large");
    let mut client = Client::connect(site.addr);
    client.create(&path, &vec![b'x'; 1_000_000], Create::Persistent);
    let reply = client.call(op::MULTI_READ, &get_each(&[&*path; 3]));
    assert_eq!((reply.err, reply.body.len()), (MARSHALLING, 0), "3 MB in one answer");
    let reply = client.call(op::MULTI_READ, &get_each(&[&*path]));
    assert_eq!((reply.err, reply.body.len() > 1_000_000), (0, true), "1 MB in one answer");
    assert_eq!(client.get(&path).expect("read").0.len(), 1_000_000);

    let parent = site.path("/parent");
    client.create(&parent, b"", Create::Persistent);
    let long = "n".repeat(300_000);
    for (number, err) in [(1, 0), (2, 0), (3, 0), (4, MARSHALLING)] {
        client.create(&format!("{parent}/{long}{number}"), b"", Create::Persistent);
        let reply = client.call(op::GET_CHILDREN, &Put::new().bytes(&parent).bool(false));
        assert_eq!(reply.err, err, "a list of {number} names of 300 kB");
    }
}

fn multi_with_too_large_results_is_refused_without_writes(site: &Site) {
    // Short, so that the request fits into a frame.
    let path = "/m";
    let mut client = Client::connect(site.addr);
    client.create(path, b"", Create::Persistent);
    let set = Put::new().int(op::SET_DATA).bool(false).int(-1).bytes(path).bytes("").int(-1).0;
    let multi = |count: usize| Put::new().raw(&set.repeat(count)).int(-1).bool(true).int(-1);
    assert_eq!(client.call(op::MULTI, &multi(15_000)).err, MARSHALLING);
    assert_eq!(client.get(path).expect("read").1.version, 0);
    assert_eq!(client.call(op::MULTI, &multi(10)).err, 0);
    assert_eq!(client.get(path).expect("read").1.version, 10);
}

fn identities_of_one_connection_are_limited(site: &Site) {
    const LIMIT: usize = 4_096;
    let mut client = Client::connect(site.addr);
    for number in 0..LIMIT {
        let answered = authenticate(&mut client, &format!("u{number}:pw"));
        assert_eq!(answered.expect("an answer").err, 0, "identity {number}");
    }
    // An identity that is already authenticated takes no more memory.
    assert_eq!(authenticate(&mut client, "u0:pw").expect("an answer").err, 0);
    assert_eq!(authenticate(&mut client, "one:more").expect("an answer").err, AUTH_FAILED);
    assert!(closed(&mut client.stream));
}

fn long_credential_is_refused(site: &Site) {
    let mut client = Client::connect(site.addr);
    assert_eq!(authenticate(&mut client, &format!("{}:pw", "u".repeat(1_000))).expect("an answer").err, 0);
    let long = format!("{}:pw", "u".repeat(1_000_000));
    assert_eq!(authenticate(&mut client, &long).expect("an answer").err, AUTH_FAILED);
    assert!(closed(&mut client.stream));
}

fn access_list(entries: impl Iterator<Item = (i32, &'static str, String)>) -> Put {
    let entries: Vec<_> = entries.collect();
    let list = Put::new().int(i32::try_from(entries.len()).expect("few enough"));
    entries.into_iter().fold(list, |list, (rights, scheme, id)| list.int(rights).bytes(scheme).bytes(&id))
}

fn access_lists_are_resolved_only_within_their_limit(site: &Site) {
    const LIMIT: usize = 256;
    let (mut client, mut ann) = (Client::connect(site.addr), ann(site));
    for number in 0..4_000 {
        assert_eq!(authenticate(&mut client, &format!("u{number}:pw")).expect("an answer").err, 0);
    }
    // 60,000 entries that stand for 4,000 identities each.
    let expanding = access_list((1..=60_000).map(|rights| (rights, "auth", String::new())));
    let users = |count: usize| access_list((0..count).map(|n| (1, "digest", format!("u{n}:x"))));
    let create = |path: &str, list: &Put| Put::new().bytes(path).bytes("x").raw(&list.0).int(0);
    let set = |path: &str, list: &Put| Put::new().bytes(path).raw(&list.0).int(-1);
    let (open, secret) = (site.path("/open"), site.path("/secret"));
    create_secret(&mut ann, &secret);
    assert_eq!(client.call(op::CREATE, &create(&open, &expanding)).err, INVALID_ACL);
    assert_eq!(client.call(op::CREATE, &create(&open, &users(LIMIT + 1))).err, INVALID_ACL);
    assert_eq!(client.call(op::CREATE, &create(&open, &Put::new().open_acl())).err, 0);
    assert_eq!(client.call(SET_ACL, &set(&open, &expanding)).err, INVALID_ACL);
    assert_eq!(client.call(SET_ACL, &set(&secret, &expanding)).err, NO_AUTH, "rights are checked first");

    assert_eq!(client.call(SET_ACL, &set(&open, &users(LIMIT))).err, 0);
    // The owner's own list: one identity for each of the rights.
    let own = access_list((1..=31).map(|rights| (rights, "auth", String::new())));
    assert_eq!(ann.call(SET_ACL, &set(&secret, &own)).err, 0);
    assert!(ann.get(&secret).is_ok());
}

fn add_watch(client: &mut Client, path: &str, mode: i32) -> i32 {
    client.call(op::ADD_WATCH, &Put::new().bytes(path).int(mode)).err
}

fn invalid_watch_paths_are_refused(site: &Site) {
    let mut client = Client::connect(site.addr);
    for bad in ["", "text", "/a//b", "/a/", "/\u{1}"] {
        assert_eq!(add_watch(&mut client, bad, PERSISTENT), BAD_ARGUMENTS, "{bad:?}");
        let watched = client.call(op::EXISTS, &Put::new().bytes(bad).bool(true));
        assert_eq!(watched.err, BAD_ARGUMENTS, "{bad:?}");
    }
    assert_eq!(add_watch(&mut client, &site.path("/not-there-yet"), PERSISTENT), 0);
}

fn watch_path_bytes_are_limited(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = |number: usize| format!("/{number}{}", "x".repeat(1_000_000));
    let accepted =
        (0..20).take_while(|number| add_watch(&mut client, &path(*number), PERSISTENT) == 0).count();
    assert_eq!(accepted, 16, "16 MiB of paths");
    assert_eq!(add_watch(&mut client, &path(99), PERSISTENT), QUOTA_EXCEEDED);
    assert_eq!(add_watch(&mut client, &path(0), RECURSIVE), 0, "watched already");
    let mut other = Client::connect(site.addr);
    assert_eq!(add_watch(&mut other, &path(99), PERSISTENT), 0, "another connection has its own limit");
}

/// Watches for `count` nodes that do not exist, from number `first` on.
fn set_watches(client: &mut Client, first: u32, count: u32) -> Reply {
    let body = Put::new().long(i64::MAX).int(0).int(i32::try_from(count).expect("few enough"));
    let body = (first..first + count).fold(body, |body, number| body.bytes(format!("/{number:x}")));
    client.send_as(-8, op::SET_WATCHES, &body.int(0)).expect("sent");
    client.receive().expect("an answer")
}

fn watches_are_limited(site: &Site) {
    let (mut client, mut healthy) = (Client::connect(site.addr), Client::connect(site.addr));
    assert_eq!(set_watches(&mut client, 0, 60_000).err, 0);
    assert_eq!(set_watches(&mut client, 60_000, 40_001).err, QUOTA_EXCEEDED);
    assert!(closed(&mut client.stream), "a client that ignores the reply must notice");
    // Its watches are removed with it: other connections can set as many.
    assert_eq!(set_watches(&mut healthy, 0, 60_000).err, 0);
    assert_eq!(set_watches(&mut healthy, 60_000, 40_000).err, 0);
    assert!(healthy.get(&site.chroot).is_ok());
}

/// Events that the server has sent so far.
fn events(client: &mut Client) -> Vec<(i32, String)> {
    let xid = client.send(op::SYNC, &Put::new().bytes("/")).expect("sent");
    let mut events = Vec::new();
    loop {
        let reply = client.receive().expect("an event or the answer");
        if reply.xid == xid {
            return events;
        }
        let mut take = Take(&reply.body);
        let (kind, _state) = (take.int(), take.int());
        events.push((kind, take.string()));
    }
}

fn delete(client: &mut Client, path: &str) {
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(path).int(-1)).err, 0, "delete {path}");
}

fn events_go_only_to_clients_that_may_read_the_node(site: &Site) {
    let (mut stranger, mut owner, mut ann) = (Client::connect(site.addr), ann(site), ann(site));
    for watcher in [&mut stranger, &mut owner] {
        assert_eq!(add_watch(watcher, &site.chroot, RECURSIVE), 0, "every client may read the chroot");
    }
    let (secret, public) = (site.path("/secret"), site.path("/public"));
    create_secret(&mut ann, &secret);
    ann.set_if_version(&secret, b"y", -1).expect("written");
    ann.create(&public, b"", Create::Persistent);
    delete(&mut ann, &secret);
    delete(&mut ann, &public);
    let all = [
        (CREATED, secret.clone()),
        (CHANGED, secret.clone()),
        (CREATED, public.clone()),
        (DELETED, secret),
        (DELETED, public.clone()),
    ];
    assert_eq!(events(&mut owner), all);
    assert_eq!(events(&mut stranger), [(CREATED, public.clone()), (DELETED, public)]);
}

fn watches_require_the_right_to_read(site: &Site) {
    let (mut stranger, mut owner, mut ann) = (Client::connect(site.addr), ann(site), ann(site));
    let secret = site.path("/secret");
    create_secret(&mut ann, &secret);
    for mode in [PERSISTENT, RECURSIVE] {
        assert_eq!(add_watch(&mut stranger, &secret, mode), NO_AUTH, "mode {mode}");
        assert_eq!(add_watch(&mut owner, &secret, mode), 0, "mode {mode}");
    }
    // This kind of watch can be set without the right to read, but its event needs that right.
    assert_eq!(stranger.call(op::EXISTS, &Put::new().bytes(&secret).bool(true)).err, 0);
    ann.set_if_version(&secret, b"y", -1).expect("written");
    assert_eq!(events(&mut stranger), []);
}

fn missed_events_go_only_to_clients_that_may_read_the_node(site: &Site) {
    let (mut stranger, mut ann) = (Client::connect(site.addr), ann(site));
    let secret = site.path("/secret");
    create_secret(&mut ann, &secret);
    ann.set_if_version(&secret, b"y", -1).expect("written");
    let body = || Put::new().long(0).int(1).bytes(&secret).int(0).int(0);
    for (client, missed) in [(&mut stranger, vec![]), (&mut ann, vec![(CHANGED, secret.clone())])] {
        client.send_as(-8, op::SET_WATCHES, &body()).expect("sent");
        let mut told = Vec::new();
        loop {
            let reply = client.receive().expect("an event or the answer");
            if reply.xid == -8 {
                break;
            }
            let mut take = Take(&reply.body);
            let (kind, _state) = (take.int(), take.int());
            told.push((kind, take.string()));
        }
        assert_eq!(told, missed);
    }
}

#[test]
fn refusals_are_logged_once_with_identity_and_path() {
    let store = Store::start(Kind::Keeper, Options::default());
    let site = Site { kind: Kind::Keeper, addr: store.addr(), chroot: String::new() };
    let mut ann = ann(&site);
    create_secret(&mut ann, "/secret");
    ann.get("/secret").expect("the owner reads it");
    assert!(!store.log().contains("refused"), "no request was refused: {}", store.log());

    let mut eve = Client::connect(store.addr());
    assert_eq!(authenticate(&mut eve, "eve:guess").expect("an answer").err, 0);
    for _ in 0..50 {
        assert_eq!(eve.get("/secret"), Err(NO_AUTH));
        assert_eq!(eve.set_if_version("/secret", b"", -1), Err(NO_AUTH));
    }
    for _ in 0..20 {
        let mut client = Client::connect(store.addr());
        crate::harness::wire::send(&mut client.stream, &i32::MAX.to_be_bytes()).expect("sent");
        assert!(closed(&mut client.stream));
    }
    let log = store.log();
    // At most one line in ten seconds: on a busy machine the loops above may take that long.
    for (text, parts, most) in [
        ("not authorized", &["digest:eve", "127.0.0.1", "/secret"][..], 10),
        ("frame length out of bounds", &["127.0.0.1", "2147483647"][..], 10),
    ] {
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(text)).collect();
        assert!((1..=most).contains(&lines.len()), "{} lines about {text}: {log}", lines.len());
        assert!(parts.iter().all(|part| lines[0].contains(part)), "{parts:?} in {}", lines[0]);
    }
    assert!(!log.contains("guess") && !log.contains("eve:"), "a secret in the log: {log}");
    let counted = store.four_letters("mntr").expect("an answer");
    assert!(counted.contains("zk_rights_refused\t100\n"), "{counted}");
    assert!(counted.contains("zk_bad_frames\t20\n"), "{counted}");
}
