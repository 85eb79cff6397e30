//! The host side of units: where their files are, what their hooks receive, and how a hook is
//! started. This file does not use the store and makes no decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tracing::warn;

use super::cgroup::{self, Group};
use super::hook::{HookSpec, Runs};
use super::limits::HookLimits;
use super::processes::{self, CREDENTIALS, Marks, RUN};
use super::tree_walk::{give_tree, remove_tree};
use super::uid_allocator;
use super::workflow::Run;
use crate::model::{EnvironmentName, MachineId, UnitId, UnitName};
use crate::runtime::resource_limits::open_files_at_start;
use crate::runtime::{atomic_file, trusted_path};
use crate::store::acl::Roles;
use crate::store::{Address, Credential, Identity, unit_credentials_file};

/// The default time limit of a hook.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

/// The file that names the unit that owns the files beside it.
const IDENTITY: &str = "identity";

/// The settings that all units of a machine share.
#[derive(Debug, Clone)]
pub struct UnitHost {
    pub machine: MachineId,
    /// The identity of the machine's agent in the store.
    pub identity: Identity,
    pub roles: Roles,
    pub environment: EnvironmentName,
    pub address: Address,
    /// The directory that holds all files of units.
    pub directory: PathBuf,
    /// The program that runs a hook when it is started as `run-hook DIRECTORY NUMBER`.
    pub runner: PathBuf,
    /// The `PATH` of hooks, with the hook tools first.
    pub path: String,
    pub user: HookUser,
    /// The file that lists all UIDs that were given to units, of all environments on this host.
    pub users: PathBuf,
    pub limit: Duration,
    /// Limits of all processes of one unit together.
    pub limits: HookLimits,
    /// How often everything is read again without an event.
    pub resync: Duration,
    /// Locked while a charm is in memory, so that only one is.
    pub charm_slot: Arc<Mutex<()>>,
}

/// The user that runs hooks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookUser {
    /// The user of the agent.
    Agents,
    /// One user and group for all units, which can then access each other's files.
    One(u32, u32),
    /// A separate user and group for each unit, counted from this number.
    Each(u32),
}

/// The files and hooks of one unit on this machine.
#[derive(Debug, Clone)]
pub struct UnitDir<'a> {
    host: &'a UnitHost,
    id: UnitId,
}

/// The entries that the agent creates in a units directory. Others may exist beside them.
const OWN_ENTRIES: [&str; 6] = ["units", "runs", "charms", "tools", "owner", "lock"];

/// Refuses a directory for units that other users can change: its files say which programs run, and
/// as which user.
///
/// # Errors
/// Which directory or entry it is, with the command that repairs it.
pub fn check_directory(directory: &Path) -> Result<(), trusted_path::Error> {
    trusted_path::check(directory)?;
    OWN_ENTRIES.iter().try_for_each(|name| trusted_path::check(&directory.join(name)))
}

