//! Disks that report errors: the keeper stops at once, logs the reason, and has lost no
//! acknowledged write.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use crate::damage::{last_segment, used};
use crate::harness::wire::{Client, Create};
use crate::harness::{Kind, Options, Store, wait_for};
use crate::mounts::{Mount, data_dir};
use crate::{QUOTA_EXCEEDED, count_created, create_until_lost};

/// Makes one system call of the server fail, and no later one, so that a server that retries would
/// keep running.
fn failing(call: &str, error: &str, when: usize) -> Options {
    let inject = format!("inject={call}:error={error}:when={when}");
    // -D: the tracer is the grandchild, so that the harness's child process is the server.
    let line =
        ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject];
    Options { wrapper: line.map(str::to_owned).to_vec(), ..Options::default() }
}

fn check_that_it_stops_without_loss(call: &str, error: &str, reason: &str) {
    let mut store = Store::keeper();
    let mut acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 10, b"");
    for when in [5, 9, 20] {
        store.set_options(failing(call, error, when));
        store.restart();
        acknowledged = create_until_lost(&mut Client::connect(store.addr()), acknowledged, 1_000, b"");
        assert!(acknowledged < 1_000, "{call} number {when} failed unnoticed");
        let status = store.wait_exit(Duration::from_secs(10));
        assert!(status.code().is_some_and(|code| code != 0), "{call} number {when}: {status}");
        let printed = store.log();
        assert!(printed.contains(reason) && printed.contains("log."), "no reason given: {printed}");

        store.set_options(Options::default());
        store.restart();
        let there = count_created(&mut Client::connect(store.addr()));
        // The failed write was not acknowledged, so it may be present or not.
        assert!(
            (acknowledged..=acknowledged + 1).contains(&there),
            "{acknowledged} acknowledged, {there} present"
        );
        acknowledged = there;
    }
}

#[test]
fn failed_sync_stops_the_keeper() {
    check_that_it_stops_without_loss("fdatasync", "EIO", "Input/output error");
}

#[test]
fn failed_write_stops_the_keeper() {
    check_that_it_stops_without_loss("pwrite64", "EIO", "Input/output error");
}

#[test]
fn sync_without_space_stops_the_keeper() {
    check_that_it_stops_without_loss("fdatasync", "ENOSPC", "No space left on device");
}

/// Fills the rest of the file system with one file.
fn fill(mount: &Mount) -> std::path::PathBuf {
    let filler = mount.path().join("filler");
    let mut file = File::create(&filler).expect("a file");
    let full = std::io::copy(&mut std::io::repeat(b'x'), &mut file).expect_err("a full disk");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    filler
}

fn is_full(store: &Store) -> bool {
    store.four_letters("mntr").expect("an answer").contains("zk_disk_full\t1\n")
}

