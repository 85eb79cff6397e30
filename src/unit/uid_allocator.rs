//! Allocates a UID for each unit that has one of its own. UIDs belong to the whole host, which
//! several environments may share: so all allocations are recorded in one file, and a UID is never
//! reused, not even after its unit was removed, because files may be left anywhere. There are more
//! UIDs than there will be units.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::runtime::{atomic_file, trusted_path};

/// The most ranges in the file. UIDs that were allocated in sequence are one range, so this is far
/// more than needed.
const MAX_BYTES: u64 = 1024 * 1024;

/// Locked by the thread that allocates. Units of this process queue here, and [`LOCK_TIMEOUT`]
/// limits only the wait for other processes: hundreds of units may start at once, and each
/// allocation syncs a file.
static TURN: Mutex<()> = Mutex::new(());

/// How long to wait for the lock; a holder only writes a line.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The file with a unit's UID, beside its runs.
pub(super) const OWN: &str = "user";

/// Higher UIDs have special meanings.
const END: u32 = u32::MAX - 1;

/// A range of allocated UIDs: the first, and the first after it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct AllocatedUids(BTreeMap<u32, u32>);

impl AllocatedUids {
    /// Returns the first free UID from there on. Ranges with different starts may meet.
    fn next(&self, first: u32) -> Option<u32> {
        let mut user = first;
        while let Some(end) = self.0.range(..=user).map(|(_, end)| *end).find(|end| user < *end) {
            user = end;
        }
        (user < END).then_some(user)
    }

    fn has(&self, user: u32) -> bool {
        self.next(user) != Some(user)
    }

    /// Adds a UID, counted from `first`, and all UIDs in between. Adjacent ranges are joined.
    fn with(mut self, first: u32, user: u32) -> Self {
        let end = self.0.entry(first).or_insert(first);
        *end = (*end).max(user + 1);
        let mut joined: Vec<(u32, u32)> = Vec::new();
        for (from, end) in self.0 {
            match joined.last_mut() {
                Some((_, last)) if from <= *last => *last = (*last).max(end),
                _ => joined.push((from, end)),
            }
        }
        Self(joined.into_iter().collect())
    }

    fn parse(bytes: &[u8]) -> io::Result<Self> {
        let map: BTreeMap<u32, u32> = serde_json::from_slice(bytes)?;
        Ok(Self(map))
    }
}

/// Allocates a UID that was never used, counted from `first`; or records `had`, a UID that an older
/// version derived without a list.
///
/// A lost list is created again from the UIDs in the directories of units: `own` and those beside
/// it.
///
/// # Errors
/// Errors of the file system. If the list is invalid, no UID is allocated, because it could be one
/// in use.
pub(super) fn take(list: &Path, first: u32, had: Option<u32>, own: &Path) -> io::Result<u32> {
    let explained = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot allocate a UID from {}: {error}", list.display()))
    };
    take_from(list, first, had, own).map_err(explained)
}

fn take_from(list: &Path, first: u32, had: Option<u32>, own: &Path) -> io::Result<u32> {
    let untrusted = |error: trusted_path::Error| io::Error::other(error.with_repair());
    if let Some(above) = list.parent().filter(|above| !above.exists()) {
        trusted_path::ensure_directory(above, 0o711).map_err(untrusted)?;
        // The umask may have removed permissions, and units have their files in this directory.
        fs::set_permissions(above, Permissions::from_mode(0o711))?;
    }
    // A user who can change the list could make the agent give one UID to two units.
    trusted_path::check(list).map_err(untrusted)?;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _lock = lock(&list.with_extension("lock"))?;
    let mut bytes = Vec::new();
    let allocated = match File::open(list) {
        Ok(file) => {
            file.take(MAX_BYTES).read_to_end(&mut bytes)?;
            AllocatedUids::parse(&bytes)?
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let beside = [list.parent(), own.parent()].into_iter().flatten().flat_map(children);
            let known = beside.chain([own.to_owned()]).flat_map(|place| known_in(&place));
            known.fold(AllocatedUids::default(), |allocated, user| allocated.with(user, user))
        }
        Err(error) => return Err(error),
    };
    if let Some(had) = had
        && allocated.has(had)
    {
        return Ok(had);
    }
    let next = || allocated.next(first).ok_or_else(|| io::Error::other("there are no more"));
    let user = had.map_or_else(next, Ok)?;
    let allocated = allocated.clone().with(first, user);
    atomic_file::replace_exclusively(list, &serde_json::to_vec(&allocated.0)?)?;
    Ok(user)
}

/// Returns the UIDs of units that have their files in a directory, or in a subdirectory if it is
/// shared.
fn known_in(place: &Path) -> Vec<u32> {
    let within = children(place).into_iter().chain([place.to_owned()]);
    let runs = within.flat_map(|place| children(&place.join("runs")));
    let user = |runs: PathBuf| {
        let path = runs.join(OWN);
        parse_own(&fs::read_to_string(&path).ok()?, &path).ok()
    };
    runs.filter_map(user).collect()
}

/// The user in a unit's file. Root is never taken from a file: only `--hook-user` makes hooks run
/// as root.
///
/// # Errors
/// If the file names no user, or a user that no unit can have.
pub(super) fn parse_own(text: &str, path: &Path) -> io::Result<u32> {
    let refused = |why: &str| io::Error::other(format!("{} {why}", path.display()));
    match text.trim().parse() {
        Ok(0) => Err(refused("names root, and hooks run as root only by --hook-user; remove the file")),
        Ok(user) if user < END => Ok(user),
        _ => Err(refused("does not name a user")),
    }
}