impl UnitHost {
    pub fn unit_dir(&self, id: UnitId) -> UnitDir<'_> {
        UnitDir { host: self, id }
    }

    /// Returns the units that have files here, including removed ones.
    pub fn units_with_files(&self) -> io::Result<Vec<UnitId>> {
        let listed = match fs::read_dir(self.directory.join("runs")) {
            Ok(listed) => listed,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for entry in listed {
            found.extend(entry?.file_name().to_str().and_then(|name| UnitId::from_key(name).ok()));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// The cache of charm archives.
    pub fn charms(&self) -> PathBuf {
        self.directory.join("charms")
    }

    /// Creates the directory of the cache. Only the agent may read it; each unit has a copy of its
    /// own charm.
    pub fn ensure_charms(&self) -> io::Result<()> {
        self.private_dir(&self.charms())?;
        // Also corrects the mode of an existing directory.
        fs::set_permissions(self.charms(), Permissions::from_mode(0o700))
    }

    fn private_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }
}

impl UnitDir<'_> {
    /// The directory that hooks can read. They cannot write to the directory itself, so its entries
    /// cannot be replaced.
    fn directory(&self) -> PathBuf {
        self.host.directory.join("units").join(self.id.key())
    }

    /// The directory that hooks cannot read.
    fn runs_dir(&self) -> PathBuf {
        self.host.directory.join("runs").join(self.id.key())
    }

    pub fn runs(&self) -> Runs {
        Runs::at(self.runs_dir())
    }

    /// Returns user and group of this unit's hooks; `None` means those of the agent.
    ///
    /// # Errors
    /// If the unit has no user yet, and cannot be given one.
    pub fn user(&self) -> io::Result<Option<(u32, u32)>> {
        match self.host.user {
            HookUser::Agents => Ok(None),
            HookUser::One(user, group) => Ok(Some((user, group))),
            HookUser::Each(first) => self.own_user(first).map(|user| Some((user, user))),
        }
    }

    /// Returns the unit's UID. It is allocated once, and recorded here before any file belongs to
    /// it.
    fn own_user(&self, first: u32) -> io::Result<u32> {
        let path = self.runs_dir().join(uid_allocator::OWN);
        match fs::read_to_string(&path) {
            Ok(text) => return uid_allocator::parse_own(&text, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Older versions derived the UID from the unit's number and did not record it.
        let counted = first.checked_add(self.id.number());
        let had = fs::metadata(self.credentials()).map(|found| found.uid()).ok();
        let had = had.filter(|user| counted == Some(*user));
        let user = uid_allocator::take(&self.host.users, first, had, &self.host.directory)?;
        self.runs().with_reserve(|| atomic_file::replace_exclusively(&path, user.to_string().as_bytes()))?;
        Ok(user)
    }

    pub fn charm(&self) -> PathBuf {
        self.directory().join("charm")
    }

    pub fn credentials(&self) -> PathBuf {
        self.directory().join("credentials.json")
    }

    pub fn log(&self) -> PathBuf {
        self.runs_dir().join("log")
    }

    /// The local copy of the unit's workflow state: the only one after the unit was removed.
    pub fn state(&self) -> PathBuf {
        self.runs_dir().join("state")
    }

    /// The local copy of the unit's name, for the same case.
    pub fn name(&self) -> PathBuf {
        self.runs_dir().join("name")
    }

    /// Returns the identity of the unit that the files belong to, if it was saved.
    pub fn identity(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(self.runs_dir().join(IDENTITY)) {
            Ok(text) => Ok(Some(text.trim_end().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Saves the identity of the unit that the files belong to. It is a hash, and not secret.
    pub fn save_identity(&self, identity: &Identity) -> io::Result<()> {
        if self.identity()?.as_deref() == Some(identity.as_str()) {
            return Ok(());
        }
        let path = self.runs_dir().join(IDENTITY);
        self.runs().with_reserve(|| {
            atomic_file::replace_exclusively(&path, format!("{}\n", identity.as_str()).as_bytes())
        })
    }

    /// A marker that exists while the tree may have a record of the unit's failed `stop` hook.
    /// Older versions wrote and read the same name.
    pub fn failed_stop_marker(&self) -> PathBuf {
        self.runs_dir().join("told")
    }

    pub fn create_dirs(&self, name: &UnitName) -> io::Result<()> {
        let directory = self.directory();
        self.host.private_dir(&self.runs_dir())?;
        let name = name.to_string();
        if fs::read_to_string(self.name()).ok().as_ref() != Some(&name) {
            self.runs().with_reserve(|| atomic_file::replace_exclusively(&self.name(), name.as_bytes()))?;
        }
        if let Some((_, group)) = self.user()? {
            // The hooks' group may pass through this directory, but not list it.
            let units = self.host.directory.join("units");
            DirBuilder::new().recursive(true).create(&units)?;
            // Independent of the process's umask.
            fs::set_permissions(units, Permissions::from_mode(0o711))?;
            let above = fs::metadata(&self.host.directory)?.permissions().mode() & 0o7777;
            fs::set_permissions(&self.host.directory, Permissions::from_mode(above | 0o011))?;
            self.host.private_dir(&directory)?;
            chown(&directory, None, Some(group))?;
            return fs::set_permissions(&directory, Permissions::from_mode(0o710));
        }
        self.host.private_dir(&directory)
    }

    /// Writes the unit's credentials to a file that only its hooks can read.
    pub fn write_credentials(&self, name: &UnitName, credential: &Credential) -> io::Result<()> {
        let text = unit_credentials_file(name, credential, &self.host.address);
        let path = self.credentials();
        // Also corrects the owner of an existing file.
        let owner = self.user()?;
        let theirs = |found: fs::Metadata| owner.is_none_or(|(user, _)| user == found.uid());
        if fs::read(&path).is_ok_and(|found| found == text.as_bytes())
            && fs::metadata(&path).is_ok_and(theirs)
        {
            return Ok(());
        }
        atomic_file::build_aside(&path, |aside| {
            match fs::remove_file(aside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(aside)?;
            file.write_all(text.as_bytes())?;
            owner.map_or(Ok(()), |(user, group)| chown(aside, Some(user), Some(group)))
        })
    }

    /// Gives the charm to the unit's user, if it belonged to the agent's user so far. Files of any
    /// other user stay as they are: that user could replace them meanwhile and make the agent give
    /// away other files.
    pub fn chown_charm(&self) -> io::Result<()> {
        let Some((user, group)) = self.user()? else { return Ok(()) };
        let agent = rustix::process::geteuid().as_raw();
        match fs::symlink_metadata(self.charm()) {
            Ok(charm) if user != agent && charm.uid() == agent => give_tree(&self.charm(), (user, group)),
            // A removed unit may never have had a charm.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the specification of a hook of this unit; `None` if the charm has no such hook.
    ///
    /// # Errors
    /// If that cannot be determined, or if the unit has no user to run it.
    pub fn hook_spec(&self, name: &UnitName, Run { hook, number }: Run) -> io::Result<Option<HookSpec>> {
        let charm = self.charm();
        let program = charm.join("hooks").join(hook.name());
        // A broken link, or a hook that cannot be examined, is a hook that cannot run, not a
        // missing one.
        match fs::symlink_metadata(&program) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => {
                let reason = format!("cannot look for {}: {error}", program.display());
                return Err(io::Error::new(error.kind(), reason));
            }
        }
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let variables = [
            ("CHARM_DIR", text(&charm)),
            ("HOME", text(&charm)),
            (CREDENTIALS, text(&self.credentials())),
            ("JUJU_ENV", self.host.environment.to_string()),
            (RUN, text(&self.run_name(number))),
            ("JUJU_HOOK_NAME", hook.name().to_owned()),
            ("JUJU_UNIT_NAME", name.to_string()),
            ("JUJU_ZOOKEEPER", self.host.address.to_string()),
            ("LANG", "C.UTF-8".to_owned()),
            ("PATH", self.host.path.clone()),
        ];
        Ok(Some(HookSpec {
            program,
            directory: charm,
            variables: BTreeMap::from(variables.map(|(name, value)| (name.to_owned(), value))),
            user: self.user()?,
            limit_ms: u64::try_from(self.host.limit.as_millis()).unwrap_or(u64::MAX),
            log: self.log(),
            open_files: open_files_at_start(),
            limits: Some(self.host.limits),
            has_own_user: matches!(self.host.user, HookUser::Each(_)),
        }))
    }

    /// Writes the specification of a hook. Returns whether the charm has that hook.
    ///
    /// # Errors
    /// Those of [`Self::hook_spec`], and of the file system.
    pub fn write_hook_spec(&self, name: &UnitName, run: Run) -> io::Result<bool> {
        let Some(spec) = self.hook_spec(name, run)? else { return Ok(false) };
        self.runs().write_spec(run.number, &spec).map(|()| true)
    }

    /// The marks of the processes of one run.
    fn run_name(&self, number: u64) -> PathBuf {
        self.runs_dir().join(number.to_string())
    }

    /// Ends the remaining processes of a run without a result.
    ///
    /// # Errors
    /// If they do not end.
    pub fn end_run(&self, number: u64) -> io::Result<()> {
        // The unit's control group also contains services that earlier runs started.
        let marks = Marks { variable: (RUN, &self.run_name(number)), groups: BTreeSet::new() };
        processes::end(&marks).map(drop)
    }

    /// Ends all processes that the unit's hooks left running.
    ///
    /// # Errors
    /// If they do not end.
    pub fn end_all(&self) -> io::Result<()> {
        let groups = cgroup::noted(&self.runs_dir());
        let marks = Marks { variable: (CREDENTIALS, &self.credentials()), groups };
        processes::end(&marks)?;
        // Removed before the file that lists the groups.
        marks.groups.iter().try_for_each(Group::remove)
    }

    /// Runs a specified hook in a process and a process group of its own, and waits for it.
    ///
    /// # Errors
    /// If it cannot be started, or reports that it cannot work.
    pub fn run(&self, number: u64) -> io::Result<()> {
        let mut runner = Command::new(&self.host.runner);
        runner.arg("run-hook").arg(self.runs_dir()).arg(number.to_string());
        runner.env_clear().current_dir("/");
        runner.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut runner, 0);
        // The hook's result is in a file, which this agent or a later one reads.
        let result = runner.output()?;
        let stderr = String::from_utf8_lossy(&result.stderr);
        match result.status.code() {
            // The process was killed; the caller reads the state of the run.
            Some(0) | None => {
                if !stderr.is_empty() {
                    warn!(unit = %self.id, stderr = stderr.trim_end(), "hook runner wrote to stderr");
                }
                Ok(())
            }
            Some(_) => {
                let line = stderr.lines().next().unwrap_or("no reason was printed");
                Err(io::Error::other(line.strip_prefix("error: ").unwrap_or(line).to_owned()))
            }
        }
    }

    /// Removes all files of the unit, whose processes have ended. The runs go first, because they
    /// are useless without the rest; the directory goes last, so that a second attempt finds it.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(self.state()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        for directory in [self.directory(), self.runs_dir()] {
            remove_tree(&directory)?;
        }
        Ok(())
    }
}
