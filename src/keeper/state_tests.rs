//! Tables and properties of the state machine.

use proptest::prelude::*;

use super::*;
use crate::keeper::acl::{ALL, Acl, CREATE, DELETE, READ, WRITE};

const NOBODY: Caller<'static> = Caller { session: 1, proved: &[] };

fn world(perms: i32) -> Vec<Acl> {
    vec![Acl { perms, who: Identity::new("world", "anyone") }]
}

fn create(path: &str) -> Op<'_> {
    create_as(path, CreateMode::Persistent, false)
}

fn create_as(path: &str, mode: CreateMode, sequential: bool) -> Op<'_> {
    Op::Create { path, data: Some(b"x"), acl: world(ALL), mode, sequential, wants_stat: true }
}

fn write(state: &mut State, op: Op<'_>) -> Result<OpResult, Code> {
    state
        .write(NOBODY, &[op], 5)
        .map(|written| written.results.into_iter().next().unwrap())
        .map_err(|refusal| refusal.code)
}

type Picture = (String, Stat, Option<Box<[u8]>>, Vec<String>, Arc<Vec<Acl>>);

/// Everything that a client could tell two states apart by.
fn picture(state: &State) -> Vec<Picture> {
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
fn a_fresh_tree_looks_like_zookeepers() {
    let state = State::default();
    let paths: Vec<_> = picture(&state).into_iter().map(|node| node.0).collect();
    assert_eq!(paths, ["/", "/zookeeper", "/zookeeper/config", "/zookeeper/quota"]);
    assert_eq!(state.tree.get("/").unwrap().stat().cversion, -1);
}

#[test]
fn refusals_and_their_codes() {
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
        let (before, zxid) = (picture(&state), state.zxid());
        assert_eq!(write(&mut state, op.clone()), Err(code), "{op:?}");
        assert_eq!(picture(&state), before, "{op:?} left something behind");
        assert_eq!(state.zxid(), zxid + 1, "a failed write takes a zxid");
    }
}

#[test]
fn sequence_numbers_are_never_used_again() {
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
fn a_multi_sees_its_own_steps_and_is_all_or_nothing() {
    let mut state = State::default();
    let good = [create("/m"), create("/m/a"), Op::SetData { path: "/m/a", data: None, version: 0 }];
    assert_eq!(state.write(NOBODY, &good, 1).unwrap().results.len(), 3);
    assert_eq!(state.tree.get("/m/a").unwrap().version, 1);

    let before = picture(&state);
    let bad = [
        Op::SetData { path: "/m", data: Some(b"new"), version: -1 },
        Op::SetAcl { path: "/m", acl: world(ALL), version: -1 },
        Op::Delete { path: "/m/a", version: -1 },
        create_as("/m/e", CreateMode::Ephemeral, true),
        create_as("/m/c", CreateMode::Container, false),
        Op::Check { path: "/nope", version: -1 },
    ];
    let refusal = state.write(NOBODY, &bad, 2).unwrap_err();
    assert_eq!(refusal, Refusal { index: 5, code: Code::NoNode });
    assert_eq!(picture(&state), before);
    assert_eq!((state.tree.ephemeral_count(), state.tree.transients().count()), (0, 0));
}

#[test]
fn rights_lie_where_zookeeper_puts_them() {
    let me = [Identity::new("digest", "me:x")];
    let mut state = State::default();
    let limited = |perms| vec![Acl { perms, who: me[0].clone() }];
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
    assert_eq!(codes(&mut state, NOBODY), [no; 7]);
    assert_eq!(codes(&mut state, mine), [no, None, None, no, no, no, None]);
}

#[test]
fn the_end_of_a_session_is_the_end_of_its_ephemerals_only() {
    let mut state = State::default();
    state.open_session(1, 4000, [1; 16], 0);
    write(&mut state, create("/p")).unwrap();
    write(&mut state, create_as("/p/e", CreateMode::Ephemeral, false)).unwrap();
    let other = Caller { session: 2, proved: &[] };
    state.write(other, &[create_as("/theirs", CreateMode::Ephemeral, false)], 1).unwrap();
    let (_, gone) = state.close_session(1);
    assert_eq!(gone.iter().map(|gone| &*gone.path).collect::<Vec<_>>(), ["/p/e"]);
    assert!(state.tree.get("/p").is_some() && state.tree.get("/theirs").is_some());
    assert_eq!(state.tree.get("/p").unwrap().pzxid, state.zxid());
}

#[test]
fn containers_go_when_used_and_empty_and_ttl_nodes_when_old() {
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
fn a_full_tree_refuses_growth_and_nothing_else() {
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
fn access_lists_are_no_way_around_the_limit() {
    let long =
        |n: usize| vec![Acl { perms: READ, who: Identity::new("digest", &format!("u:{}", "x".repeat(n))) }];
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
    (0..100).map(|n| Acl { perms: ALL, who: name(n) }).chain(world(ALL)).collect()
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
        3 => (path.clone(), mode, any::<bool>()).prop_map(|(path, mode, sequential)| create_as(path, mode, sequential)),
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
    /// A refused multi leaves no trace, and what the log holds rebuilds the very same state.
    #[test]
    fn refused_multis_leave_no_trace_and_the_log_rebuilds_the_state(
        multis in proptest::collection::vec(proptest::collection::vec(any_op(), 1..5), 1..30)
    ) {
        let mut state = State::default();
        let mut replayed = State::default();
        for (now_ms, ops) in multis.iter().enumerate() {
            let before = picture(&state);
            let bytes = state.tree.bytes();
            match state.write(NOBODY, ops, now_ms as i64) {
                Ok(written) => {
                    let mut record = Vec::new();
                    Txn::Changes(written.changes).encode(&mut record);
                    let txn = Txn::decode(&mut crate::keeper::jute::Reader::new(&record)).unwrap();
                    replayed.replay(state.zxid(), now_ms as i64, &txn, 0).unwrap();
                }
                Err(_) => {
                    prop_assert_eq!(picture(&state), before);
                    prop_assert_eq!(state.tree.bytes(), bytes);
                }
            }
        }
        prop_assert_eq!(picture(&state), picture(&replayed));
        prop_assert_eq!(state.tree.bytes(), replayed.tree.bytes());
    }
}
