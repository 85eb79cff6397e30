//! Sessions: opening, re-attaching, refusal, expiry, and the removal of ephemerals.

use std::time::Duration;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wait_for;
use crate::harness::wire::{
    Client, Create, Hello, Lost, Put, Take, closed, create_body, dial, op, read_session, send,
};

on_both_stores![
    crate::with_super_user;
    connect_reply_has_a_read_only_byte_if_the_request_had_one,
    timeouts_are_clamped_to_2_and_20_ticks,
    reattaching_keeps_the_session_and_closes_the_old_connection,
    wrong_password_is_refused,
    unknown_session_is_refused,
    client_with_a_newer_zxid_is_closed_without_a_reply,
    requests_may_be_sent_before_the_connect_reply,
    closing_deletes_all_ephemerals_in_one_transaction,
    closed_session_cannot_be_reattached,
    pings_are_answered_with_their_own_xid,
    ephemerals_are_deleted_with_their_session,
    pings_keep_the_session_alive,
    used_empty_containers_are_deleted,
    expired_childless_ttl_nodes_are_deleted,
];

fn hello(timeout_ms: i32) -> Hello {
    Hello { timeout_ms, ..Hello::default() }
}

fn connect_reply_has_a_read_only_byte_if_the_request_had_one(site: &Site) {
    for (read_only_byte, length) in [(true, 37), (false, 36)] {
        let hello = Hello { read_only_byte, ..Hello::default() };
        let client = Client::try_connect(site.addr, &hello).expect("a session");
        assert_eq!(client.session.answer_length, length);
        assert_eq!(client.session.password.len(), 16);
        assert_ne!(client.session.id, 0);
    }
}

fn timeouts_are_clamped_to_2_and_20_ticks(site: &Site) {
    for (asked, given) in [(1, 4_000), (-1, 4_000), (4_000, 4_000), (9_999, 9_999), (i32::MAX, 40_000)] {
        let client = Client::try_connect(site.addr, &hello(asked)).expect("a session");
        assert_eq!(client.session.timeout_ms, given, "asked for {asked}");
    }
}

fn reattaching_keeps_the_session_and_closes_the_old_connection(site: &Site) {
    let mut first = Client::connect(site.addr);
    first.create(&site.path("/e"), b"", Create::Ephemeral);
    let mut second = Client::try_connect(site.addr, &Hello::again(&first.session)).expect("the same session");
    assert_eq!(second.session.id, first.session.id);
    assert_eq!(second.session.password, first.session.password);
    assert!(closed(&mut first.stream), "the old connection is still open");
    let (_, stat) = second.get(&site.path("/e")).expect("the ephemeral");
    assert_eq!(stat.ephemeral_owner, second.session.id);
}

fn refused(site: &Site, hello: &Hello) {
    let mut stream = dial(site.addr).expect("a connection");
    send(&mut stream, &hello.frame()).expect("sent");
    let answer = read_session(&mut stream).expect("an answer");
    assert_eq!((answer.id, answer.timeout_ms), (0, 0));
    assert_eq!(answer.password, [0; 16]);
    assert!(closed(&mut stream), "the connection is still open");
}

fn wrong_password_is_refused(site: &Site) {
    let owner = Client::connect(site.addr);
    let password = vec![7; 16];
    refused(site, &Hello { password, ..Hello::again(&owner.session) });
    refused(site, &Hello { password: Vec::new(), ..Hello::again(&owner.session) });
    // ZooKeeper closes the owner's connection here. The test does not require it, but the session
    // must survive.
    let owner = Client::try_connect(site.addr, &Hello::again(&owner.session)).expect("the session");
    assert_ne!(owner.session.id, 0, "the owner's session has ended");
}

fn unknown_session_is_refused(site: &Site) {
    refused(site, &Hello { session: 0x1234_5678, ..Hello::default() });
}

