//! The keeper under `kill -9`: clients work on compare-and-swap registers while the server is
//! killed repeatedly, and the whole history is checked afterwards. No acknowledged write may be
//! lost, none may be applied twice, sessions and their ephemerals survive, and sequence numbers are
//! never reused.

mod crash {
    pub(crate) mod history;
    pub(crate) mod workers;
}
mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crash::history::check_register;
use crash::workers::{Names, Register, Shared};
use harness::wire::{Client, Create, Hello};
use harness::{Store, wait_for};

const KILLS: usize = 200;
const REGISTERS: usize = 4;
const CLIENTS: usize = 6;

/// A seeded source of pauses, so that a failing run can be repeated.
struct Pauses(u64);

impl Pauses {
    fn next_below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn acknowledged_writes_survive_200_kills() {
    let mut store = Store::keeper();
    let mut setup = Client::connect(store.addr());
    for register in 0..REGISTERS {
        setup.create(&format!("/r{register}"), b"", Create::Persistent);
    }
    setup.create("/seq", b"", Create::Persistent);
    setup.create("/e", b"", Create::Persistent);
    let mut owner =
        Client::try_connect(store.addr(), &Hello { timeout_ms: 40_000, ..Hello::default() }).expect("one");
    owner.create("/e/owned", b"", Create::Ephemeral);
    let owner = owner.session;

    let shared = Arc::new(Shared {
        addr: store.addr(),
        start: Instant::now(),
        stop: AtomicBool::new(false),
        acknowledged: AtomicUsize::new(0),
    });
    let registers: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let worker = Register::new(shared.clone(), client, client % REGISTERS);
            std::thread::spawn(move || worker.run())
        })
        .collect();
    let names = Names::new(shared.clone());
    let names = std::thread::spawn(move || names.run());

    let mut pauses = Pauses(0x00c0_ffee);
    for kill in 0..KILLS {
        // Every server process acknowledges a few writes and is killed during the next ones.
        let goal = shared.acknowledged.load(Ordering::SeqCst) + 10;
        wait_for("progress between two kills", Duration::from_secs(30), || {
            (shared.acknowledged.load(Ordering::SeqCst) >= goal).then_some(())
        });
        let moment = Instant::now() + Duration::from_micros(pauses.next_below(20_000));
        wait_for("moment of the kill", Duration::from_secs(1), || (Instant::now() >= moment).then_some(()));
        store.kill9();
        store.restart();
        if kill % 20 == 0 {
            let mut client =
                Client::try_connect(store.addr(), &Hello::again(&owner)).expect("the owner's session");
            assert_eq!(client.session.id, owner.id, "the session was lost after kill {kill}");
            assert_eq!(client.get("/e/owned").expect("the ephemeral").1.ephemeral_owner, owner.id);
        }
    }
    shared.stop.store(true, Ordering::SeqCst);

    let mut by_register = vec![Vec::new(); REGISTERS];
    for (client, worker) in registers.into_iter().enumerate() {
        by_register[client % REGISTERS].extend(worker.join().expect("a worker"));
    }
    let mut reader = Client::connect(store.addr());
    for (register, operations) in by_register.iter().enumerate() {
        let (value, stat) = reader.get(&format!("/r{register}")).expect("the register");
        let acknowledged = check_register(operations, (&value, stat.version))
            .unwrap_or_else(|why| panic!("register {register}: {why}"));
        assert!(acknowledged >= KILLS / REGISTERS, "register {register} saw only {acknowledged} writes");
    }
    names.join().expect("the worker that makes names").check(&mut reader);
}

#[test]
fn ephemerals_of_a_dead_client_are_deleted_after_a_kill_of_the_server() {
    let mut store = Store::keeper();
    let hello = Hello { timeout_ms: 4_000, ..Hello::default() };
    let mut dead = Client::try_connect(store.addr(), &hello).expect("a session");
    dead.create("/dead", b"", Create::Ephemeral);
    let mut closed = Client::connect(store.addr());
    closed.create("/closed", b"", Create::Ephemeral);
    closed.close();
    drop(dead);
    store.restart();
    let mut reader = Client::connect(store.addr());
    assert_eq!(reader.get("/closed"), Err(-101), "its session ended before the kill");
    assert!(reader.get("/dead").is_ok(), "its session has a full timeout after the restart");
    wait_for("expiry", Duration::from_secs(15), || (reader.get("/dead") == Err(-101)).then_some(()));
    store.restart();
    assert_eq!(Client::connect(store.addr()).get("/dead"), Err(-101), "a deleted ephemeral reappeared");
}
