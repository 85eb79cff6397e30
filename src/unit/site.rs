//! A machine as its units see it: where their files are, what their hooks are given, and how one is started. No store is
//! talked to here, and nothing is decided.

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

use serde_json::json;
use tokio::sync::Mutex;
use tracing::warn;

use super::cgroup::{self, Group};
use super::hook::{Order, Runs};
use super::leftover::{self, CREDENTIALS, Marks, RUN};
use super::limits::HookLimits;
use super::users;
use super::walk::{give_tree, remove_tree};
use super::workflow::Run;
use crate::model::{EnvironmentName, MachineId, UnitId, UnitName};
use crate::runtime::files::open_files_at_start;
use crate::runtime::trusted_path;
use crate::store::acl::Roles;
use crate::store::{Address, Credential, Identity};

/// How long a hook may take unless it is said otherwise.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

/// The file that says which unit the files beside it belong to.
const IDENTITY: &str = "identity";

/// What all units of a machine have in common.
#[derive(Debug, Clone)]
pub struct Site {
    pub machine: MachineId,
    /// Who the machine's agent is to the store.
    pub identity: Identity,
    pub roles: Roles,
    pub environment: EnvironmentName,
    pub address: Address,
    /// Everything that units have on this machine is below it.
    pub directory: PathBuf,
    /// The program that runs a hook when it is given `run-hook DIRECTORY NUMBER`.
    pub runner: PathBuf,
    /// Where hooks find the hook tools, and everything else.
    pub path: String,
    pub user: HookUser,
    /// Where it is written down which users were given to units, of this environment and of others on this host.
    pub users: PathBuf,
    pub limit: Duration,
    /// Limits of all processes of one unit together.
    pub limits: HookLimits,
    /// Everything is looked at this often, whatever was noticed in between.
    pub resync: Duration,
    /// Held by whoever has a charm in memory, to give it to a unit.
    pub equipping: Arc<Mutex<()>>,
}

/// Who runs hooks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookUser {
    /// Whoever runs the agent.
    Agents,
    /// One user and group for all units, which can then get at each other's files.
    One(u32, u32),
    /// A user and a group of its own for each unit, counted from here.
    Each(u32),
}

/// One unit on this machine.
#[derive(Debug, Clone)]
pub struct Home<'a> {
    site: &'a Site,
    id: UnitId,
}

/// The entries that the agent makes in a directory for units. Others may be there, too.
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

impl Site {
    pub fn home(&self, id: UnitId) -> Home<'_> {
        Home { site: self, id }
    }

    /// The units that have files here, also those that were removed since.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn residents(&self) -> io::Result<Vec<UnitId>> {
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

    /// Charms as they came, for the next unit of the same one.
    pub fn charms(&self) -> PathBuf {
        self.directory.join("charms")
    }

    /// The directory for them. Charms are nobody's to read but the agent's and, each its own copy, their units'.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn ensure_charms(&self) -> io::Result<()> {
        self.private_dir(&self.charms())?;
        // Also one that was made with a wider door.
        fs::set_permissions(self.charms(), Permissions::from_mode(0o700))
    }

    fn private_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }
}

