//! Recovery of a data directory after crashes, damage and lost files.

use std::collections::BTreeSet;

use super::*;
use crate::keeper::acl::{ALL, Acl, Identity, IdentitySet};
use crate::keeper::proto::{CreateMode, Op};
use crate::keeper::state::Caller;

const CALLER: Caller<'static> = Caller { session: 1, proved: &IdentitySet::NONE };

fn open(dir: &Path) -> Result<(Storage, State), StorageError> {
    Storage::open(dir, TreeLimits::default(), 1, 0)
}

fn create(storage: &mut Storage, state: &mut State, path: &str) {
    let acl = vec![Acl { perms: ALL, identity: Identity::new("world", "anyone") }];
    let op = Op::Create {
        path,
        data: Some(path.as_bytes()),
        acl,
        mode: CreateMode::Persistent,
        sequential: false,
        wants_stat: false,
    };
    let written = state.write(CALLER, &[op], 7).unwrap();
    storage.append(state.zxid(), 7, &Txn::Changes(written.changes));
}

fn names(state: &State) -> Vec<String> {
    state.tree.get("/").unwrap().children().filter(|name| *name != "zookeeper").map(str::to_owned).collect()
}

/// Returns a directory whose log has one commit for each of `count` nodes `n0`, `n1`, ...
fn filled(count: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    for n in 0..count {
        create(&mut storage, &mut state, &format!("/n{n}"));
        storage.commit().unwrap();
    }
    dir
}

/// Returns the end of a segment's valid frames.
fn end_of(path: &Path, number: u64) -> usize {
    StoredSegment::read(path, number).unwrap().replay(true, |_| Ok(())).unwrap().tail.end as usize
}

fn is_prefix(names: &[String]) -> bool {
    names.iter().enumerate().all(|(n, name)| *name == format!("n{n}"))
}

#[test]
fn committed_state_is_recovered_with_a_new_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    create(&mut storage, &mut state, "/kept");
    let txn = state.open_session(42, 6_000, [7; 16], 0);
    storage.append(state.zxid(), 7, &txn);
    storage.commit().unwrap();
    create(&mut storage, &mut state, "/lost");
    drop(storage);

    let (_storage, again) = open(dir.path()).unwrap();
    assert_eq!(names(&again), ["kept"]);
    assert_eq!(again.tree.get("/kept").unwrap().ctime, 7);
    assert_eq!(again.sessions.get(42).map(|session| session.password), Some([7; 16]));
    assert!(again.zxid() >> 32 > state.zxid() >> 32, "every zxid seen before is below the new epoch");
}

#[test]
fn data_directory_is_locked_by_one_keeper() {
    let dir = tempfile::tempdir().unwrap();
    let held = open(dir.path()).unwrap();
    assert!(matches!(open(dir.path()), Err(StorageError::InUse { .. })));
    drop(held);
    open(dir.path()).unwrap();
}

#[test]
fn two_snapshots_and_their_log_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    for n in 0..5 {
        create(&mut storage, &mut state, &format!("/n{n}"));
        storage.snapshot(&state).unwrap();
        storage.wait_for_snapshot();
    }
    create(&mut storage, &mut state, "/n5");
    storage.commit().unwrap();
    drop(storage);
    assert_eq!(numbered(dir.path(), "snapshot.").unwrap(), [5, 6]);
    assert_eq!(numbered(dir.path(), "log.").unwrap(), [5, 6]);

    // The newest snapshot is damaged: the older one and the log since give the same state.
    let newest = snapshot_path(dir.path(), 6);
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    let (_storage, again) = open(dir.path()).unwrap();
    assert_eq!(names(&again).len(), 6);
    assert_eq!(again.tree.get("/n5").unwrap().czxid, state.tree.get("/n5").unwrap().czxid);
}

#[test]
fn failed_snapshot_is_not_retried_until_the_log_has_grown() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    // A directory with the temporary name of a snapshot makes the snapshot fail.
    std::fs::create_dir(dir.path().join("snapshot.new")).unwrap();
    create(&mut storage, &mut state, "/n0");
    storage.commit().unwrap();
    assert!(storage.snapshot_is_due(10));
    storage.snapshot(&state).unwrap();
    assert!(!storage.snapshot_is_due(200), "no log was written since the attempt");
    create(&mut storage, &mut state, &format!("/{}", "n".repeat(300)));
    storage.commit().unwrap();
    assert!(storage.snapshot_is_due(200));
    std::fs::remove_dir(dir.path().join("snapshot.new")).unwrap();
    storage.snapshot(&state).unwrap();
    storage.wait_for_snapshot();
    drop(storage);
    assert_eq!(names(&open(dir.path()).unwrap().1).len(), 2);
}

