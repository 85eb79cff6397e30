//! Requests in an order that rarely occurs with real sockets.

use std::net::Ipv4Addr;

use super::*;
use crate::keeper::acl::Identity;
use crate::keeper::proto::{CreateMode, encode_acl};
use crate::keeper::state::TreeLimits;

const NOW: Now = Now { wall_ms: 1, mono_ms: 1 };

fn service(dir: &std::path::Path) -> Service {
    let (storage, state) = Storage::open(dir, TreeLimits::default(), 1, 0).unwrap();
    let rules = SessionRules {
        min_timeout_ms: 1_000,
        max_timeout_ms: 10_000,
        super_digest: None,
        max_answer_bytes: 1 << 20,
        identities: IdentityLimits::default(),
        watches: WatchLimits::default(),
    };
    let mut service = Service::new(state, storage, rules);
    (0..2).for_each(|id| service.out.open(id));
    service
}

fn peer(id: usize) -> Peer {
    Peer::new(id, Ipv4Addr::LOCALHOST.into())
}

fn connect(session: i64, password: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.put_i32(0);
    frame.put_i64(0);
    frame.put_i32(5_000);
    frame.put_i64(session);
    frame.put_buffer(password);
    frame
}

fn create_ephemeral(path: &str) -> Vec<u8> {
    const EPHEMERAL: i32 = 1;
    let mut frame = Vec::new();
    frame.put_i32(7);
    frame.put_i32(op::CREATE);
    frame.put_string(path);
    frame.put_buffer(b"");
    encode_acl(&[acl::Acl { perms: acl::ALL, identity: Identity::new("world", "anyone") }], &mut frame);
    frame.put_i32(EPHEMERAL);
    frame
}

#[test]
fn requests_of_an_ended_session_are_refused_on_its_old_connection() {
    let dir = tempfile::tempdir().unwrap();
    let mut service = service(dir.path());
    let (mut old, mut new) = (peer(0), peer(1));
    assert_eq!(service.frame(&mut old, &connect(0, &[0; 16]), NOW), FrameOutcome::Continue);
    let session = old.session.unwrap();
    assert_eq!(service.frame(&mut old, &create_ephemeral("/before"), NOW), FrameOutcome::Continue);
    assert_eq!(service.state.tree.get("/before").map(|node| node.kind()), Some(CreateMode::Ephemeral));

    // The session moves and ends within one loop iteration, before the server has closed its first
    // connection.
    let password = service.state.sessions.get(session).unwrap().password;
    assert_eq!(service.frame(&mut new, &connect(session, &password), NOW), FrameOutcome::Continue);
    let mut close = Vec::new();
    close.put_i32(1);
    close.put_i32(op::CLOSE_SESSION);
    assert_eq!(service.frame(&mut new, &close, NOW), FrameOutcome::Close);
    assert_eq!(service.state.tree.ephemeral_count(), 0);

    assert_eq!(service.frame(&mut old, &create_ephemeral("/after"), NOW), FrameOutcome::Close);
    assert_eq!(service.state.tree.ephemeral_count(), 0);
}

#[test]
fn session_ids_are_unique_across_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let opened = |service: &mut Service| {
        let mut peer = peer(0);
        assert_eq!(service.frame(&mut peer, &connect(0, &[0; 16]), NOW), FrameOutcome::Continue);
        peer.session.unwrap()
    };
    let mut service = service(dir.path());
    let first = opened(&mut service);
    assert!(first > 0);
    // Each start reserves a range of 2^32 ids.
    drop(service);
    let next = opened(&mut self::service(dir.path()));
    assert!(next - first >= 1 << 32, "{first:#x} and then {next:#x}");
}
