//! Table tests and property tests of the state machine.

use proptest::prelude::*;

use super::*;
use crate::keeper::acl::{ALL, Acl, CREATE, DELETE, Identity, READ, WRITE};

const UNAUTHENTICATED: Caller<'static> = Caller { session: 1, proved: &IdentitySet::NONE };

fn world(perms: i32) -> Vec<Acl> {
    vec![Acl { perms, identity: Identity::new("world", "anyone") }]
}

fn create(path: &str) -> Op<'_> {
    create_as(path, CreateMode::Persistent, false)
}

fn create_as(path: &str, mode: CreateMode, sequential: bool) -> Op<'_> {
    Op::Create { path, data: Some(b"x"), acl: world(ALL), mode, sequential, wants_stat: true }
}

fn write(state: &mut State, op: Op<'_>) -> Result<OpResult, Code> {
    state
        .write(UNAUTHENTICATED, &[op], 5)
        .map(|written| written.results.into_iter().next().unwrap())
        .map_err(|refusal| refusal.code)
}

type NodeDump = (String, Stat, Option<Box<[u8]>>, Vec<String>, Arc<Vec<Acl>>);

/// Returns everything that a client can observe of a state.
fn dump(state: &State) -> Vec<NodeDump> {
    let mut nodes: Vec<_> = state
        .tree
        .walk()
        .map(|(path, node)| {
            let children = node.children().map(str::to_owned).collect();
            (path, node.stat(), node.data.clone(), children, node.acl.clone())
        })
        .collect();
    nodes.sort_by(|a, b| a.0.cmp(&b.0));
    nodes
}

#[test]
fn new_tree_equals_zookeepers() {
    let state = State::default();
    let paths: Vec<_> = dump(&state).into_iter().map(|node| node.0).collect();
    assert_eq!(paths, ["/", "/zookeeper", "/zookeeper/config", "/zookeeper/quota"]);
    assert_eq!(state.tree.get("/").unwrap().stat().cversion, -1);
}

#[test]
fn refused_writes_change_nothing_and_have_zookeepers_codes() {
    let mut state = State::default();
    write(&mut state, create("/a")).unwrap();
    write(&mut state, create("/a/b")).unwrap();
    write(&mut state, create_as("/e", CreateMode::Ephemeral, false)).unwrap();
    let cases = [
        (create("/a"), Code::NodeExists),
        (create("/x/y"), Code::NoNode),
        (create("/e/child"), Code::NoChildrenForEphemerals),
        (create("/zookeeper/x"), Code::NoAuth),
        (create("/zookeeper/quota/x"), Code::NoAuth),
        (create("relative"), Code::BadArguments),
        (create("/a/"), Code::BadArguments),
        (create_as("/t", CreateMode::Ttl(0), false), Code::BadArguments),
        (create_as("/t", CreateMode::Ttl(MAX_TTL_MS + 1), false), Code::BadArguments),
        (Op::Delete { path: "/a", version: -1 }, Code::NotEmpty),
        (Op::Delete { path: "/a/b", version: 3 }, Code::BadVersion),
        (Op::Delete { path: "/nope", version: -1 }, Code::NoNode),
        (Op::Delete { path: "/", version: -1 }, Code::BadArguments),
        (Op::Delete { path: "/zookeeper/quota", version: -1 }, Code::BadArguments),
        (Op::SetData { path: "/a", data: None, version: 1 }, Code::BadVersion),
        (Op::SetData { path: "/zookeeper/config", data: None, version: -1 }, Code::NoAuth),
        (Op::SetAcl { path: "/a", acl: vec![], version: -1 }, Code::InvalidAcl),
        (Op::SetAcl { path: "/a", acl: world(ALL), version: 9 }, Code::BadVersion),
        (Op::Check { path: "/nope", version: -1 }, Code::NoNode),
        (Op::Check { path: "/a", version: 7 }, Code::BadVersion),
    ];
    for (op, code) in cases {
        let (before, zxid) = (dump(&state), state.zxid());
        assert_eq!(write(&mut state, op.clone()), Err(code), "{op:?}");
        assert_eq!(dump(&state), before, "{op:?} changed the tree");
        assert_eq!(state.zxid(), zxid + 1, "a failed write takes a zxid");
    }
}

