//! A keeper whose limit of open files is lower than its number of clients: it serves as many as it
//! can, refuses or delays the others, and keeps running.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::harness::wire::{Client, Create, Hello, dial, read_session, send};
use crate::harness::{Kind, Options, Store, wait_for};

/// Housekeeping runs once a second; a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a keeper through `wrapper`, a shell line that contains `"$@"` and additional arguments.
fn keeper(wrapper: &str) -> Store {
    let wrapper = ["sh", "-c", wrapper, "sh"].map(str::to_owned).to_vec();
    Store::start(Kind::Keeper, Options { wrapper, ..Options::default() })
}

fn set_open_files(store: &Store, limit: usize) {
    let (pid, limit) = (format!("--pid={}", store.pid()), format!("--nofile={limit}:"));
    let done = Command::new("prlimit").args([pid, limit]).status().expect("prlimit");
    assert!(done.success(), "prlimit: {done}");
}

/// Returns the descriptors of the keeper's open files.
fn open_files(store: &Store) -> Vec<usize> {
    let dir = format!("/proc/{}/fd", store.pid());
    let numbers = std::fs::read_dir(dir).expect("a process").map(|entry| {
        let name = entry.expect("an entry").file_name();
        name.to_str().and_then(|name| name.parse().ok()).expect("a number")
    });
    numbers.collect()
}

fn has_snapshot(dir: &Path) -> bool {
    let mut entries = std::fs::read_dir(dir).expect("the data directory");
    entries.any(|entry| {
        let name = entry.expect("an entry").file_name();
        name.to_str().is_some_and(|name| name.starts_with("snapshot.0"))
    })
}

#[test]
fn limit_of_open_files_bounds_the_connections() {
    let allowed = |wrapper: &str| {
        let conf = keeper(wrapper).four_letters("conf").expect("an answer");
        let line = conf.lines().find_map(|line| line.strip_prefix("maxCnxns=").map(str::to_owned));
        line.expect("a limit")
    };
    assert_eq!(allowed("ulimit -n 40 && exec \"$@\""), "20");
    // Only the soft limit is low: it is raised.
    assert_eq!(allowed("ulimit -Sn 40 && ulimit -Hn 4096 && exec \"$@\""), "4032");
}

#[test]
fn keeper_without_a_free_descriptor_keeps_serving() {
    let store = keeper("exec \"$@\" --snapshot-every-bytes 20000");
    let mut first = Client::connect(store.addr());
    let leaves = Client::connect(store.addr());
    let open = open_files(&store);
    let limit = open.iter().max().expect("files") + 1;
    set_open_files(&store, limit);
    let _fill_the_gaps: Vec<Client> = (open.len()..limit).map(|_| Client::connect(store.addr())).collect();

    // No other connection can be accepted, and a due snapshot cannot create its segment.
    let mut late = dial(store.addr()).expect("the system accepts");
    send(&mut late, &Hello::default().frame()).expect("sent");
    for number in 0..5 {
        first.create(&format!("/big{number}"), &[7; 10_000], Create::Persistent);
    }
    wait_for("log line about the snapshot", TIMEOUT, || {
        store.log().contains("snapshot postponed").then_some(())
    });
    assert!(!has_snapshot(&store.data_dir()));
    assert_eq!(first.get("/big4").expect("served on").0.len(), 10_000);

    // A descriptor is free: the waiting connection is accepted without another connection attempt.
    drop(leaves);
    assert!(read_session(&mut late).expect("taken in").id > 0);

    set_open_files(&store, 1_000);
    for number in 5..10 {
        first.create(&format!("/big{number}"), &[7; 10_000], Create::Persistent);
    }
    wait_for("a snapshot", TIMEOUT, || has_snapshot(&store.data_dir()).then_some(()));
}
