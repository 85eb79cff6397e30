//! A control group for a unit's hooks and all of their descendants, where the kernel allows one: a
//! process cannot leave it by changing its environment or its parent. The groups of a unit are
//! recorded beside its runs, because a restarted agent may be in another part of the hierarchy. No
//! decisions are made here.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::limits::HookLimits;
use super::tree_walk::remove_groups;
use crate::model::digest_prefix;
pub(super) use limits::Enforced;

mod limits;

/// The file that lists a unit's groups.
const FILE: &str = "cgroups";

/// The largest number of groups of a unit: one for each part of the hierarchy that its agent was
/// in.
const MAX_GROUPS: usize = 64;
const MAX_NOTE_BYTES: u64 = 256 * 1024;

/// Attempts to find an unused name. A second attempt is already very unlikely.
const MAX_NAMES: usize = 3;

/// A group: its path as the kernel shows it for a process, and its directory. Both end in the same
/// unique name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    name: String,
    directory: PathBuf,
}

/// The parent group of the units' groups.
#[derive(Debug)]
pub(super) struct Base {
    group: Group,
    /// Whether the agent is not in this group, or the group is the kernel's root: only then can it
    /// enable controllers for its children.
    can_enable: bool,
}

/// The subgroup that a service manager may start the agent in (`DelegateSubgroup=`). The groups of
/// units are beside it.
const AGENT: &str = "/portcullis-agent";

/// Moves this process, and thereby its later children, into the group of the unit whose runs are in
/// `runs`, and limits that group.
///
/// # Errors
/// If there are no control groups of the second kind here, or none that we may change.
pub(super) fn join(runs: &Path, limits: HookLimits) -> io::Result<Enforced> {
    let known = noted(runs);
    let base = here();
    let own = match &base {
        Ok(base) => join_below(&base.group, &known, runs),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    };
    let group = own.or_else(|error| {
        // A group that an earlier agent created elsewhere is better than none.
        known.iter().find(|group| group.enter().is_ok()).cloned().ok_or(error)
    })?;
    Ok(group.limit(limits, base.as_ref().ok()))
}

fn join_below(here: &Group, known: &BTreeSet<Group>, runs: &Path) -> io::Result<Group> {
    let near = known.iter().filter(|group| group.directory.parent() == Some(&here.directory));
    for group in near {
        // A group that was removed while empty can be created again: its name still belongs to this
        // unit.
        let made = || fs::create_dir(&group.directory).and_then(|()| group.enter());
        if group.enter().or_else(|_| made()).is_ok() {
            return Ok(group.clone());
        }
    }
    if known.len() >= MAX_GROUPS {
        return Err(io::Error::other("the unit has too many control groups"));
    }
    let made = make(here, runs)?;
    made.enter()?;
    Ok(made)
}