impl Home<'_> {
    /// What the hooks may see. The directory itself is not theirs: nothing in it can be put in another's place.
    fn directory(&self) -> PathBuf {
        self.site.directory.join("units").join(self.id.key())
    }

    /// What the hooks may not see.
    fn runs_dir(&self) -> PathBuf {
        self.site.directory.join("runs").join(self.id.key())
    }

    pub fn runs(&self) -> Runs {
        Runs::at(self.runs_dir())
    }

    /// User and group of this unit's hooks; `None` for those of the agent.
    ///
    /// # Errors
    /// If the unit has none of its own yet, and cannot be given one.
    pub fn user(&self) -> io::Result<Option<(u32, u32)>> {
        match self.site.user {
            HookUser::Agents => Ok(None),
            HookUser::One(user, group) => Ok(Some((user, group))),
            HookUser::Each(first) => self.own_user(first).map(|user| Some((user, user))),
        }
    }

    /// Given once, and written down here before anything is theirs.
    fn own_user(&self, first: u32) -> io::Result<u32> {
        let path = self.runs_dir().join(users::OWN);
        match fs::read_to_string(&path) {
            Ok(text) => return users::parse_own(&text, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Whose the unit's files are since a time when users were counted by the units' numbers, and not written down.
        let counted = first.checked_add(self.id.number());
        let had = fs::metadata(self.credentials()).map(|found| found.uid()).ok();
        let had = had.filter(|user| counted == Some(*user));
        let user = users::take(&self.site.users, first, had, &self.site.directory)?;
        self.runs().with_reserve(|| users::write(&path, user.to_string().as_bytes()))?;
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

    /// The unit's workflow as it was last known here: all that is left of it once the unit was removed.
    pub fn state(&self) -> PathBuf {
        self.runs_dir().join("state")
    }

    /// The unit's name, for the same case.
    pub fn name(&self) -> PathBuf {
        self.runs_dir().join("name")
    }

    /// Returns the identity of the unit that the files belong to, if it was saved.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn identity(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(self.runs_dir().join(IDENTITY)) {
            Ok(text) => Ok(Some(text.trim_end().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Saves the identity of the unit that the files belong to. It is a hash, and not secret.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn claim(&self, identity: &Identity) -> io::Result<()> {
        if self.identity()?.as_deref() == Some(identity.as_str()) {
            return Ok(());
        }
        let path = self.runs_dir().join(IDENTITY);
        self.runs().with_reserve(|| users::write(&path, format!("{}\n", identity.as_str()).as_bytes()))
    }

    /// There if the tree may still say that the unit's `stop` hook failed.
    pub fn told(&self) -> PathBuf {
        self.runs_dir().join("told")
    }

    /// # Errors
    /// Those of the file system.
    pub fn make(&self, name: &UnitName) -> io::Result<()> {
        let directory = self.directory();
        self.site.private_dir(&self.runs_dir())?;
        let name = name.to_string();
        if fs::read_to_string(self.name()).ok().as_ref() != Some(&name) {
            self.runs().with_reserve(|| users::write(&self.name(), name.as_bytes()))?;
        }
        if let Some((_, group)) = self.user()? {
            // The way to its files is open to the hooks' group, and to look around in is not.
            let units = self.site.directory.join("units");
            DirBuilder::new().recursive(true).create(&units)?;
            // Whatever the process's own mask says.
            fs::set_permissions(units, Permissions::from_mode(0o711))?;
            let above = fs::metadata(&self.site.directory)?.permissions().mode() & 0o7777;
            fs::set_permissions(&self.site.directory, Permissions::from_mode(above | 0o011))?;
            self.site.private_dir(&directory)?;
            chown(&directory, None, Some(group))?;
            return fs::set_permissions(&directory, Permissions::from_mode(0o710));
        }
        self.site.private_dir(&directory)
    }

    /// Puts the unit's secret where its hooks find it, and nobody else.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn give(&self, name: &UnitName, credential: &Credential) -> io::Result<()> {
        let text = format!("{}\n", json!({"unit": name.to_string(), "auth": credential.expose()}));
        let path = self.credentials();
        // Also one that was given to somebody else.
        let owner = self.user()?;
        let theirs = |found: fs::Metadata| owner.is_none_or(|(user, _)| user == found.uid());
        if fs::read(&path).is_ok_and(|found| found == text.as_bytes())
            && fs::metadata(&path).is_ok_and(theirs)
        {
            return Ok(());
        }
        let aside = path.with_extension("new");
        match fs::remove_file(&aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        file.write_all(text.as_bytes())?;
        if let Some((user, group)) = owner {
            chown(&aside, Some(user), Some(group))?;
        }
        fs::rename(aside, path)
    }

    /// Hands the charm over to the unit's user, if it was the agent's own so far. Of anybody else's it is left as it is: who
    /// can change it while we look could have us hand over what is not in it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn hand_over(&self) -> io::Result<()> {
        let Some((user, group)) = self.user()? else { return Ok(()) };
        let agent = rustix::process::geteuid().as_raw();
        match fs::symlink_metadata(self.charm()) {
            Ok(charm) if user != agent && charm.uid() == agent => give_tree(&self.charm(), (user, group)),
            // A unit that was removed may never have had one.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// What running a hook of this unit takes. `None` if the charm has no such hook.
    ///
    /// # Errors
    /// If that cannot be told, or if it has no user to run as.
    pub fn order(&self, name: &UnitName, Run { hook, number }: Run) -> io::Result<Option<Order>> {
        let charm = self.charm();
        let program = charm.join("hooks").join(hook.name());
        // A link that leads nowhere is a hook that cannot be run, and not one that is missing. Nor is one that nobody can look for.
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
            ("JUJU_ENV", self.site.environment.to_string()),
            (RUN, text(&self.run_name(number))),
            ("JUJU_HOOK_NAME", hook.name().to_owned()),
            ("JUJU_UNIT_NAME", name.to_string()),
            ("JUJU_ZOOKEEPER", self.site.address.to_string()),
            ("LANG", "C.UTF-8".to_owned()),
            ("PATH", self.site.path.clone()),
        ];
        Ok(Some(Order {
            program,
            directory: charm,
            variables: BTreeMap::from(variables.map(|(name, value)| (name.to_owned(), value))),
            user: self.user()?,
            limit_ms: u64::try_from(self.site.limit.as_millis()).unwrap_or(u64::MAX),
            log: self.log(),
            open_files: open_files_at_start(),
            limits: Some(self.site.limits),
            has_own_user: matches!(self.site.user, HookUser::Each(_)),
        }))
    }

    /// Writes down what running a hook takes. Says whether the charm has that hook.
    ///
    /// # Errors
    /// Those of [`Self::order`], and of the file system.
    pub fn put_order(&self, name: &UnitName, run: Run) -> io::Result<bool> {
        let Some(order) = self.order(name, run)? else { return Ok(false) };
        self.runs().order(run.number, &order).map(|()| true)
    }

    /// What tells the processes of one run from all others.
    fn run_name(&self, number: u64) -> PathBuf {
        self.runs_dir().join(number.to_string())
    }

    /// Ends what is left of a run whose end nobody saw.
    ///
    /// # Errors
    /// If it does not end.
    pub fn end_run(&self, number: u64) -> io::Result<()> {
        // The unit's group has what earlier runs left on purpose.
        let marks = Marks { variable: (RUN, &self.run_name(number)), groups: BTreeSet::new() };
        leftover::end(&marks).map(drop)
    }

    /// Ends everything that the unit's hooks left behind.
    ///
    /// # Errors
    /// If it does not end.
    pub fn end_all(&self) -> io::Result<()> {
        let groups = cgroup::noted(&self.runs_dir());
        let marks = Marks { variable: (CREDENTIALS, &self.credentials()), groups };
        leftover::end(&marks)?;
        // Before the note of them goes, which is the last that is known of them.
        marks.groups.iter().try_for_each(Group::remove)
    }

    /// Runs what was ordered, in a process and a group of its own, and waits for it.
    ///
    /// # Errors
    /// If it cannot be started, or says that it cannot do its work.
    pub fn run(&self, number: u64) -> io::Result<()> {
        let mut runner = Command::new(&self.site.runner);
        runner.arg("run-hook").arg(self.runs_dir()).arg(number.to_string());
        runner.env_clear().current_dir("/");
        runner.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut runner, 0);
        // How the hook ended is in a file, for whoever asks: us, or the agent after us.
        let ran = runner.output()?;
        let said = String::from_utf8_lossy(&ran.stderr);
        match ran.status.code() {
            // Ended by somebody else: what was begun is looked for.
            Some(0) | None => {
                if !said.is_empty() {
                    warn!(unit = %self.id, said = said.trim_end(), "hook's runner had something to say");
                }
                Ok(())
            }
            Some(_) => {
                let line = said.lines().next().unwrap_or("nobody knows why");
                Err(io::Error::other(line.strip_prefix("error: ").unwrap_or(line).to_owned()))
            }
        }
    }

    /// Everything that the unit had, with nothing left to be stopped. That goes first, since it makes no sense without the rest;
    /// the directory that it was in goes last, so that a second attempt finds it.
    ///
    /// # Errors
    /// Those of the file system.
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
