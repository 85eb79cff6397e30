//! What leaves the server, and when, with its loop turned by hand.

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
    encode_acl(&[Acl { perms: ALL, who: Identity::new("world", "anyone") }], &mut body);
    body.put_i32(0);
    frame(&body)
}

/// The loop's first half: waits for something to happen and handles it. Nothing is durable yet.
fn half_a_turn(server: &mut Server) {
    let now = server.now();
    half_a_turn_at(server, now);
}

fn half_a_turn_at(server: &mut Server, now: Now) {
    let mut events = Events::with_capacity(16);
    server.poll.poll(&mut events, Some(Duration::from_secs(10))).unwrap();
    assert!(!events.is_empty(), "nothing came within 10 s");
    server.turn(&events, now).unwrap();
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
fn a_client_that_reads_again_gets_no_answer_before_the_sync() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into());
    // Every answer is one too many, so that the connection is blocked after each request.
    config.limits.max_outstanding_bytes = 1;
    let (mut server, _stop) = Server::new(config).unwrap();
    let mut client = Client::connect(server.local_addr()).unwrap();
    client.set_nonblocking(true).unwrap();
    client.write_all(&connect()).unwrap();
    while arrived(&client) == 0 {
        half_a_turn(&mut server);
        server.settle(server.now()).unwrap();
    }
    let before = arrived(&client);
    client.write_all(&create("/a")).unwrap();
    // Handled first thing in this turn, because it follows a blocked answer; then comes the news that the connection
    // has something to read, and that it can be written to.
    half_a_turn(&mut server);
    assert!(server.service.state.tree.get("/a").is_some());
    assert!(server.service.storage.pending_bytes() > 0, "synced too early to tell anything");
    assert_eq!(arrived(&client), before, "answered before the sync");
    server.settle(server.now()).unwrap();
    assert!(arrived(&client) > before);
}

#[test]
fn an_old_connection_has_its_time_to_take_the_last_answers() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, _stop) = Server::new(Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into())).unwrap();
    let mut client = Client::connect(server.local_addr()).unwrap();
    client.set_nonblocking(true).unwrap();
    client.write_all(&connect()).unwrap();
    while arrived(&client) == 0 {
        half_a_turn(&mut server);
        server.settle(server.now()).unwrap();
    }
    let mut close = Vec::new();
    close.put_i32(2);
    close.put_i32(op::CLOSE_SESSION);
    client.write_all(&frame(&close)).unwrap();
    let at = |mono_ms| Now { wall_ms: 1, mono_ms };
    while !server.service.state.sessions.is_empty() {
        half_a_turn_at(&mut server, at(60_000));
    }
    // Not settled, as if the client were slow: its answer is still to be taken.
    server.chores(at(69_000)).unwrap();
    assert_eq!(server.connections.len(), 1, "closed with an answer to be taken");
    server.chores(at(70_001)).unwrap();
    assert_eq!(server.connections.len(), 0, "a client that takes nothing stays for ever");
}

#[test]
fn one_remote_address_gets_sixty_connections_and_loopback_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, _stop) = Server::new(Config::new(dir.path(), (Ipv4Addr::LOCALHOST, 0).into())).unwrap();
    let now = server.now();
    let remote = |last: u8, port: u16| SocketAddr::from(([10, 0, 0, last], port));
    for port in 1..=60 {
        assert!(server.has_room_for(remote(1, port), now), "connection {port}");
        server.admission.opened(remote(1, port).ip());
    }
    assert!(!server.has_room_for(remote(1, 61), now));
    assert_eq!(server.service.refusals.count(Reason::Connection), 1);
    assert!(server.has_room_for(remote(2, 1), now), "another address");
    assert!(server.has_room_for((Ipv4Addr::LOCALHOST, 1).into(), now), "loopback");
    server.config.limits.max_connections_per_address = 0;
    assert!(server.has_room_for(remote(1, 61), now), "no limit");
}