#[test]
fn sequence_numbers_are_never_reused() {
    let mut state = State::default();
    let made = |state: &mut State| match write(state, create_as("/s-", CreateMode::Persistent, true)) {
        Ok(OpResult::Created { path, .. }) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(made(&mut state), "/s-0000000000");
    write(&mut state, Op::Delete { path: "/s-0000000000", version: -1 }).unwrap();
    assert_eq!(made(&mut state), "/s-0000000001");
    write(&mut state, create("/other")).unwrap();
    assert_eq!(made(&mut state), "/s-0000000003");
}

#[test]
fn multi_is_atomic_and_sees_its_own_writes() {
    let mut state = State::default();
    let good = [create("/m"), create("/m/a"), Op::SetData { path: "/m/a", data: None, version: 0 }];
    assert_eq!(state.write(UNAUTHENTICATED, &good, 1).unwrap().results.len(), 3);
    assert_eq!(state.tree.get("/m/a").unwrap().version, 1);

    let before = dump(&state);
    let bad = [
        Op::SetData { path: "/m", data: Some(b"new"), version: -1 },
        Op::SetAcl { path: "/m", acl: world(ALL), version: -1 },
        Op::Delete { path: "/m/a", version: -1 },
        create_as("/m/e", CreateMode::Ephemeral, true),
        create_as("/m/c", CreateMode::Container, false),
        Op::Check { path: "/nope", version: -1 },
    ];
    let refusal = state.write(UNAUTHENTICATED, &bad, 2).unwrap_err();
    assert_eq!(refusal, Refusal { index: 5, code: Code::NoNode });
    assert_eq!(dump(&state), before);
    assert_eq!((state.tree.ephemeral_count(), state.tree.transients().count()), (0, 0));
}

#[test]
fn rights_are_checked_as_in_zookeeper() {
    let me: IdentitySet = [Identity::new("digest", "me:x")].into_iter().collect();
    let mut state = State::default();
    let limited = |perms| vec![Acl { perms, identity: me[0].clone() }];
    let make = |path, perms| Op::Create {
        path,
        data: None,
        acl: limited(perms),
        mode: CreateMode::Persistent,
        sequential: false,
        wants_stat: false,
    };
    let mine = Caller { session: 1, proved: &me };
    state.write(mine, &[make("/p", CREATE | DELETE), make("/p/c", READ | WRITE)], 1).unwrap();
    let codes = |state: &mut State, caller| {
        let tries = [
            Op::SetData { path: "/p", data: None, version: -1 },
            Op::SetData { path: "/p/c", data: None, version: -1 },
            Op::Check { path: "/p/c", version: -1 },
            Op::Check { path: "/p", version: -1 },
            Op::SetAcl { path: "/p/c", acl: world(ALL), version: -1 },
            create("/p/c/d"),
            Op::Delete { path: "/p/c", version: -1 },
        ];
        tries.map(|op| state.write(caller, &[op], 1).map_err(|refusal| refusal.code).err())
    };
    let no = Some(Code::NoAuth);
    assert_eq!(codes(&mut state, UNAUTHENTICATED), [no; 7]);
    assert_eq!(codes(&mut state, mine), [no, None, None, no, no, no, None]);
}

#[test]
fn closing_a_session_deletes_only_its_own_ephemerals() {
    let mut state = State::default();
    state.open_session(1, 4000, [1; 16], 0);
    write(&mut state, create("/p")).unwrap();
    write(&mut state, create_as("/p/e", CreateMode::Ephemeral, false)).unwrap();
    let other = Caller { session: 2, proved: &IdentitySet::NONE };
    state.write(other, &[create_as("/theirs", CreateMode::Ephemeral, false)], 1).unwrap();
    let (_, deleted) = state.close_session(1);
    assert_eq!(deleted.iter().map(|node| &*node.path).collect::<Vec<_>>(), ["/p/e"]);
    assert!(state.tree.get("/p").is_some() && state.tree.get("/theirs").is_some());
    assert_eq!(state.tree.get("/p").unwrap().pzxid, state.zxid());
}

#[test]
fn used_empty_containers_and_expired_ttl_nodes_are_reaped() {
    let mut state = State::default();
    write(&mut state, create_as("/c", CreateMode::Container, false)).unwrap();
    write(&mut state, create_as("/t", CreateMode::Ttl(100), false)).unwrap();
    assert_eq!(state.reap(105, 9).0, [], "never used, not yet old");
    write(&mut state, create("/c/x")).unwrap();
    assert_eq!(state.reap(105, 9).0, [], "in use");
    write(&mut state, Op::Delete { path: "/c/x", version: -1 }).unwrap();
    assert_eq!(state.reap(105, 9).0.len(), 1);
    assert!(state.tree.get("/c").is_none());
    write(&mut state, create("/t/x")).unwrap();
    assert_eq!(state.reap(9_000, 9).0, [], "has a child");
    write(&mut state, Op::Delete { path: "/t/x", version: -1 }).unwrap();
    assert_eq!(state.reap(106, 9).0.len(), 1);
    assert!(state.tree.get("/t").is_none());
}

#[test]
fn full_tree_refuses_only_growth() {
    let mut state = State::new(TreeLimits { max_nodes: 5, max_bytes: 1 << 20 });
    write(&mut state, create("/a")).unwrap();
    assert_eq!(write(&mut state, create("/b")), Err(Code::QuotaExceeded));
    write(&mut state, Op::SetData { path: "/a", data: Some(b"fine"), version: -1 }).unwrap();

    let mut state = State::new(TreeLimits { max_nodes: 100, max_bytes: 4096 });
    let big = [0u8; 8192];
    write(&mut state, create("/a")).unwrap();
    let set = Op::SetData { path: "/a", data: Some(&big), version: -1 };
    assert_eq!(write(&mut state, set), Err(Code::QuotaExceeded));

    let room = 4096 - state.tree.bytes();
    write(&mut state, Op::SetData { path: "/a", data: Some(&big[..room]), version: -1 }).unwrap();
    write(&mut state, Op::SetData { path: "/a", data: Some(&big[..room - 1]), version: -1 }).unwrap();
    write(&mut state, Op::Delete { path: "/a", version: -1 }).unwrap();
}

#[test]
fn long_access_lists_count_against_the_limit() {
    let long = |n: usize| {
        vec![Acl { perms: READ, identity: Identity::new("digest", &format!("u:{}", "x".repeat(n))) }]
    };
    let with = |path, acl| Op::Create {
        path,
        data: None,
        acl,
        mode: CreateMode::Persistent,
        sequential: false,
        wants_stat: false,
    };
    let mut state = State::new(TreeLimits { max_nodes: 100, max_bytes: 10_000 });
    let empty = state.tree.bytes();
    write(&mut state, with("/a", long(3_000))).unwrap();
    write(&mut state, with("/b", world(ALL))).unwrap();
    assert_eq!(write(&mut state, with("/c", long(9_000))), Err(Code::QuotaExceeded));
    let replace = |acl| Op::SetAcl { path: "/b", acl, version: -1 };
    assert_eq!(write(&mut state, replace(long(9_000))), Err(Code::QuotaExceeded));
    write(&mut state, replace(long(2_000))).unwrap();
    for path in ["/a", "/b"] {
        write(&mut state, Op::Delete { path, version: -1 }).unwrap();
    }
    assert_eq!(state.tree.bytes(), empty);
}

const PATHS: [&str; 6] = ["/a", "/b", "/a/a", "/a/b", "/b/a", "/a/a/a"];

fn long_list() -> Vec<Acl> {
    let name = |n| Identity::new("digest", &format!("somebody-{n}:x"));
    (0..100).map(|n| Acl { perms: ALL, identity: name(n) }).chain(world(ALL)).collect()
}

fn any_op() -> impl Strategy<Value = Op<'static>> {
    let path = proptest::sample::select(&PATHS[..]);
    let mode = proptest::sample::select(vec![
        CreateMode::Persistent,
        CreateMode::Ephemeral,
        CreateMode::Container,
        CreateMode::Ttl(3),
    ]);
    let version = -1..3i32;
    prop_oneof![
        3 => (path.clone(), mode, any::<bool>())
            .prop_map(|(path, mode, sequential)| create_as(path, mode, sequential)),
        2 => (path.clone(), version.clone()).prop_map(|(path, version)| Op::Delete { path, version }),
        2 => (path.clone(), version.clone())
            .prop_map(|(path, version)| Op::SetData { path, data: Some(b"data"), version }),
        1 => (path.clone(), version.clone())
            .prop_map(|(path, version)| Op::SetAcl { path, acl: world(ALL), version }),
        1 => path.clone().prop_map(|path| Op::SetAcl { path, acl: long_list(), version: -1 }),
        1 => (path, version).prop_map(|(path, version)| Op::Check { path, version }),
    ]
}

proptest! {
    /// A refused multi changes nothing, and replaying the log gives the same state.
    #[test]
    fn refused_multis_change_nothing_and_replay_gives_the_same_state(
        multis in proptest::collection::vec(proptest::collection::vec(any_op(), 1..5), 1..30)
    ) {
        let mut state = State::default();
        let mut replayed = State::default();
        for (now_ms, ops) in multis.iter().enumerate() {
            let before = dump(&state);
            let bytes = state.tree.bytes();
            match state.write(UNAUTHENTICATED, ops, now_ms as i64) {
                Ok(written) => {
                    let mut record = Vec::new();
                    Txn::Changes(written.changes).encode(&mut record);
                    let txn = Txn::decode(&mut crate::keeper::jute::Reader::new(&record)).unwrap();
                    replayed.replay(state.zxid(), now_ms as i64, &txn, 0).unwrap();
                }
                Err(_) => {
                    prop_assert_eq!(dump(&state), before);
                    prop_assert_eq!(state.tree.bytes(), bytes);
                }
            }
        }
        prop_assert_eq!(dump(&state), dump(&replayed));
        prop_assert_eq!(state.tree.bytes(), replayed.tree.bytes());
    }
}
