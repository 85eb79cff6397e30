//! State that survives a restart: sessions, their passwords, their ephemerals, counters.

use std::time::Duration;

use crate::harness::scenario::for_both_kinds;
use crate::harness::wire::{Client, Create, Hello, Lost, Put, op};
use crate::harness::{Kind, Options, Store, wait_for};

for_both_kinds![sessions_survive_a_restart];

fn sessions_survive_a_restart(kind: Kind) {
    let mut store = Store::start(kind, Options::default());
    let mut client =
        Client::try_connect(store.addr(), &Hello { timeout_ms: 4_000, ..Hello::default() }).expect("one");
    client.create("/e", b"", Create::Ephemeral);
    client.create("/seq", b"", Create::Persistent);
    assert_eq!(client.create("/seq/n-", b"", Create::Sequential), "/seq/n-0000000000");
    assert_eq!(client.call(op::DELETE, &Put::new().bytes("/seq/n-0000000000").int(-1)).err, 0);
    let silent =
        Client::try_connect(store.addr(), &Hello { timeout_ms: 4_000, ..Hello::default() }).expect("one");
    client.create("/kept", b"v", Create::Persistent);
    let last = client.call(op::SYNC, &Put::new().bytes("/")).zxid;

    store.restart();
    let hello = Hello { last_zxid: last, timeout_ms: 4_000, ..Hello::again(&client.session) };
    let mut client = Client::try_connect(store.addr(), &hello).expect("the same session");
    assert_eq!(client.session.id, hello.session);
    assert_eq!(client.get("/e").expect("the ephemeral").1.ephemeral_owner, hello.session);
    assert_eq!(client.create("/seq/n-", b"", Create::Sequential), "/seq/n-0000000001");
    let zxid = client.get("/seq/n-0000000001").expect("the node").1.czxid;
    assert!(zxid > last, "zxid {zxid:#x} after {last:#x}");

    let wrong = Hello { password: vec![1; 16], ..Hello::again(&client.session) };
    assert_eq!(Client::try_connect(store.addr(), &wrong).expect("a refusal").session.id, 0);
    let future = Hello { last_zxid: zxid + 1_000_000, ..Hello::again(&client.session) };
    assert!(matches!(Client::try_connect(store.addr(), &future), Err(Lost::Closed)));

    // Sessions without a connection also expire after the restart.
    drop(silent);
    let mut watcher = Client::connect(store.addr());
    drop(client);
    wait_for("expiry after the restart", Duration::from_secs(20), || {
        (watcher.get("/e") == Err(-101)).then_some(())
    });
    assert_eq!(watcher.get("/kept").map(|(data, _)| data), Ok(b"v".to_vec()));
}
