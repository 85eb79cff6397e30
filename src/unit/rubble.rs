//! Removes what hooks have left: directories within directories, deeper than a thread's stack or the open files of a process
//! would last, and such as their own owner may not write in. `rm` walks them without either.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// All of it; nothing there is fine.
///
/// # Errors
/// What `rm` says.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    match run("rm", "-rf", path) {
        Ok(()) => Ok(()),
        Err(first) => {
            run("chmod", "-Rf", path).map_err(|_| first)?;
            run("rm", "-rf", path)
        }
    }
}

fn run(program: &str, how: &str, path: &Path) -> io::Result<()> {
    let mut command = Command::new(program);
    command.arg(how).args((program == "chmod").then_some("u+rwX")).arg("--").arg(path);
    let ended = command.stdin(Stdio::null()).output()?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    Err(io::Error::other(said.lines().next().unwrap_or("rm does not say why").to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn however_deep() {
        let home = tempfile::tempdir().unwrap();
        let top = home.path().join("unit");
        fs::create_dir_all(top.join("d/".repeat(1900))).unwrap();
        let removed = top.clone();
        // As much stack as whoever removes a unit has.
        let thread = std::thread::Builder::new().stack_size(256 * 1024);
        thread.spawn(move || remove_tree(&removed)).unwrap().join().unwrap().unwrap();
        assert!(!top.exists());
        remove_tree(&top).unwrap();
    }

    /// For root no mode is in the way.
    #[test]
    fn whatever_its_modes() {
        let home = tempfile::tempdir().unwrap();
        let (top, inner) = (home.path().join("unit"), home.path().join("unit/cache/inner"));
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("file"), "x").unwrap();
        for shut in [&inner, &home.path().join("unit/cache")] {
            fs::set_permissions(shut, fs::Permissions::from_mode(0o500)).unwrap();
        }
        remove_tree(&top).unwrap();
        assert!(!top.exists());
        let refused = remove_tree(Path::new("/proc/self/status")).unwrap_err().to_string();
        assert!(refused.contains("/proc/self/status"), "{refused}");
    }
}
