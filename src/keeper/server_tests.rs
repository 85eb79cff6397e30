//! When the server sends replies and closes connections. The tests drive its event loop step by
//! step.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpStream as Client};

use super::*;
use crate::keeper::acl::{ALL, Acl, Identity};
use crate::keeper::jute::Put as _;
use crate::keeper::proto::{encode_acl, op};
use crate::keeper::refusals::Reason;

fn frame(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_buffer(body);
    out
}

fn connect() -> Vec<u8> {
    let mut body = Vec::new();
    body.put_i32(0);
    body.put_i64(0);
    body.put_i32(5_000);
    body.put_i64(0);
    body.put_buffer(&[0; 16]);
    frame(&body)
}

fn create(path: &str) -> Vec<u8> {
    let mut body = Vec::new();
    body.put_i32(1);
    body.put_i32(op::CREATE);
    body.put_string(path);
    body.put_buffer(b"");
    encode_acl(&[Acl { perms: ALL, identity: Identity::new("world", "anyone") }], &mut body);
    body.put_i32(0);
    frame(&body)
}

/// The first half of a loop iteration: waits for events and handles them, without a sync.
fn poll_once(server: &mut Server) {
    let now = server.now();
    poll_once_at(server, now);
}

fn poll_once_at(server: &mut Server, now: Now) {
    let mut events = Events::with_capacity(16);
    server.poll.poll(&mut events, Some(Duration::from_secs(10))).unwrap();
    assert!(!events.is_empty(), "no event within 10 s");
    server.handle_events(&events, now).unwrap();
}

/// Bytes that have arrived at the client.
fn arrived(client: &Client) -> usize {
    let mut bytes = [0; 4096];
    match client.peek(&mut bytes) {
        Err(err) if err.kind() == ErrorKind::WouldBlock => 0,
        read => read.unwrap(),
    }
}

#[test]
fn client_that_reads_again_gets_no_reply_before_the_sync() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into());
    // Every reply exceeds the limit, so that the connection is blocked after each request.
    config.limits.max_outstanding_bytes = 1;
    let (mut server, _stop) = Server::new(config).unwrap();
    let mut client = Client::connect(server.local_addr()).unwrap();
    client.set_nonblocking(true).unwrap();
    client.write_all(&connect()).unwrap();
    while arrived(&client) == 0 {
        poll_once(&mut server);
        server.commit_and_flush(server.now()).unwrap();
    }
    let before = arrived(&client);
    client.write_all(&create("/a")).unwrap();
    // The request is handled first, because the connection was blocked; then the events that report
    // the connection as readable and writable are handled.
    poll_once(&mut server);
    assert!(server.service.state.tree.get("/a").is_some());
    assert!(server.service.storage.pending_bytes() > 0, "synced before the test could check");
    assert_eq!(arrived(&client), before, "replied before the sync");
    server.commit_and_flush(server.now()).unwrap();
    assert!(arrived(&client) > before);
}

#[test]
fn closing_connection_is_kept_until_its_last_replies_time_out() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, _stop) = Server::new(Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into())).unwrap();
    let mut client = Client::connect(server.local_addr()).unwrap();
    client.set_nonblocking(true).unwrap();
    client.write_all(&connect()).unwrap();
    while arrived(&client) == 0 {
        poll_once(&mut server);
        server.commit_and_flush(server.now()).unwrap();
    }
    let mut close = Vec::new();
    close.put_i32(2);
    close.put_i32(op::CLOSE_SESSION);
    client.write_all(&frame(&close)).unwrap();
    let at = |mono_ms| Now { wall_ms: 1, mono_ms };
    while !server.service.state.sessions.is_empty() {
        poll_once_at(&mut server, at(60_000));
    }
    // Not flushed, as if the client were slow: its reply is still pending.
    server.housekeeping(at(69_000)).unwrap();
    assert_eq!(server.connections.len(), 1, "closed with a pending reply");
    server.housekeeping(at(70_001)).unwrap();
    assert_eq!(server.connections.len(), 0, "a client that never reads stays connected");
}

#[test]
fn remote_address_gets_sixty_connections_and_loopback_is_unlimited() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, _stop) = Server::new(Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into())).unwrap();
    let now = server.now();
    let remote = |last: u8, port: u16| SocketAddr::from(([10, 0, 0, last], port));
    for port in 1..=60 {
        assert!(server.ensure_slot_for(remote(1, port), now), "connection {port}");
        server.admission.opened(remote(1, port).ip());
    }
    assert!(!server.ensure_slot_for(remote(1, 61), now));
    assert_eq!(server.service.refusals.count(Reason::Connection), 1);
    assert!(server.ensure_slot_for(remote(2, 1), now), "another address");
    assert!(server.ensure_slot_for((Ipv4Addr::LOCALHOST, 1).into(), now), "loopback");
    server.config.limits.max_connections_per_address = 0;
    assert!(server.ensure_slot_for(remote(1, 61), now), "no limit");
}
