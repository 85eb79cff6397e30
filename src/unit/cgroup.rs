//! A control group for a unit's hooks and for all that they start, wherever the kernel lets us have one: nothing leaves it
//! by forgetting its environment or its parent. Which groups a unit had is written down beside its runs, since an agent
//! that is started anew may be in another place of the tree of groups. No decision is made here.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Where a unit's groups are written down.
const FILE: &str = "cgroups";

/// A group, as processes name it and as a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    name: String,
    directory: PathBuf,
}

/// Puts this process, and with it all that it will start, into the group of the unit whose runs are in `runs`.
///
/// # Errors
/// If there are no control groups of the second kind here, or none that we may change.
pub(super) fn join(runs: &Path) -> io::Result<()> {
    for group in noted(runs) {
        if group.enter().is_ok() {
            return Ok(());
        }
    }
    let group = Group::below(&here()?, runs);
    // Before anything is in it, so that nothing is ever in a group that nobody knows of.
    let mut file = OpenOptions::new().create(true).append(true).open(runs.join(FILE))?;
    writeln!(file, "{}\t{}", group.name, group.directory.display())?;
    match fs::create_dir(&group.directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    group.enter()
}

/// The groups that a unit's hooks were ever in.
pub(super) fn noted(runs: &Path) -> BTreeSet<Group> {
    let text = fs::read_to_string(runs.join(FILE)).unwrap_or_default();
    let group = |line: &str| {
        let (name, directory) = line.split_once('\t')?;
        // Never the group of everybody.
        let ours = name.rsplit('/').next().is_some_and(|last| last.starts_with(PREFIX));
        ours.then(|| Group { name: name.to_owned(), directory: PathBuf::from(directory) })
    };
    text.lines().filter_map(group).collect()
}

const PREFIX: &str = "portcullis-";
const MAX_NAME_BYTES: usize = 200;

impl Group {
    fn below(parent: &Self, runs: &Path) -> Self {
        // Unlike that of any other unit of this kernel; the path says which unit it is.
        let path = runs.to_string_lossy();
        let plain = path.trim_start_matches('/').replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        // As long as a file's name may be; the end is what differs.
        let name = format!("{PREFIX}{}", &plain[plain.len().saturating_sub(MAX_NAME_BYTES)..]);
        let above = parent.name.trim_end_matches('/');
        Self { name: format!("{above}/{name}"), directory: parent.directory.join(name) }
    }

    fn enter(&self) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.directory.join("cgroup.procs"))?.write_all(b"0")
    }

    /// Whether a process is in it, or in one below it.
    pub(super) fn has(&self, process: i32) -> bool {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        own.strip_prefix(&self.name).is_some_and(|below| below.is_empty() || below.starts_with('/'))
    }

    /// Ends all that is in it at once, so that none can start another meanwhile. Where the kernel is too old for that,
    /// they are ended one by one.
    pub(super) fn kill(&self) {
        let file = OpenOptions::new().write(true).open(self.directory.join("cgroup.kill"));
        // See above.
        let _ = file.and_then(|mut file| file.write_all(b"1"));
    }

    /// An empty group goes; one that is gone already is as good.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir(&self.directory)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(group = self.name, %error, "control group left behind");
        }
    }
}

/// The group that we are in.
fn here() -> io::Result<Group> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    find(&mounts, &groups).ok_or_else(|| io::Error::other("no control groups of the second kind"))
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
    fn our_own_group_is_found() {
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

    #[test]
    fn a_units_group_is_its_own_and_lies_below_ours() {
        let top = Group { name: "/".to_owned(), directory: "/cg".into() };
        let unit = Group::below(&top, Path::new("/var/lib/p/runs/unit-0000000001"));
        assert_eq!(unit.name, "/portcullis-var-lib-p-runs-unit-0000000001");
        assert_eq!(unit.directory, Path::new("/cg/portcullis-var-lib-p-runs-unit-0000000001"));
        let service = Group { name: "/a/b.service".to_owned(), directory: "/cg/a/b.service".into() };
        let long = Group::below(&service, Path::new(&format!("/{}/unit-0000000002", "x".repeat(400))));
        assert!(
            long.name.starts_with("/a/b.service/portcullis-x") && long.name.ends_with("-unit-0000000002")
        );
        assert!(long.directory.file_name().unwrap().len() < 250);
    }

    #[test]
    fn nobody_else_is_ever_meant() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(noted(home.path()), BTreeSet::new());
        fs::write(
            home.path().join(FILE),
            "/\t/sys/fs/cgroup\n/system.slice\t/x\nnonsense\n/portcullis-a\t/y\n",
        )
        .unwrap();
        let noted: Vec<String> = noted(home.path()).into_iter().map(|group| group.name).collect();
        assert_eq!(noted, ["/portcullis-a"]);
        // In this one's own group, and in none that merely begins alike.
        let own = i32::try_from(std::process::id()).unwrap();
        let here = here().unwrap();
        assert!(here.has(own));
        assert!(!Group { name: format!("{}x", here.name), ..here }.has(own));
    }
}
