//! Ends what hooks have left running, and removes the control groups that they were in: a test leaves its machine as it
//! found it, also when it fails. Nothing is ended here but by its group.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a killed process may take to go.
const DEADLINE: Duration = Duration::from_secs(30);

/// Ends the groups of all units whose files are below a directory, at whatever depth.
pub(crate) fn end_below(directory: &Path) {
    for below in directories(directory) {
        if let Ok(noted) = fs::read_to_string(below.join("cgroups")) {
            groups(&noted).iter().for_each(|group| end(group));
        }
        end_below(&below);
    }
}

/// The groups in a note of a unit's, but for what cannot be a unit's that was started here.
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

/// Ends all in a group, and removes it after all below it. Never panics: it is what a test does last, also one that failed.
#[allow(clippy::print_stderr)]
pub(crate) fn end(group: &Path) {
    let end = Instant::now() + DEADLINE;
    while !remove(group) {
        // Also what has come meanwhile. Old kernels do not have it, nor do groups of the first kind.
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

/// Those directly in a directory, if there is one.
pub(crate) fn directories(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().filter_map(Result::ok);
    let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    inner.map(|entry| entry.path()).collect()
}
