//! Tests with directories that are too deep for a path, that their owner may not enter, and that
//! are links or are moved.

use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use rustix::fs::{mkdirat, renameat};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

const DEEP: usize = 5_000;

/// Creates directories so deep that the path is longer than the kernel accepts.
fn deep(top: &Path) {
    fs::create_dir(top).unwrap();
    let mut at = open(top, DIRECTORY, Mode::empty()).unwrap();
    for level in 0..DEEP {
        mkdirat(&at, "directory", Mode::RWXU).unwrap();
        if level % 1000 == 0 {
            openat(&at, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap();
        }
        at = openat(&at, "directory", DIRECTORY, Mode::empty()).unwrap();
    }
}

/// Runs `work` with the stack size of the thread that removes a unit.
fn on_a_small_stack<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let thread = std::thread::Builder::new().stack_size(256 * 1024);
    thread.spawn(work).unwrap().join().unwrap()
}

#[test]
fn deep_directories_are_removed() {
    let home = tempfile::tempdir().unwrap();
    let top = home.path().join("unit");
    deep(&top);
    let given = top.clone();
    // Only root can change the owner to another user.
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    on_a_small_stack(move || give_tree(&given, own)).unwrap();
    let removed = top.clone();
    on_a_small_stack(move || remove_tree(&removed)).unwrap();
    assert!(!top.exists());
    remove_tree(&top).unwrap();
    remove_tree(&top.join("nowhere")).unwrap();
}

/// Permissions do not restrict root, so root runs this as another user.
#[test]
fn directories_of_any_mode_are_removed() {
    let home = tempfile::tempdir().unwrap();
    let top = home.path().join("unit");
    for inner in ["shut/inner", "read-only/inner", "blind/inner"] {
        fs::create_dir_all(top.join(inner)).unwrap();
        fs::write(top.join(inner).join("file"), "x").unwrap();
    }
    let nobody = 65_534;
    if rustix::process::geteuid().is_root() {
        give_tree(home.path(), (nobody, nobody)).unwrap();
    }
    for (shut, mode) in [("shut", 0o000), ("read-only/inner", 0o500), ("read-only", 0o500), ("blind", 0o300)]
    {
        fs::set_permissions(top.join(shut), fs::Permissions::from_mode(mode)).unwrap();
    }
    let removed = top.clone();
    on_a_small_stack(move || {
        if rustix::process::geteuid().is_root() {
            let (user, group) = (Uid::from_raw(nobody), Gid::from_raw(nobody));
            set_thread_groups(&[]).unwrap();
            set_thread_res_gid(group, group, group).unwrap();
            set_thread_res_uid(user, user, user).unwrap();
        }
        assert!(fs::read_dir(removed.join("shut")).is_err(), "the control: it is shut");
        assert!(fs::remove_file(removed.join("read-only/inner/file")).is_err(), "and so is this");
        remove_tree(&removed)
    })
    .unwrap();
    assert!(!top.exists());
}

#[test]
fn links_are_not_followed() {
    let home = tempfile::tempdir().unwrap();
    let (top, kept) = (home.path().join("unit"), home.path().join("kept"));
    for directory in [&top, &kept] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(kept.join("file"), "kept").unwrap();
    symlink(&kept, top.join("link")).unwrap();
    symlink(kept.join("file"), top.join("link-to-file")).unwrap();
    let before = fs::metadata(kept.join("file")).unwrap();
    if rustix::process::geteuid().is_root() {
        give_tree(&top, (12_345, 12_345)).unwrap();
        assert_eq!(fs::symlink_metadata(top.join("link")).unwrap().uid(), 12_345, "the link itself");
    }
    remove_tree(&top).unwrap();
    assert_eq!(fs::metadata(kept.join("file")).unwrap().uid(), before.uid());
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    // Also if the top directory itself is a link.
    symlink(&kept, &top).unwrap();
    remove_tree(&top).unwrap();
    assert!(!top.exists() && kept.join("file").exists());
}

/// A directory that is moved during the walk must not lead to changes in another directory.
#[test]
fn replaced_directories_are_not_entered() {
    struct Mover<'a>(&'a OwnedFd, &'a OwnedFd);
    impl Visit for Mover<'_> {
        const CONSUMES: bool = true;
        fn file(&self, _: &OwnedFd, _: &CStr) -> Result<(), Errno> {
            // Moves the directory that contains the file.
            renameat(self.0, "inner", self.1, "inner")
        }
        fn leave(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
            unlinkat(directory, name, AtFlags::REMOVEDIR)
        }
    }
    let home = tempfile::tempdir().unwrap();
    let (top, other) = (home.path().join("unit"), home.path().join("other"));
    fs::create_dir_all(top.join("inner")).unwrap();
    fs::create_dir(&other).unwrap();
    fs::write(top.join("inner/file"), "x").unwrap();
    let [from, to] = [&top, &other].map(|place| open(place, DIRECTORY, Mode::empty()).unwrap());
    let refused = walk(&top, &Mover(&from, &to)).unwrap_err();
    assert_eq!(refused.to_string(), "inner was moved meanwhile");
    assert!(other.join("inner/file").exists());
}

#[test]
fn entries_that_vanish_are_ignored() {
    let home = tempfile::tempdir().unwrap();
    let top = home.path().join("unit");
    for round in 0..20 {
        for directory in 0..50 {
            let inner = top.join(format!("{directory}/inner"));
            fs::create_dir_all(&inner).unwrap();
            fs::write(inner.join("file"), "x").unwrap();
        }
        // Two threads remove the same tree: each finds entries that the other has already removed.
        let both = [top.clone(), top.clone()].map(|top| std::thread::spawn(move || remove_tree(&top)));
        for one in both {
            one.join().unwrap().unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        assert!(!top.exists());
    }
}
