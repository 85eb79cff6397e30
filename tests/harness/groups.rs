//! Kills processes that hooks have left running, and removes their control groups, so that a test
//! leaves no processes behind, even if it fails. Processes are only killed through their control
//! group.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the end of killed processes.
const DEADLINE: Duration = Duration::from_secs(30);

/// Ends the control groups of all units whose files are below a directory, at any depth.
pub(crate) fn end_below(directory: &Path) {
    for below in directories(directory) {
        if let Ok(noted) = fs::read_to_string(below.join("cgroups")) {
            groups(&noted).iter().for_each(|group| end(group));
        }
        end_below(&below);
    }
}

/// Returns the control groups listed in a unit's file, except those that this test cannot have
/// created.
fn groups(noted: &str) -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let tops = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let parents: Vec<PathBuf> = tops.iter().flat_map(|top| [top.to_path_buf(), top.join(own)]).collect();
    let ours = |group: &Path| {
        let named = group.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"portcullis-"));
        named && parents.iter().any(|parent| group.parent() == Some(parent))
    };
    let directories = noted.lines().filter_map(|line| Some(PathBuf::from(line.split_once('\t')?.1)));
    directories.filter(|group| ours(group)).collect()
}

/// Kills all processes in a group and removes it with its subgroups. Never panics, because it also
/// cleans up after failed tests.
#[allow(clippy::print_stderr)]
pub(crate) fn end(group: &Path) {
    let end = Instant::now() + DEADLINE;
    while !remove(group) {
        // Repeated for processes that were started meanwhile. Old kernels and cgroup v1 do not have
        // this file.
        let _ = fs::write(group.join("cgroup.kill"), "1");
        if Instant::now() > end {
            eprintln!("{} is left behind", group.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn remove(group: &Path) -> bool {
    for below in directories(group) {
        remove(&below);
    }
    fs::remove_dir(group).is_ok() || !group.exists()
}

/// Returns the subdirectories of a directory; none if it does not exist.
pub(crate) fn directories(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().filter_map(Result::ok);
    let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    inner.map(|entry| entry.path()).collect()
}

/// A control group for an instance of systemd, in each hierarchy that a systemd may use.
#[derive(Debug)]
pub(crate) struct Groups(pub(crate) Vec<PathBuf>);

impl Groups {
    /// Creates the groups. `of` is a part of their name, which is unique among running tests.
    pub(crate) fn new(of: &str) -> Self {
        static CREATED: AtomicUsize = AtomicUsize::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let name = format!("portcullis-test-{}-{of}-{number}", std::process::id());
        let tops = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"].map(Path::new);
        let trees = tops.into_iter().filter(|top| top.join("cgroup.procs").exists());
        let groups = Self(trees.map(|top| top.join(&name)).collect());
        assert!(!groups.0.is_empty(), "no control groups are mounted");
        groups.0.iter().for_each(|group| fs::create_dir_all(group).expect("a control group"));
        groups
    }

    pub(crate) fn name(&self) -> &str {
        self.0[0].file_name().and_then(|name| name.to_str()).expect("a name")
    }

    /// Returns shell commands that move the shell into the groups.
    pub(crate) fn enter(&self) -> String {
        self.0.iter().map(|group| format!("echo $$ >{}/cgroup.procs; ", group.display())).collect()
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.0.iter().for_each(|group| end(group));
    }
}