/// Creates a new group. A group that exists already belongs to somebody else, whatever its name.
fn make(here: &Group, runs: &Path) -> io::Result<Group> {
    for _ in 0..MAX_NAMES {
        let group = Group::below(here, runs, getrandom::u64().map_err(io::Error::other)?);
        if group.directory.exists() {
            continue;
        }
        // Recorded before it is created, so that a kill in between leaves no unrecorded group.
        let before = note(&group, runs)?;
        match fs::create_dir(&group.directory) {
            Ok(()) => return Ok(group),
            Err(error) => {
                OpenOptions::new().write(true).open(runs.join(FILE))?.set_len(before)?;
                if error.kind() != io::ErrorKind::AlreadyExists {
                    return Err(error);
                }
            }
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Returns the previous length of the file.
fn note(group: &Group, runs: &Path) -> io::Result<u64> {
    let mut file = OpenOptions::new().create(true).append(true).open(runs.join(FILE))?;
    let length = file.metadata()?.len();
    // The previous write may have ended in the middle of a line.
    let before = read_note(runs);
    let fresh = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    // One write, so that the line is either complete or invalid.
    file.write_all(format!("{fresh}{}\t{}\n", group.name, group.directory.display()).as_bytes())?;
    Ok(length)
}

/// Returns all groups that the unit's hooks were in.
pub(super) fn noted(runs: &Path) -> BTreeSet<Group> {
    let text = read_note(runs);
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    whole.filter_map(|line| Group::parse(line, runs)).take(MAX_GROUPS).collect()
}

fn read_note(runs: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(runs.join(FILE)).and_then(|file| file.take(MAX_NOTE_BYTES).read_to_end(&mut bytes));
    // A unit that never had a group has no such file.
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the parent group for the units' groups, if hooks can probably have one. Creates no group
/// to find out.
///
/// # Errors
/// Why not.
pub(super) fn check() -> io::Result<Base> {
    let base = here()?;
    access(&base.group.directory, Access::WRITE_OK | Access::EXEC_OK)?;
    access(base.group.directory.join("cgroup.procs"), Access::WRITE_OK)?;
    Ok(base)
}

const PREFIX: &str = "portcullis-";

/// Returns the prefix of the names of one unit's groups. It contains a hash of the whole path, so
/// no other unit on this kernel has it.
fn own_prefix(runs: &Path) -> String {
    let path = fs::canonicalize(runs).unwrap_or_else(|_| runs.to_owned());
    let unit = path.file_name().unwrap_or_default().to_string_lossy();
    // Readable for people who inspect the hierarchy.
    let shown: String = unit.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect();
    let hash = digest_prefix(path.as_os_str().as_encoded_bytes(), 8);
    format!("{PREFIX}{shown}-{hash}-")
}

impl Group {
    fn below(parent: &Self, runs: &Path, token: u64) -> Self {
        let name = format!("{}{token:016x}", own_prefix(runs));
        let above = parent.name.trim_end_matches('/');
        Self { name: format!("{above}/{name}"), directory: parent.directory.join(name) }
    }

    /// Parses a recorded group. Returns `None` for anything that is not a group of this unit,
    /// because the processes in recorded groups are killed.
    fn parse(line: &str, runs: &Path) -> Option<Self> {
        let (name, directory) = line.split_once('\t')?;
        let (last, directory) = (name.rsplit('/').next()?, PathBuf::from(directory));
        let token = last.strip_prefix(&own_prefix(runs))?;
        let shaped = token.len() == 16 && token.bytes().all(|byte| byte.is_ascii_hexdigit());
        let same = directory.is_absolute() && directory.file_name()?.to_str() == Some(last);
        (shaped && same).then(|| Self { name: name.to_owned(), directory })
    }

    fn enter(&self) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.directory.join("cgroup.procs"))?.write_all(b"0")
    }

    /// Whether a process is in this group or below it.
    pub(super) fn has(&self, process: i32) -> bool {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        own.strip_prefix(&self.name).is_some_and(|below| below.is_empty() || below.starts_with('/'))
    }

    /// Kills all processes of the group at once, so that none can start another meanwhile. Older
    /// kernels cannot do that; there the processes are killed one by one.
    pub(super) fn kill(&self) {
        let file = OpenOptions::new().write(true).open(self.directory.join("cgroup.kill"));
        // The caller kills the processes one by one.
        let _ = file.and_then(|mut file| file.write_all(b"1"));
    }

    /// Whether the kernel counts no process in the group or below it. A scan of processes can miss
    /// one that starts another and exits.
    pub(super) fn is_empty(&self) -> io::Result<bool> {
        match fs::read_to_string(self.directory.join("cgroup.events")) {
            Ok(events) => Ok(events.lines().any(|line| line == "populated 0")),
            Err(error) if is_gone(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Removes an empty group with the groups below it. Succeeds if the group does not exist.
    pub(super) fn remove(&self) -> io::Result<()> {
        remove_groups(&self.directory)
    }
}

/// Whether the error means that the group was removed meanwhile; the kernel reports that
/// differently from a missing file.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

/// The group of this process, or its parent if that is the agent's subgroup.
fn here() -> io::Result<Base> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let own = find(&mounts, &groups);
    let own = own.ok_or_else(|| io::Error::other("no control groups of the second kind"))?;
    Ok(match own.name.strip_suffix(AGENT).zip(own.directory.parent()) {
        Some((name, directory)) => {
            let name = if name.is_empty() { "/" } else { name };
            let group = Group { name: name.to_owned(), directory: directory.to_owned() };
            Base { group, can_enable: true }
        }
        // Only the root group has no type.
        None => Base { can_enable: !own.directory.join("cgroup.type").exists(), group: own },
    })
}

fn find(mounts: &str, groups: &str) -> Option<Group> {
    let name = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ").then_some(())?;
        let mut fields = place.split(' ').skip(3);
        let (root, mounted) = (fields.next()?, fields.next()?);
        let below = if root == "/" { name } else { name.strip_prefix(root)? };
        let directory = Path::new(mounted).join(below.trim_start_matches('/'));
        Some(Group { name: name.to_owned(), directory })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_own_group_is_found() {
        let hybrid = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      35 30 0:31 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n";
        let unified = "35 30 0:31 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let bound = "35 30 0:31 /system.slice /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let groups = "1:cpu:/x\n0::/system.slice/portcullis.service\n";
        for (mounts, groups, directory) in [
            (hybrid, "2:cpu:/\n0::/\n", Some("/sys/fs/cgroup/unified")),
            (unified, groups, Some("/sys/fs/cgroup/system.slice/portcullis.service")),
            (bound, groups, Some("/sys/fs/cgroup/portcullis.service")),
            (bound, "0::/user.slice\n", None),
            ("30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n", groups, None),
            (unified, "1:cpu:/x\n", None),
        ] {
            let found = find(mounts, groups).map(|group| group.directory);
            assert_eq!(found.as_deref(), directory.map(Path::new), "{groups}{mounts}");
        }
    }

    fn top() -> Group {
        Group { name: "/".to_owned(), directory: "/cg".into() }
    }

    #[test]
    fn a_units_group_is_its_own_and_lies_below_ours() {
        let unit = Group::below(&top(), Path::new("/var/lib/p/runs/unit-0000000001"), 0xabc);
        assert!(unit.name.starts_with("/portcullis-unit-0000000001-"), "{}", unit.name);
        assert!(unit.name.ends_with("-0000000000000abc"), "{}", unit.name);
        assert_eq!(unit.directory, Path::new("/cg").join(&unit.name[1..]));
        let service = Group { name: "/a/b.service".to_owned(), directory: "/cg/a/b.service".into() };
        let long = Path::new("/").join("x".repeat(200));
        let long = Group::below(&service, &long, 1);
        assert!(long.name.starts_with("/a/b.service/portcullis-x"), "{}", long.name);
        assert!(long.directory.file_name().unwrap().len() < 250);
        // Similar paths, and paths that differ only at the beginning.
        let end = format!("{}/unit-0000000001", "y/".repeat(300));
        let paths =
            ["/x-y/unit-0000000001", "/x/y/unit-0000000001", &format!("/a/{end}"), &format!("/b/{end}")];
        let names: BTreeSet<String> = paths.iter().map(|path| own_prefix(Path::new(path))).collect();
        assert_eq!(names.len(), paths.len(), "{names:?}");
    }

    #[test]
    fn an_existing_group_is_not_reused() {
        // Plain directories are enough for this test.
        let home = tempfile::tempdir().unwrap();
        let place = Group { name: "/".to_owned(), directory: home.path().join("cg") };
        let runs = home.path().join("runs");
        fs::create_dir_all(&runs).unwrap();
        // If no group can be created, none is recorded, however often it is tried.
        assert!(join_below(&place, &noted(&runs), &runs).is_err());
        assert_eq!(read_note(&runs), "");
        fs::create_dir(&place.directory).unwrap();
        let (first, second) = (make(&place, &runs).unwrap(), make(&place, &runs).unwrap());
        assert_ne!(first, second);
        assert_eq!(noted(&runs), BTreeSet::from([first, second]), "only what is noted is ours");
    }

    #[test]
    fn other_processes_never_match() {
        let home = tempfile::tempdir().unwrap();
        let runs = home.path();
        assert_eq!(noted(runs), BTreeSet::new());
        let (own, later) = (Group::below(&top(), runs, 7), Group::below(&top(), runs, 8));
        let (name, directory) = (&own.name, own.directory.display());
        let other = Group::below(&top(), Path::new("/elsewhere/unit-0000000001"), 7);
        let other = format!("{}\t{}\n", other.name, other.directory.display());
        for line in [
            "/\t/sys/fs/cgroup\n",
            "/system.slice\t/sys/fs/cgroup/system.slice\n",
            "nonsense\n",
            "/portcullis-a\t/cg/portcullis-a\n",
            &other,
            &format!("{name}\t/sys/fs/cgroup/system.slice\n"),
            &format!("{name}\t/sys/fs/cgroup\n"),
            &format!("{name}\t{directory}/..\n"),
            &format!("{name}0\t{directory}0\n"),
            &format!("{name}\t{}\n", &own.name[1..]),
            &format!("{name}\t/cg\t{directory}x\n"),
            // An incomplete line.
            &format!("{name}\t{directory}"),
            &format!("{name}\t/cg/portcu"),
        ] {
            fs::write(runs.join(FILE), line).unwrap();
            assert_eq!(noted(runs), BTreeSet::new(), "{line}");
            note(&later, runs).unwrap();
            assert!(noted(runs).contains(&later), "what comes after it counts: {line}");
        }
        fs::write(runs.join(FILE), format!("{name}\t{directory}\n")).unwrap();
        assert_eq!(noted(runs), BTreeSet::from([own]));
    }

    #[test]
    fn a_group_with_the_same_prefix_does_not_match() {
        let own = i32::try_from(std::process::id()).unwrap();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
        // Without cgroup v2 there is no group to be in.
        let name = groups.lines().find_map(|line| line.strip_prefix("0::"));
        let group = |name: String| Group { name, directory: PathBuf::new() };
        assert_eq!(name.map(|name| group(name.to_owned()).has(own)), name.map(|_| true));
        assert!(!group(format!("{}x", name.unwrap_or_default())).has(own));
    }
}
