//! Disks that report errors: the keeper stops at once, says why, and has lost nothing that it acknowledged.

use std::time::Duration;

use crate::harness::wire::Client;
use crate::harness::{Kind, Options, Store};
use crate::mounts::{Mount, data_dir};
use crate::{count_created, create_until_lost};

/// Makes one system call of the server fail, and no later one: a server that tried again would go on.
fn failing(call: &str, error: &str, when: usize) -> Options {
    let inject = format!("inject={call}:error={error}:when={when}");
    // -D: the tracer is the grandchild, so the process that the harness knows is the server.
    let line =
        ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
    Options { wrapper: line.map(str::to_owned).to_vec(), ..Options::default() }
}

fn stops_and_loses_nothing(call: &str, error: &str, reason: &str) {
    let mut store = Store::keeper();
    let mut acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 10, b"");
    for when in [5, 9, 20] {
        store.set_options(failing(call, error, when));
        store.restart();
        acknowledged = create_until_lost(&mut Client::connect(store.addr()), acknowledged, 1_000, b"");
        assert!(acknowledged < 1_000, "{call} number {when} failed and nobody noticed");
        let status = store.wait_exit(Duration::from_secs(10));
        assert!(status.code().is_some_and(|code| code != 0), "{call} number {when}: {status}");
        let said = store.log();
        assert!(said.contains(reason) && said.contains("log."), "no reason given: {said}");

        store.set_options(Options::default());
        store.restart();
        let there = count_created(&mut Client::connect(store.addr()));
        // The write that failed was not acknowledged: it may be there or not.
        assert!(
            (acknowledged..=acknowledged + 1).contains(&there),
            "{acknowledged} acknowledged, {there} there"
        );
        acknowledged = there;
    }
}

#[test]
fn a_failed_sync_stops_the_keeper() {
    stops_and_loses_nothing("fdatasync", "EIO", "Input/output error");
}

#[test]
fn a_failed_write_stops_the_keeper() {
    stops_and_loses_nothing("pwrite64", "EIO", "Input/output error");
}

#[test]
fn no_space_for_a_sync_stops_the_keeper() {
    stops_and_loses_nothing("fdatasync", "ENOSPC", "No space left on device");
}

#[test]
fn a_full_disk_stops_the_keeper() {
    let mut mount = Mount::tmpfs("1m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let data = vec![b'x'; 10_000];
    let acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 1_000, &data);
    assert!((50..150).contains(&acknowledged), "{acknowledged} writes of 10 kB fit in 1 MB");
    let status = store.wait_exit(Duration::from_secs(10));
    assert!(status.code().is_some_and(|code| code != 0), "{status}");
    assert!(store.log().contains("No space left on device"), "no reason given: {}", store.log());

    let status = store.restart_refused();
    assert!(status.code().is_some_and(|code| code != 0), "starts on a full disk: {status}");
    assert!(store.log().contains("No space left on device"), "no reason given: {}", store.log());

    mount.resize("16m");
    store.restart();
    let there = count_created(&mut Client::connect(store.addr()));
    assert!((acknowledged..=acknowledged + 1).contains(&there), "{acknowledged} acknowledged, {there} there");
}

#[test]
fn a_stop_on_a_full_disk_loses_nothing_and_says_that_there_is_no_snapshot() {
    let mount = Mount::tmpfs("4m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 20, b"");
    let filler = mount.path().join("filler");
    let mut file = std::fs::File::create(&filler).expect("a file");
    let full = std::io::copy(&mut std::io::repeat(b'x'), &mut file).expect_err("a full disk");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);

    let status = store.sigterm();
    assert_eq!(status.code(), Some(0), "{}", store.log());
    let said = store.log();
    assert!(said.contains("snapshot put off") && said.contains("No space left"), "not told: {said}");
    let left: Vec<_> = std::fs::read_dir(data_dir(&mount)).expect("the data").flatten().collect();
    assert!(!left.iter().any(|entry| entry.path().extension().is_some_and(|end| end == "new")), "{left:?}");

    drop(file);
    std::fs::remove_file(filler).expect("room again");
    store.restart();
    assert_eq!(count_created(&mut Client::connect(store.addr())), acknowledged);
}