#[test]
fn incomplete_snapshot_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let temp_path = snapshot::draft_path(dir.path());
    std::fs::write(&temp_path, b"left by a crash").unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    assert!(!temp_path.exists());
    create(&mut storage, &mut state, "/n0");
    // A directory with the final name of the snapshot makes publishing fail.
    std::fs::create_dir(snapshot_path(dir.path(), 2)).unwrap();
    storage.snapshot(&state).unwrap();
    storage.wait_for_snapshot();
    assert!(!temp_path.exists());
}

#[test]
fn large_tree_gets_no_snapshot_for_a_small_log() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    create(&mut storage, &mut state, &format!("/{}", "n".repeat(5_000)));
    storage.snapshot(&state).unwrap();
    storage.wait_for_snapshot();
    let size = std::fs::metadata(snapshot_path(dir.path(), 2)).unwrap().len();
    drop(storage);
    // The size of the snapshot is read again at the start.
    let (mut storage, mut state) = open(dir.path()).unwrap();
    let mut made = 0;
    while !storage.snapshot_is_due(10) {
        create(&mut storage, &mut state, &format!("/{made}-{}", "m".repeat(1_000)));
        storage.commit().unwrap();
        made += 1;
    }
    let log = storage.bytes_since_snapshot();
    assert!(log > 2 * size && log < 3 * size, "{log} bytes of log, {size} of snapshot");
}

#[test]
fn error_names_the_newest_snapshot_if_all_are_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    for n in 0..3 {
        create(&mut storage, &mut state, &format!("/n{n}"));
        storage.snapshot(&state).unwrap();
        storage.wait_for_snapshot();
    }
    drop(storage);
    for number in [3, 4] {
        std::fs::write(snapshot_path(dir.path(), number), b"garbage").unwrap();
    }
    let err = open(dir.path()).unwrap_err();
    assert!(err.to_string().contains("snapshot.0000000004 is damaged"), "{err}");
}

#[test]
fn error_names_a_missing_segment() {
    let dir = filled(3);
    drop(open(dir.path()).unwrap());
    drop(open(dir.path()).unwrap());
    std::fs::remove_file(segment_path(dir.path(), 2)).unwrap();
    let err = open(dir.path()).unwrap_err();
    assert!(err.to_string().contains("log.0000000002 is missing"), "{err}");
}