fn client_with_a_newer_zxid_is_closed_without_a_reply(site: &Site) {
    let future = Hello { last_zxid: i64::MAX, ..Hello::default() };
    match Client::try_connect(site.addr, &future) {
        Err(Lost::Closed) => {}
        other => panic!("not closed: {other:?}"),
    }
}

fn requests_may_be_sent_before_the_connect_reply(site: &Site) {
    let watched = site.path("/watched");
    let mut other = Client::connect(site.addr);
    other.create(&watched, b"", Create::Persistent);
    let (_, before) = other.get(&watched).expect("the node");
    other.set_if_version(&watched, b"changed", -1).expect("a change");

    let auth = Put::new().int(-4).int(op::AUTH).int(0).bytes("digest").bytes("ann:pw").framed();
    let watches = Put::new().long(before.mzxid).int(1).bytes(&watched).int(0).int(0);
    let watches = Put::new().int(-8).int(op::SET_WATCHES).raw(&watches.0).framed();
    let mut stream = dial(site.addr).expect("a connection");
    send(&mut stream, &[Hello::default().frame(), auth, watches].concat()).expect("sent");

    let session = read_session(&mut stream).expect("an answer");
    let mut client = Client { stream, session, xid: 0 };
    let auth = client.receive().expect("the answer to auth");
    assert_eq!((auth.xid, auth.err), (-4, 0));
    let event = client.receive().expect("the missed event");
    assert_eq!((event.xid, event.zxid, event.err), (-1, -1, 0));
    let mut take = Take(&event.body);
    assert_eq!((take.int(), take.int(), take.string()), (3, 3, watched));
    let watches = client.receive().expect("the answer to setWatches");
    assert_eq!((watches.xid, watches.err), (-8, 0));
}

fn closing_deletes_all_ephemerals_in_one_transaction(site: &Site) {
    let mut owner = Client::connect(site.addr);
    for name in ["/a", "/b", "/c"] {
        owner.create(&site.path(name), b"", Create::Ephemeral);
    }
    let last = owner.call(op::SYNC, &Put::new().bytes(&site.chroot)).zxid;
    let reply = owner.call(op::CLOSE, &Put::new());
    assert_eq!((reply.err, reply.zxid), (0, last + 1));
    assert!(closed(&mut owner.stream), "the connection is still open");

    let (_, stat) = Client::connect(site.addr).get(&site.chroot).expect("the parent");
    assert_eq!((stat.num_children, stat.pzxid, stat.cversion), (0, last + 1, 6));
}

fn closed_session_cannot_be_reattached(site: &Site) {
    let client = Client::connect(site.addr);
    let session = client.session.clone();
    client.close();
    refused(site, &Hello::again(&session));
}

fn pings_are_answered_with_their_own_xid(site: &Site) {
    let mut client = Client::connect(site.addr);
    client.send_as(-2, op::PING, &Put::new()).expect("sent");
    let reply = client.receive().expect("a pong");
    assert_eq!((reply.xid, reply.err, reply.body.len()), (-2, 0, 0));
    assert_eq!(reply.zxid, client.call(op::EXISTS, &Put::new().bytes("/nothing").bool(false)).zxid);
}

fn ephemerals_are_deleted_with_their_session(site: &Site) {
    let path = site.path("/e");
    let mut owner = Client::try_connect(site.addr, &hello(4_000)).expect("a session");
    owner.create(&path, b"", Create::Ephemeral);
    let session = owner.session.clone();
    let (later, mut patient) =
        (site.path("/later"), Client::try_connect(site.addr, &hello(40_000)).expect("a session"));
    patient.create(&later, b"", Create::Ephemeral);
    let mut other = Client::try_connect(site.addr, &hello(40_000)).expect("a session");
    drop((owner, patient));
    wait_for("expiry", Duration::from_secs(15), || {
        // Both sessions have lost their connection; the longer timeout is not over yet.
        let (first, second) = (other.get(&path), other.get(&later));
        assert!(second.is_ok(), "the session with the longer timeout expired first");
        (first == Err(-101)).then_some(())
    });
    refused(site, &Hello::again(&session));
}