#[test]
fn keeper_serves_reads_on_a_full_disk() {
    let mount = Mount::tmpfs("64m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let data = vec![b'x'; 10_000];
    let before = create_until_lost(&mut Client::connect(store.addr()), 0, 20, &data);
    assert_eq!((before, is_full(&store)), (20, false));

    let filler = fill(&mount);
    let mut client = Client::connect(store.addr());
    let acknowledged = create_until_lost(&mut client, before, 2_000, &data);
    assert!(acknowledged < 2_000, "writes succeed although the disk is full");
    assert!(is_full(&store));
    assert!(
        store.log().contains("disk full") && store.log().contains("No space left on device"),
        "{}",
        store.log()
    );
    // Old and new clients read; changes of all kinds are refused.
    assert_eq!(client.get("/n0").map(|(read, _)| read), Ok(data.clone()));
    let mut late = Client::connect(store.addr());
    assert_eq!(count_created(&mut late), acknowledged);
    assert_eq!(late.set_if_version("/n0", b"", -1), Err(QUOTA_EXCEEDED));
    late.close();

    // It also starts and stops on the full disk, without a loss.
    store.restart();
    assert_eq!(count_created(&mut Client::connect(store.addr())), acknowledged);
    let status = store.sigterm();
    assert_eq!(status.code(), Some(0), "{}", store.log());
    store.restart();

    std::fs::remove_file(filler).expect("room again");
    let mut client = Client::connect(store.addr());
    wait_for("writes to be accepted again", Duration::from_secs(60), || (!is_full(&store)).then_some(()));
    assert_eq!(create_until_lost(&mut client, acknowledged, acknowledged + 10, &data), acknowledged + 10);
    store.restart();
    assert_eq!(count_created(&mut Client::connect(store.addr())), acknowledged + 10);
}

#[test]
fn snapshot_frees_a_disk_that_the_log_filled() {
    let mount = Mount::tmpfs("16m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let store = Store::start(Kind::Keeper, options);
    let mut client = Client::connect(store.addr());
    client.create("/n0", b"", Create::Persistent);
    // Repeated writes to one node give a long log and a small tree.
    let data = vec![b'x'; 100_000];
    let refused = (0..1_000).any(|_| client.set_if_version("/n0", &data, -1).is_err());
    if refused {
        wait_for("free space after a snapshot", Duration::from_secs(60), || (!is_full(&store)).then_some(()));
    }
    assert!(refused, "16 MB took 100 MB of log");
    assert!(client.set_if_version("/n0", b"y", -1).is_ok());
    assert_eq!(client.get("/n0").map(|(data, _)| data), Ok(b"y".to_vec()));
}

#[test]
fn full_disk_without_a_reserve_stops_the_keeper() {
    let mut mount = Mount::tmpfs("1m");
    let arguments = vec!["--disk-reserve-bytes".to_owned(), "0".to_owned()];
    let options = Options { data_dir: Some(data_dir(&mount)), arguments, ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let data = vec![b'x'; 10_000];
    let acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 1_000, &data);
    assert!((50..150).contains(&acknowledged), "{acknowledged} writes of 10 kB fit in 1 MB");
    let status = store.wait_exit(Duration::from_secs(60));
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
fn keeper_writes_a_snapshot_when_it_stops_on_a_full_disk() {
    let mount = Mount::tmpfs("4m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 20, b"");
    let filler = fill(&mount);

    let status = store.sigterm();
    assert_eq!(status.code(), Some(0), "{}", store.log());
    let left: Vec<_> = std::fs::read_dir(data_dir(&mount)).expect("the data").flatten().collect();
    let has = |start: &str| left.iter().any(|entry| entry.file_name().to_string_lossy().starts_with(start));
    assert!(has("snapshot.0"), "no snapshot: {left:?}\n{}", store.log());
    assert!(!left.iter().any(|entry| entry.path().extension().is_some_and(|end| end == "new")), "{left:?}");

    std::fs::remove_file(filler).expect("room again");
    store.restart();
    assert_eq!(count_created(&mut Client::connect(store.addr())), acknowledged);
}

/// Another process takes all disk space that the keeper frees, until a start has nothing left but
/// the segment that was allocated for it.
#[test]
fn keeper_starts_when_its_reserve_was_taken() {
    let mount = Mount::tmpfs("16m");
    let options = Options { data_dir: Some(data_dir(&mount)), ..Options::default() };
    let mut store = Store::start(Kind::Keeper, options);
    let acknowledged = create_until_lost(&mut Client::connect(store.addr()), 0, 20, b"");
    store.kill9();

    let dir = data_dir(&mount);
    let cut = |path: &Path, len: usize| {
        let file = File::options().write(true).open(path).expect("a file");
        file.set_len(len as u64).expect("a shorter file");
    };
    cut(&dir.join("reserve"), 0);
    // The last record may end in zeros, so the rest of its page stays.
    let segment = last_segment(&dir);
    cut(&segment, (used(&segment).len() + 64).next_multiple_of(4096));
    let filler = fill(&mount);

    store.restart();
    assert!(is_full(&store));
    let mut client = Client::connect(store.addr());
    assert_eq!(count_created(&mut client), acknowledged);
    assert_eq!(client.set_if_version("/n0", b"", -1), Err(QUOTA_EXCEEDED));
    client.close();

    std::fs::remove_file(filler).expect("room again");
    wait_for("writes to be accepted again", Duration::from_secs(60), || (!is_full(&store)).then_some(()));
    let mut client = Client::connect(store.addr());
    assert_eq!(create_until_lost(&mut client, acknowledged, acknowledged + 10, b""), acknowledged + 10);
    store.restart();
    assert_eq!(count_created(&mut Client::connect(store.addr())), acknowledged + 10);
}
