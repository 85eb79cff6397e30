//! Malformed frames, and the largest frame that is accepted.

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, Put, closed, dial, op, send, set_body};

on_both_stores![
    crate::with_super_user;
    frame_beyond_the_limit_closes_the_connection,
    negative_frame_length_closes_the_connection,
    largest_frame_is_accepted,
    bad_first_frames_close_the_connection,
    unknown_operation_is_refused,
    truncated_request_is_refused_and_the_connection_stays_open,
    garbage_does_not_affect_other_clients,
];

const LIMIT: usize = 1_048_575;

fn frame_beyond_the_limit_closes_the_connection(site: &Site) {
    let mut client = Client::connect(site.addr);
    send(&mut client.stream, &1_048_576_i32.to_be_bytes()).expect("sent");
    assert!(closed(&mut client.stream));
}

fn negative_frame_length_closes_the_connection(site: &Site) {
    for length in [-1_i32, i32::MIN] {
        let mut client = Client::connect(site.addr);
        send(&mut client.stream, &length.to_be_bytes()).expect("sent");
        assert!(closed(&mut client.stream), "length {length}");
    }
}

fn largest_frame_is_accepted(site: &Site) {
    let path = site.path("/large");
    let mut client = Client::connect(site.addr);
    client.create(&path, b"", Create::Persistent);
    let overhead = 8 + set_body(&path, b"", -1).0.len();
    let data = vec![b'x'; LIMIT - overhead];
    let stat = client.set_if_version(&path, &data, -1).expect("written");
    assert_eq!(usize::try_from(stat.data_length), Ok(data.len()));
    assert_eq!(client.get(&path).expect("read").0, data);
}

fn bad_first_frames_close_the_connection(site: &Site) {
    let get = Put::new().int(1).int(op::GET_DATA).bytes("/").bool(false).framed();
    let (empty, short) = (0_i32.to_be_bytes().to_vec(), Put::new().int(0).long(0).framed());
    for first in [&get, &empty, &short, &b"wxyz".to_vec()] {
        let mut stream = dial(site.addr).expect("a connection");
        send(&mut stream, first).expect("sent");
        assert!(closed(&mut stream), "{first:?} is taken for a connect request");
    }
}

/// ZooKeeper closes the connection after this reply. The test does not require it: keeping the
/// connection is better for a client that probes for a newer operation.
fn unknown_operation_is_refused(site: &Site) {
    for unknown in [42, 9_999, -7] {
        let mut client = Client::connect(site.addr);
        let reply = client.call(unknown, &Put::new());
        assert_eq!((reply.err, reply.zxid, reply.body.len()), (-6, -1, 0), "operation {unknown}");
    }
}

fn truncated_request_is_refused_and_the_connection_stays_open(site: &Site) {
    let mut client = Client::connect(site.addr);
    for (code, body) in [
        (op::GET_DATA, Put::new()),
        (op::GET_DATA, Put::new().int(100)),
        (op::SET_DATA, Put::new().bytes(&site.chroot).int(i32::MAX)),
        (op::CREATE, Put::new().bytes(site.path("/x")).bytes("").int(i32::MAX)),
    ] {
        assert_eq!(client.call(code, &body).err, -5, "operation {code} {body:?}");
    }
    assert!(client.get(&site.chroot).is_ok());
}

fn garbage_does_not_affect_other_clients(site: &Site) {
    let mut healthy = Client::connect(site.addr);
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    for round in 0..200_usize {
        let mut noise = Vec::new();
        for _ in 0..round {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            noise.push(state.to_be_bytes()[0]);
        }
        // Half of it as a frame of a connected client, half raw on a new connection. The server may
        // close the connection first.
        if round % 2 == 0 {
            let mut client = Client::connect(site.addr);
            drop(send(&mut client.stream, &Put::new().bytes(&noise).0));
        } else {
            let mut stream = dial(site.addr).expect("a connection");
            drop(send(&mut stream, &noise));
        }
        assert!(healthy.get(&site.chroot).is_ok(), "after round {round}");
    }
}