fn pings_keep_the_session_alive(site: &Site) {
    let mut idle = Client::try_connect(site.addr, &hello(4_000)).expect("a session");
    idle.create(&site.path("/idle"), b"", Create::Ephemeral);
    let mut live = Client::try_connect(site.addr, &hello(4_000)).expect("a session");
    live.create(&site.path("/live"), b"", Create::Ephemeral);
    // The idle session has a connection but sends no request, so it expires.
    wait_for("expiry of the idle session", Duration::from_secs(15), || {
        live.send_as(-2, op::PING, &Put::new()).expect("sent");
        assert_eq!(live.receive().expect("a pong").xid, -2);
        (live.get(&site.path("/idle")) == Err(-101)).then_some(())
    });
    assert!(live.get(&site.path("/live")).is_ok());
    assert!(closed(&mut idle.stream), "the connection of an expired session is still open");
    let refused = Client::try_connect(site.addr, &Hello::again(&idle.session)).expect("an answer");
    assert_eq!(refused.session.id, 0);
    assert_eq!(live.call(op::CREATE, &create_body(&site.path("/live/x"), b"", Create::Persistent)).err, -108);
}

const CREATE_CONTAINER: i32 = 19;
const CREATE_TTL: i32 = 21;

fn used_empty_containers_are_deleted(site: &Site) {
    let mut client = Client::connect(site.addr);
    let (used, fresh, full) = (site.path("/used"), site.path("/fresh"), site.path("/full"));
    for path in [&used, &fresh, &full] {
        let reply = client.call(CREATE_CONTAINER, &Put::new().bytes(path).bytes("x").open_acl().int(4));
        assert_eq!(reply.err, 0, "create {path}");
        let mut take = Take(&reply.body);
        assert_eq!((take.string(), take.stat().ephemeral_owner), (path.clone(), 0));
    }
    client.create(&format!("{used}/child"), b"", Create::Persistent);
    client.create(&format!("{full}/child"), b"", Create::Persistent);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(format!("{used}/child")).int(-1)).err, 0);
    wait_for("end of the container", Duration::from_secs(15), || {
        (client.get(&used) == Err(-101)).then_some(())
    });
    assert!(client.get(&fresh).is_ok(), "a container that never had a child was deleted");
    assert!(client.get(&full).is_ok(), "a container with a child was deleted");
}

fn expired_childless_ttl_nodes_are_deleted(site: &Site) {
    let mut client = Client::connect(site.addr);
    let ttl_body = |path: &str, flags: i32, ttl_ms: i64| {
        Put::new().bytes(path).bytes("x").open_acl().int(flags).long(ttl_ms)
    };
    let (short, long, parent) = (site.path("/short"), site.path("/long"), site.path("/parent"));
    for (path, ttl_ms) in [(&short, 1_500), (&long, 600_000), (&parent, 1)] {
        let reply = client.call(CREATE_TTL, &ttl_body(path, 5, ttl_ms));
        assert_eq!((reply.err, Take(&reply.body).string()), (0, path.clone()));
    }
    client.create(&format!("{parent}/child"), b"", Create::Persistent);
    let reply = client.call(CREATE_TTL, &ttl_body(&site.path("/n-"), 6, 600_000));
    assert_eq!(Take(&reply.body).string(), site.path("/n-0000000003"));
    for bad in [0, -1] {
        assert_eq!(
            client.call(CREATE_TTL, &ttl_body(&site.path("/bad"), 5, bad)).err,
            -8,
            "a TTL of {bad} ms"
        );
    }
    wait_for("expiry of the short TTL", Duration::from_secs(15), || {
        (client.get(&short) == Err(-101)).then_some(())
    });
    assert!(client.get(&long).is_ok());
    assert!(client.get(&parent).is_ok(), "a TTL node with a child was deleted");
}
