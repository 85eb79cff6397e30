//! Decides whether another user could change or replace the file or directory at a path.
//! `trusted_path` reads owners and modes. Pure.
//!
//! A process that runs as root and reads a file that another user can write gives its rights to
//! that user. So every directory on the way from the root must be safe, as `sshd` and `sudo`
//! require it for their own files.

use std::path::PathBuf;

const ROOT: u32 = 0;
const WORLD_WRITE: u32 = 0o002;
const GROUP_WRITE: u32 = 0o020;
const STICKY: u32 = 0o1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Directory,
    /// A symbolic link. Its mode means nothing; the components of its target follow it.
    Link,
    Other,
}

/// One step on the way to a file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    pub path: PathBuf,
    pub kind: Kind,
    pub owner: u32,
    pub group: u32,
    pub mode: u32,
    /// Whether an access control list names further users. The mode shows its write permissions as
    /// those of the group.
    pub has_acl: bool,
}

/// Why a path is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    #[error("{} belongs to user {owner}, who could change it", path.display())]
    Owner { path: PathBuf, owner: u32, user: u32 },
    #[error("{} can be written by other users (mode {mode:04o})", path.display())]
    Writable { path: PathBuf, mode: u32 },
}

impl Untrusted {
    /// The command that makes the path safe.
    pub fn repair(&self) -> String {
        match self {
            Self::Owner { path, user, .. } => format!("chown {user} {}", path.display()),
            Self::Writable { path, .. } => format!("chmod go-w {}", path.display()),
        }
    }
}

/// Checks the steps of a path for a process of `user`, from `/` to the last that exists.
/// `is_complete` says whether that is the end of the path; otherwise the process is about to create
/// the rest.
///
/// - Owners: root, `user`, and the owner of `/`, who can replace everything anyway. In a user
///   namespace that has no root of the host, that owner is shown as `nobody`.
/// - Others must not write. Write permission of a group is accepted if the group has the number
///   of the owner: that is the owner's private group (umask 002 makes such directories in every
///   home), and for root the group `root`, as for `sudo`. With an access control list it is not
///   accepted, since the list may name anybody.
/// - A sticky directory such as `/tmp` is accepted on the way, because only the owner of the next
///   step can replace it.
///
/// # Errors
/// The first step that another user could change.
pub fn verify(steps: &[Component], user: u32, is_complete: bool) -> Result<(), Untrusted> {
    let top = steps.first().map_or(ROOT, |top| top.owner);
    for (at, step) in steps.iter().enumerate() {
        if ![ROOT, user, top].contains(&step.owner) {
            return Err(Untrusted::Owner { path: step.path.clone(), owner: step.owner, user });
        }
        let is_last = is_complete && at + 1 == steps.len();
        let is_sticky = step.kind == Kind::Directory && step.mode & STICKY != 0 && !is_last;
        if step.kind != Kind::Link && is_writable(step) && !is_sticky {
            return Err(Untrusted::Writable { path: step.path.clone(), mode: step.mode & 0o7777 });
        }
    }
    Ok(())
}

