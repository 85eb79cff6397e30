//! Tests of the harness: a server starts, keeps acknowledged writes after a kill, stops on request,
//! and leaves no files or processes.

mod harness;

use harness::scenario::{Site, on_both_stores, run};
use harness::wire::{Client, Create};
use harness::{Store, poll_until};
use std::time::Duration;

fn keeps_data_over_kill_and_stop(mut store: Store) {
    Client::connect(store.addr()).create("/kept", b"v", Create::Persistent);
    store.restart();
    assert_eq!(Client::connect(store.addr()).get("/kept").map(|(data, _)| data), Ok(b"v".to_vec()));

    let pid = store.pid();
    store.sigterm();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(store.four_letters("ruok"), None);

    store.restart();
    assert_eq!(store.four_letters("ruok").as_deref(), Some("imok"));
    assert_eq!(Client::connect(store.addr()).get("/kept").map(|(data, _)| data), Ok(b"v".to_vec()));

    let (pid, dir) = (store.pid(), store.data_dir());
    drop(store);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(!dir.exists());
}

#[test]
fn zookeeper_keeps_data_over_kill_and_stop() {
    keeps_data_over_kill_and_stop(Store::zookeeper());
}

on_both_stores![servers_do_not_share_state, chroot_exists];

fn servers_do_not_share_state(site: &Site) {
    let other = Store::start(site.kind, harness::Options::default());
    assert_ne!(other.addr(), site.addr);
    let mine = site.path("/mine");
    Client::connect(site.addr).create(&mine, b"", Create::Persistent);
    assert_eq!(Client::connect(other.addr()).get(&mine), Err(-101));
}

fn chroot_exists(site: &Site) {
    assert_eq!(site.connect_string(), format!("{}/chroot_exists", site.addr));
    assert!(Client::connect(site.addr).get(&site.chroot).is_ok());
}

#[test]
#[should_panic(expected = "intended failure")]
fn failed_scenario_fails_its_test() {
    let options = harness::Options::default();
    run(harness::Kind::Keeper, options, "failing", |_| panic!("intended failure"));
}

#[test]
#[should_panic(expected = "no miracle within 20ms")]
fn wait_for_panics_after_its_timeout() {
    poll_until("miracle", Duration::from_millis(20), || None::<()>);
}
