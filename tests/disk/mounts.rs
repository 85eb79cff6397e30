//! File systems for tests: small ones, and ones that simulate a power cut.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::harness::wait_for;

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("a program of the system");
    assert!(
        output.status.success(),
        "{program} {arguments:?} (as root?): {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Mount {
    dir: tempfile::TempDir,
    mounted: bool,
}

impl Mount {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("mnt")).expect("a mount point");
        Self { dir, mounted: false }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn mount(&mut self, arguments: &[&str]) {
        run("mount", &[arguments, &[&self.path().display().to_string()]].concat());
        self.mounted = true;
    }

    pub(crate) fn tmpfs(size: &str) -> Self {
        let mut mount = Self::new();
        mount.mount(&["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"]);
        mount
    }

    pub(crate) fn resize(&mut self, size: &str) {
        self.mount(&["-o", &format!("remount,size={size}")]);
    }

    /// Mounts an ext4 image.
    pub(crate) fn ext4() -> Self {
        let mut mount = Self::new();
        let image = mount.dir.path().join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("an image");
        run("mkfs.ext4", &["-q", "-F", &image.display().to_string()]);
        mount.remount();
        mount
    }

    /// Mounts the file system again after a power cut, on a new loop device, so that no cached data
    /// of the kernel remains.
    pub(crate) fn remount(&mut self) {
        self.unmount();
        let image = self.dir.path().join("image").display().to_string();
        wait_for("removal of the loop device", Duration::from_secs(20), || {
            let output = Command::new("losetup").args(["--associated", &image]).output().expect("losetup");
            output.stdout.is_empty().then_some(())
        });
        self.mount(&["-o", "loop", &image]);
    }

    /// Simulates a power cut: later writes fail, and unsynced data is lost.
    pub(crate) fn cut_power(&self) {
        run("python3", &["-c", CUT, &self.path().display().to_string()]);
    }

    fn unmount(&mut self) {
        if std::mem::take(&mut self.mounted) {
            run("umount", &[&self.path().display().to_string()]);
        }
    }
}

/// Calls EXT4_IOC_SHUTDOWN without flushing the journal. In Python, because a raw ioctl needs
/// unsafe code in Rust.
const CUT: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted && !std::thread::panicking() {
            self.unmount();
        } else if self.mounted {
            // A failed test may have open files; a second panic would hide the first.
            drop(Command::new("umount").args(["-l"]).arg(self.path()).status());
        }
    }
}

pub(crate) fn data_dir(mount: &Mount) -> PathBuf {
    let path: &Path = &mount.path();
    path.join("data")
}