fn is_writable(step: &Component) -> bool {
    let private_group = step.group == step.owner && !step.has_acl;
    step.mode & WORLD_WRITE != 0 || (step.mode & GROUP_WRITE != 0 && !private_group)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: u32 = 1000;
    const OTHER: u32 = 1001;

    fn directory(path: &str, owner: u32, group: u32, mode: u32) -> Component {
        Component { path: path.into(), kind: Kind::Directory, owner, group, mode, has_acl: false }
    }

    fn file(path: &str, owner: u32, group: u32, mode: u32) -> Component {
        Component { kind: Kind::Other, ..directory(path, owner, group, mode) }
    }

    fn link(path: &str, owner: u32) -> Component {
        Component { kind: Kind::Link, ..directory(path, owner, owner, 0o777) }
    }

    fn refused(steps: &[Component], user: u32, is_complete: bool) -> Option<String> {
        let top = directory("/", 0, 0, 0o755);
        let steps: Vec<Component> = std::iter::once(top).chain(steps.iter().cloned()).collect();
        verify(&steps, user, is_complete).err().map(|refused| format!("{refused}; {}", refused.repair()))
    }

    #[test]
    fn paths_of_root_and_of_the_user_are_trusted() {
        let home = directory("/home", 0, 0, 0o755);
        for (user, steps) in [
            (0, vec![directory("/var", 0, 0, 0o755), directory("/var/lib", 0, 0, 0o711)]),
            (0, vec![directory("/etc", 0, 0, 0o755), file("/etc/policy.yaml", 0, 0, 0o644)]),
            (USER, vec![home.clone(), directory("/home/u", USER, USER, 0o700)]),
            (USER, vec![directory("/etc", 0, 0, 0o755), file("/etc/policy.yaml", 0, 0, 0o644)]),
            // umask 002 with private groups.
            (USER, vec![home, directory("/home/u", USER, USER, 0o775)]),
            (0, vec![directory("/srv", 0, 0, 0o775)]),
            (0, vec![directory("/tmp", 0, 0, 0o1777), directory("/tmp/a", 0, 0, 0o700)]),
            (USER, vec![directory("/tmp", 0, 0, 0o1777), directory("/tmp/a", USER, USER, 0o700)]),
            (0, vec![directory("/tmp", 0, 0, 0o1777), link("/tmp/a", 0), directory("/srv", 0, 0, 0o755)]),
        ] {
            assert_eq!(refused(&steps, user, true), None, "{steps:?}");
        }
    }

    #[test]
    fn paths_that_others_can_change_are_refused_with_the_repair() {
        let tmp = directory("/tmp", 0, 0, 0o1777);
        let acl = Component { has_acl: true, ..directory("/srv", 0, 0, 0o775) };
        for (user, steps, expected) in [
            (
                0,
                vec![directory("/srv", 0, 0, 0o777)],
                "/srv can be written by other users (mode 0777); chmod go-w /srv",
            ),
            (
                0,
                vec![directory("/srv", 0, 50, 0o775)],
                "/srv can be written by other users (mode 0775); chmod go-w /srv",
            ),
            (0, vec![acl], "/srv can be written by other users (mode 0775); chmod go-w /srv"),
            (
                0,
                vec![directory("/srv", USER, USER, 0o755)],
                "/srv belongs to user 1000, who could change it; chown 0 /srv",
            ),
            (
                USER,
                vec![directory("/srv", OTHER, 0, 0o755)],
                "/srv belongs to user 1001, who could change it; chown 1000 /srv",
            ),
            // On the way, too.
            (
                0,
                vec![directory("/srv", 0, 0, 0o777), directory("/srv/a", 0, 0, 0o700)],
                "/srv can be written by other users (mode 0777); chmod go-w /srv",
            ),
            (0, vec![tmp.clone()], "/tmp can be written by other users (mode 1777); chmod go-w /tmp"),
            (
                0,
                vec![tmp.clone(), directory("/tmp/a", USER, USER, 0o700)],
                "/tmp/a belongs to user 1000, who could change it; chown 0 /tmp/a",
            ),
            (
                0,
                vec![tmp.clone(), link("/tmp/a", USER), directory("/srv", 0, 0, 0o755)],
                "/tmp/a belongs to user 1000, who could change it; chown 0 /tmp/a",
            ),
            (
                0,
                vec![tmp, file("/tmp/f", 0, 0, 0o666)],
                "/tmp/f can be written by other users (mode 0666); chmod go-w /tmp/f",
            ),
            // The owner of a sticky directory can replace what is in it.
            (
                0,
                vec![directory("/t", USER, USER, 0o1777), directory("/t/a", 0, 0, 0o700)],
                "/t belongs to user 1000, who could change it; chown 0 /t",
            ),
        ] {
            assert_eq!(refused(&steps, user, true).as_deref(), Some(expected), "{steps:?}");
        }
    }

    #[test]
    fn a_new_entry_may_be_created_in_a_sticky_directory() {
        assert_eq!(refused(&[directory("/tmp", 0, 0, 0o1777)], 0, false), None);
        assert!(refused(&[directory("/srv", 0, 0, 0o777)], 0, false).is_some());
    }

    #[test]
    fn the_owner_of_the_root_directory_is_trusted() {
        let nobody = 65_534;
        let steps = |top| [directory("/", top, top, 0o755), directory("/tmp", nobody, nobody, 0o1777)];
        assert_eq!(verify(&steps(nobody), 0, false), Ok(()));
        assert!(verify(&steps(0), 0, false).is_err());
    }
}