#[test]
fn every_truncation_recovers_to_a_prefix() {
    let dir = filled(6);
    let path = segment_path(dir.path(), 1);
    let end = end_of(&path, 1);
    let whole = std::fs::read(&path).unwrap();
    let mut seen = BTreeSet::new();
    for len in 0..=end {
        std::fs::write(&path, &whole[..len]).unwrap();
        match recover(dir.path(), TreeLimits::default(), 0) {
            Ok(recovered) => {
                let names = names(&recovered.state);
                assert!(is_prefix(&names), "cut at {len}: {names:?}");
                seen.insert(names.len());
            }
            Err(err) => assert!(err.to_string().contains("log.0000000001 is damaged at byte 0"), "{err}"),
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn every_bit_flip_recovers_to_a_prefix_or_is_reported_with_its_offset() {
    let dir = filled(6);
    let path = segment_path(dir.path(), 1);
    let end = end_of(&path, 1);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(end + 40);
    let (mut recovered, mut refused) = (0, 0);
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, &bytes).unwrap();
        match recover(dir.path(), TreeLimits::default(), 0) {
            Ok(found) => {
                recovered += 1;
                let names = names(&found.state);
                assert!(is_prefix(&names) && names.len() >= 5, "bit {bit}: {names:?}");
            }
            Err(err) => {
                refused += 1;
                assert!(err.to_string().contains("log.0000000001 is damaged at byte"), "bit {bit}: {err}");
            }
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(recovered > 0 && refused > recovered, "{recovered} recovered, {refused} refused");
}

#[test]
fn damage_in_an_earlier_segment_is_refused() {
    let dir = filled(2);
    drop(open(dir.path()).unwrap());
    let path = segment_path(dir.path(), 1);
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let err = open(dir.path()).unwrap_err();
    assert!(err.to_string().contains("but it is not the last segment"), "{err}");
}

/// Returns the offsets of a segment's frames.
fn frames(path: &Path, number: u64) -> BTreeSet<usize> {
    let mut starts = BTreeSet::new();
    let segment = StoredSegment::read(path, number).unwrap();
    let each = |record: log::Record<'_>| {
        starts.insert(record.offset as usize);
        Ok(())
    };
    segment.replay(true, each).unwrap();
    starts
}

#[test]
fn lost_records_at_the_end_of_an_earlier_segment_are_reported_with_their_offset() {
    let dir = filled(4);
    drop(open(dir.path()).unwrap());
    let path = segment_path(dir.path(), 1);
    let whole = std::fs::read(&path).unwrap();
    let starts = frames(&path, 1);
    assert_eq!(starts.len(), 5, "an epoch and four nodes");
    for start in starts {
        // Cut off, and overwritten with zeros.
        for len in [start, whole.len()] {
            let mut bytes = whole[..start].to_vec();
            bytes.resize(len, 0);
            std::fs::write(&path, bytes).unwrap();
            let err = open(dir.path()).unwrap_err().to_string();
            assert!(
                err.contains(&format!("log.0000000001 is damaged at byte {start}: its records end here")),
                "{err}"
            );
        }
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(names(&open(dir.path()).unwrap().1).len(), 4);
}

#[test]
fn an_earlier_segment_of_another_directory_is_refused() {
    let (dir, other) = (filled(4), filled(4));
    drop(open(dir.path()).unwrap());
    std::fs::copy(segment_path(other.path(), 1), segment_path(dir.path(), 1)).unwrap();
    let err = open(dir.path()).unwrap_err().to_string();
    assert!(err.contains("log.0000000001 is damaged at byte 0: not the segment that precedes"), "{err}");
}

#[test]
fn crash_before_the_old_segment_is_cut_loses_no_record() {
    let dir = filled(3);
    drop(open(dir.path()).unwrap());
    // As before `finish`: with the reserved zeros.
    let path = segment_path(dir.path(), 1);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(names(&open(dir.path()).unwrap().1).len(), 3);
}

#[test]
fn snapshot_without_its_segment_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (mut storage, mut state) = open(dir.path()).unwrap();
    create(&mut storage, &mut state, "/n0");
    storage.snapshot(&state).unwrap();
    storage.wait_for_snapshot();
    create(&mut storage, &mut state, "/n1");
    storage.commit().unwrap();
    drop(storage);
    std::fs::remove_file(segment_path(dir.path(), 2)).unwrap();
    let err = open(dir.path()).unwrap_err().to_string();
    assert!(err.contains("log.0000000002 is missing"), "{err}");
}

/// Converts a segment to the first version of the format.
fn first_format(bytes: &[u8], frames: &BTreeSet<usize>) -> Vec<u8> {
    let mut old = b"PCLOG\0\0\x01".to_vec();
    old.extend_from_slice(&bytes[8..24]);
    old.extend_from_slice(&crc32c::crc32c(&old).to_be_bytes());
    let salt = u64::from_be_bytes(bytes[16..24].try_into().unwrap());
    for start in frames {
        let (header, rest) = bytes[*start..].split_at(log::FRAME_HEADER_LEN);
        let payload = &rest[..u32::from_be_bytes(header[4..8].try_into().unwrap()) as usize];
        old.extend_from_slice(&log::frame_header(salt, old.len() as u64, payload));
        old.extend_from_slice(payload);
    }
    old
}

#[test]
fn segments_of_the_first_format_are_read_and_checked_from_the_next_start() {
    let dir = filled(3);
    let path = segment_path(dir.path(), 1);
    let old = first_format(&std::fs::read(&path).unwrap(), &frames(&path, 1));
    std::fs::write(&path, &old).unwrap();
    assert_eq!(names(&open(dir.path()).unwrap().1).len(), 3);
    let last = *frames(&path, 1).last().unwrap();
    std::fs::write(&path, &old[..last]).unwrap();
    let err = open(dir.path()).unwrap_err().to_string();
    assert!(err.contains(&format!("log.0000000001 is damaged at byte {last}: its records end")), "{err}");
}

#[test]
fn stored_data_is_not_mistaken_for_a_record() {
    // The bytes of a valid segment of another directory, as stored data after a torn record.
    let other = filled(3);
    let decoy = std::fs::read(segment_path(other.path(), 1)).unwrap();
    let dir = filled(1);
    let path = segment_path(dir.path(), 1);
    let end = end_of(&path, 1);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(end);
    bytes.extend_from_slice(&decoy);
    std::fs::write(&path, bytes).unwrap();
    let recovered = recover(dir.path(), TreeLimits::default(), 0).unwrap();
    assert_eq!(names(&recovered.state), ["n0"]);
}

#[test]
fn files_are_readable_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("new/data");
    let (mut storage, mut state) = open(&dir).unwrap();
    create(&mut storage, &mut state, "/secret");
    storage.snapshot(&state).unwrap();
    storage.wait_for_snapshot();
    assert_eq!(mode(&dir), 0o700);
    let files: Vec<PathBuf> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 6, "expected a lock, a reserve, two segments, a spare and a snapshot: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}
