//! Frames that no well-behaved client sends, and how large a well-behaved one may get.

use crate::harness::scenario::{Scenario, Site, scenarios};
use crate::harness::wire::{Client, Create, Put, closed, dial, op, send, set_body};

pub(crate) const ALL: &[Scenario] = scenarios![
    a_frame_beyond_the_limit_closes_the_connection,
    a_negative_frame_closes_the_connection,
    the_largest_frame_is_served,
    bad_first_frames_close_the_connection,
    an_unknown_operation_is_refused,
    a_cut_body_is_refused_and_the_connection_stays,
    garbage_hurts_nobody_else,
];

const LIMIT: usize = 1_048_575;

fn a_frame_beyond_the_limit_closes_the_connection(site: &Site) {
    let mut client = Client::connect(site.addr);
    send(&mut client.stream, &1_048_576_i32.to_be_bytes()).expect("sent");
    assert!(closed(&mut client.stream));
}

fn a_negative_frame_closes_the_connection(site: &Site) {
    for length in [-1_i32, i32::MIN] {
        let mut client = Client::connect(site.addr);
        send(&mut client.stream, &length.to_be_bytes()).expect("sent");
        assert!(closed(&mut client.stream), "length {length}");
    }
}

fn the_largest_frame_is_served(site: &Site) {
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

/// ZooKeeper closes the connection after this answer. That is not asked for here: a client that probes for a newer
/// operation is better off when it stays.
fn an_unknown_operation_is_refused(site: &Site) {
    for unknown in [42, 9_999, -7] {
        let mut client = Client::connect(site.addr);
        let reply = client.call(unknown, &Put::new());
        assert_eq!((reply.err, reply.zxid, reply.body.len()), (-6, -1, 0), "operation {unknown}");
    }
}

fn a_cut_body_is_refused_and_the_connection_stays(site: &Site) {
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

fn garbage_hurts_nobody_else(site: &Site) {
    let mut healthy = Client::connect(site.addr);
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    for round in 0..200_usize {
        let mut noise = Vec::new();
        for _ in 0..round {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            noise.push(state.to_be_bytes()[0]);
        }
        // Half of it as a frame of a connected client, half raw on a fresh connection. The server may hang up first.
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