fn children(place: &Path) -> Vec<PathBuf> {
    fs::read_dir(place).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path()).collect()
}

fn lock(path: &Path) -> io::Result<File> {
    // Not readable by others: a process that can open the file can lock it.
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => sleep(POLL_INTERVAL),
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::TimedOut.into()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_uid_is_assigned_twice() {
        let home = tempfile::tempdir().unwrap();
        let list = home.path().join("units/users.json");
        let mut seen = BTreeSet::new();
        // Ranges that meet.
        for first in [100, 103, 100, 102, 100, 100, 103, 101, 100, 500, 100] {
            let user = take(&list, first, None, Path::new("/nonexistent")).unwrap();
            assert!(user >= first && seen.insert(user), "{user} from {first}: {seen:?}");
        }
        // Also for concurrent callers.
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let list = list.clone();
                std::thread::spawn(move || {
                    (0..20)
                        .map(|_| take(&list, 100, None, Path::new("/nonexistent")).unwrap())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for caller in callers {
            for user in caller.join().unwrap() {
                assert!(seen.insert(user), "{user} twice");
            }
        }
        assert_eq!(
            take(&list, END, None, Path::new("/nonexistent")).unwrap_err().kind(),
            io::ErrorKind::Other
        );
    }

    #[test]
    fn existing_units_keep_their_uids() {
        let home = tempfile::tempdir().unwrap();
        let list = home.path().join("users.json");
        assert_eq!(take(&list, 100, Some(104), Path::new("/nonexistent")).unwrap(), 104);
        assert_eq!(take(&list, 100, Some(104), Path::new("/nonexistent")).unwrap(), 104);
        assert_eq!(take(&list, 100, Some(102), Path::new("/nonexistent")).unwrap(), 102);
        assert_eq!(
            take(&list, 100, None, Path::new("/nonexistent")).unwrap(),
            105,
            "those before 104 may be somebody's"
        );
        assert_eq!(take(&list, 90, None, Path::new("/nonexistent")).unwrap(), 90);
        let above = fs::metadata(home.path().join("deeper").parent().unwrap()).unwrap();
        let list = home.path().join("deeper/users.json");
        take(&list, 100, None, Path::new("/nonexistent")).unwrap();
        let open = fs::metadata(list.parent().unwrap()).unwrap().permissions().mode() & 0o777;
        assert_eq!(open, 0o711, "units have to get to their files");
        assert_eq!(fs::metadata(home.path()).unwrap().permissions(), above.permissions(), "as it was");
    }

    #[test]
    fn an_invalid_list_assigns_no_uid() {
        let home = tempfile::tempdir().unwrap();
        let list = home.path().join("users.json");
        for garbage in ["", "[]", "{\"100\": \"x\"}", "{\"a\": 5}"] {
            fs::write(&list, garbage).unwrap();
            let refused = take(&list, 100, None, Path::new("/nonexistent")).unwrap_err().to_string();
            assert!(
                refused.starts_with("cannot allocate a UID from /") && refused.contains("users.json"),
                "{refused}"
            );
            assert_eq!(fs::read_to_string(&list).unwrap(), garbage, "left for somebody to look at");
        }
    }

    #[test]
    fn root_is_never_taken_from_a_file() {
        let path = Path::new("/runs/unit-0000000000/user");
        assert_eq!(parse_own("1879048192\n", path).unwrap(), 1_879_048_192);
        for (text, why) in
            [("0", "names root"), (" 0\n", "names root"), ("000", "names root"), ("+0", "names root")]
        {
            let refused = parse_own(text, path).unwrap_err().to_string();
            assert!(refused.starts_with("/runs/unit-0000000000/user ") && refused.contains(why), "{refused}");
        }
        for text in ["", "root", "-1", "4294967295", "4294967294", "4294967296"] {
            assert!(parse_own(text, path).is_err(), "{text}");
        }
    }

    #[test]
    fn a_list_that_others_can_write_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let list = home.path().join("units/users.json");
        let own = Path::new("/nonexistent");
        assert_eq!(take(&list, 100, None, own).unwrap(), 100);
        for (place, safe, open) in [(list.as_path(), 0o600, 0o666), (list.parent().unwrap(), 0o711, 0o777)] {
            fs::set_permissions(place, Permissions::from_mode(open)).unwrap();
            let refused = take(&list, 100, None, own).unwrap_err().to_string();
            assert!(refused.contains(&format!("chmod go-w {}", place.display())), "{refused}");
            fs::set_permissions(place, Permissions::from_mode(safe)).unwrap();
        }
        assert_eq!(take(&list, 100, None, own).unwrap(), 101, "the control");
    }

    #[test]
    fn a_lost_list_is_rebuilt_from_existing_units() {
        let home = tempfile::tempdir().unwrap();
        let (list, own) = (home.path().join("units/users.json"), home.path().join("others/own"));
        for (place, user) in [
            ("units/prod-0/runs/unit-1", 104),
            ("units/prod-0/of-1/runs/unit-1", 100),
            ("others/own/runs/unit-7", 102),
            ("others/else/runs/unit-7", 103),
        ] {
            fs::create_dir_all(home.path().join(place)).unwrap();
            fs::write(home.path().join(place).join(OWN), user.to_string()).unwrap();
        }
        let allocated: Vec<u32> = (0..4).map(|_| take(&list, 100, None, &own).unwrap()).collect();
        assert_eq!(allocated, [101, 105, 106, 107]);
        assert_eq!(fs::read_to_string(&list).unwrap(), r#"{"100":108}"#);
    }
}
