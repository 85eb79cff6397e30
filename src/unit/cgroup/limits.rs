//! Limits that a unit's control group enforces, where the kernel has the controllers and the agent
//! may enable them. `unit::limits` decides the values.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use super::{Base, Group};
use crate::unit::limits::HookLimits;

const PIDS: &str = "pids";
const MEMORY: &str = "memory";

/// Which limits the kernel enforces for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::unit) struct Enforced {
    pub(in crate::unit) pids: bool,
    pub(in crate::unit) memory: bool,
}

impl Group {
    /// Sets the limits of all processes in the group, also of those that are there already.
    pub(super) fn limit(&self, limits: HookLimits, base: Option<&Base>) -> Enforced {
        Enforced {
            pids: self.set(PIDS, limits.pids, base),
            memory: self.set(MEMORY, limits.memory_bytes, base),
        }
    }

    fn set(&self, controller: &str, most: Option<u64>, base: Option<&Base>) -> bool {
        let text = most.map_or_else(|| "max".to_owned(), |most| most.to_string());
        let file = self.directory.join(format!("{controller}.max"));
        let write = || write_existing(&file, &text);
        if write().is_ok() {
            return true;
        }
        let above = base.filter(|base| self.directory.parent() == Some(&base.group.directory));
        if most.is_some() && above.is_some_and(|above| above.enable(controller).is_ok()) {
            return write().is_ok();
        }
        most.is_none()
    }
}

impl Base {
    /// Enables a controller for the child groups. Never if the agent itself is in this group: the
    /// kernel would then allow no more processes in it, and a service manager could not start the
    /// agent again.
    fn enable(&self, controller: &str) -> io::Result<()> {
        if !self.can_enable {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        write_existing(&self.group.directory.join("cgroup.subtree_control"), &format!("+{controller}"))
    }

    /// The limits that cannot be enforced for the groups below, by the names of their controllers.
    pub(in crate::unit) fn unenforced(&self, limits: HookLimits) -> Vec<&'static str> {
        let has = |file: &str, controller: &str| {
            let found = fs::read_to_string(self.group.directory.join(file)).unwrap_or_default();
            found.split_whitespace().any(|name| name == controller)
        };
        let can = |controller: &str| {
            has("cgroup.subtree_control", controller)
                || (self.can_enable && has("cgroup.controllers", controller))
        };
        let wanted = [(PIDS, limits.pids), (MEMORY, limits.memory_bytes)];
        let missing = wanted.into_iter().filter(|(controller, most)| most.is_some() && !can(controller));
        missing.map(|(controller, _)| controller).collect()
    }
}

/// Control group files exist or not; they cannot be created.
fn write_existing(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(file)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain directories stand for groups: this kernel may have no such controllers.
    fn base(directory: &Path, can_enable: bool) -> Base {
        let group = Group { name: "/".to_owned(), directory: directory.to_owned() };
        Base { group, can_enable }
    }

    #[test]
    fn limits_are_written_where_the_group_has_the_controllers() {
        let home = tempfile::tempdir().unwrap();
        let unit = Group { name: "/u".to_owned(), directory: home.path().join("u") };
        fs::create_dir(&unit.directory).unwrap();
        let limits: HookLimits = "pids=20,memory=64M".parse().unwrap();
        let none = Enforced { pids: false, memory: false };
        for can_enable in [false, true] {
            assert_eq!(unit.limit(limits, Some(&base(home.path(), can_enable))), none);
        }
        assert_eq!(fs::read_dir(&unit.directory).unwrap().count(), 0, "no file is created");
        fs::write(unit.directory.join("pids.max"), "max").unwrap();
        assert_eq!(unit.limit(limits, None), Enforced { pids: true, memory: false });
        fs::write(unit.directory.join("memory.max"), "max").unwrap();
        let read = |name: &str| fs::read_to_string(unit.directory.join(name)).unwrap();
        assert_eq!(unit.limit(limits, None), Enforced { pids: true, memory: true });
        assert_eq!((read("pids.max"), read("memory.max")), ("20".to_owned(), "67108864".to_owned()));
        let unlimited = "pids=none,memory=none".parse().unwrap();
        assert_eq!(unit.limit(unlimited, None), Enforced { pids: true, memory: true });
        assert_eq!((read("pids.max"), read("memory.max")), ("max".to_owned(), "max".to_owned()));
    }

    #[test]
    fn controllers_are_enabled_only_in_a_group_without_the_agent() {
        let home = tempfile::tempdir().unwrap();
        let control = home.path().join("cgroup.subtree_control");
        fs::write(&control, "").unwrap();
        fs::write(home.path().join("cgroup.controllers"), "cpu pids\n").unwrap();
        let unit = Group { name: "/u".to_owned(), directory: home.path().join("u") };
        fs::create_dir(&unit.directory).unwrap();
        let limits = HookLimits::default();
        unit.limit(limits, Some(&base(home.path(), false)));
        assert_eq!(fs::read_to_string(&control).unwrap(), "");
        assert_eq!(base(home.path(), false).unenforced(limits), [PIDS, MEMORY]);
        unit.limit(limits, Some(&base(home.path(), true)));
        assert_eq!(fs::read_to_string(&control).unwrap(), "+memory", "the last of the two");
        fs::write(&control, "memory").unwrap();
        assert_eq!(base(home.path(), true).unenforced(limits), Vec::<&str>::new());
        assert_eq!(base(home.path(), false).unenforced(limits), [PIDS]);
        assert_eq!(base(home.path(), false).unenforced("pids=none".parse().unwrap()), Vec::<&str>::new());
    }
}
