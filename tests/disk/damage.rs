//! Every truncation and every flipped bit of the last log segment of a real server. Recovery runs
//! in process, about ten thousand times.

use std::path::{Path, PathBuf};

use portcullis::keeper::state::TreeLimits;
use portcullis::keeper::storage::recover;

use crate::harness::Store;
use crate::harness::wire::{Client, Create, Hello, Put, op};

const NODES: usize = 12;

/// Returns the directory of a killed server with sessions, nodes, changes and deletions, each in
/// its own commit.
fn written_by_a_server() -> (tempfile::TempDir, PathBuf) {
    let mut store = Store::keeper();
    let mut client = Client::connect(store.addr());
    for number in 0..NODES {
        client.create(&format!("/n{number}"), b"some data", Create::Persistent);
    }
    client.set_if_version("/n0", b"changed", 0).expect("a change");
    client.create("/gone", b"", Create::Ephemeral);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes("/gone").int(-1)).err, 0);
    drop(Client::try_connect(store.addr(), &Hello::again(&client.session)).expect("the session"));
    store.kill9();

    // In memory, because each of the thousands of recoveries syncs.
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    for entry in std::fs::read_dir(store.data_dir()).expect("the data directory") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("a copy");
    }
    let segment = last_segment(dir.path());
    (dir, segment)
}

/// Returns the log segment with the highest number.
pub(crate) fn last_segment(dir: &Path) -> PathBuf {
    let entries = std::fs::read_dir(dir).expect("the data directory");
    let segments = entries.map(|entry| entry.expect("an entry").path()).filter(|path| {
        let number =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("log."));
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    segments.max().expect("a log segment")
}

/// Returns the number of recovered nodes, or `None` if recovery fails; its error must name the file
/// and the offset.
fn recovered(dir: &Path, segment: &Path) -> Option<usize> {
    match recover(dir, TreeLimits::default(), 0) {
        Ok(recovered) => {
            let there = |number: &usize| recovered.state.tree.get(&format!("/n{number}")).is_some();
            let count = (0..NODES).take_while(there).count();
            assert!(!(count..NODES).any(|number| there(&number)), "a hole after /n{count}");
            Some(count)
        }
        Err(refusal) => {
            let text = refusal.to_string();
            assert!(text.contains(&segment.display().to_string()), "no file named: {text}");
            assert!(text.contains("at byte "), "no offset named: {text}");
            None
        }
    }
}

/// Returns the segment without the reserved zeros at its end.
pub(crate) fn used(segment: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(segment).expect("the segment");
    let end = bytes.iter().rposition(|byte| *byte != 0).expect("a segment that is not empty") + 1;
    bytes.truncate(end);
    bytes
}

#[test]
fn every_truncation_of_the_last_segment_recovers_a_prefix() {
    let (dir, segment) = written_by_a_server();
    let bytes = used(&segment);
    let mut last = 0;
    for length in 0..=bytes.len() {
        std::fs::write(&segment, &bytes[..length]).expect("a cut copy");
        match recovered(dir.path(), &segment) {
            Some(count) => {
                assert!(count >= last, "{length} bytes recover less than {} bytes", length - 1);
                last = count;
            }
            None => assert!(length < 44, "refused at {length} bytes, behind the header"),
        }
    }
    assert_eq!(last, NODES, "the whole segment recovers all nodes");
}

#[test]
fn every_flipped_bit_of_the_last_segment_is_detected() {
    let (dir, segment) = written_by_a_server();
    let bytes = used(&segment);
    let (mut refused, mut shortened) = (0, 0);
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&segment, &changed).expect("a changed copy");
        match recovered(dir.path(), &segment) {
            None => refused += 1,
            Some(count) => {
                // Only the last record can be mistaken for an incomplete one.
                assert_eq!(count, NODES, "bit {bit} silently cost /n{count}");
                shortened += 1;
            }
        }
    }
    assert!(refused > shortened, "{refused} refused, {shortened} shortened");
}
