//! Flags of a machine's units: the directory of their files, the user and the limits of their
//! hooks.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, io};

use anyhow::{Context as _, bail};
use clap::Args;
use rustix::process::geteuid;
use tracing::{info, warn};

use crate::cli::args::hook_user::{self, Powers};
use crate::cli::error::{Refusal, Usage};
use crate::cli::file;
use crate::cli::juju::hook_env;
use crate::machine::file::MachineFile;
use crate::model::{EnvironmentName, MachineId, digest_prefix};
use crate::runtime::trusted_path;
use crate::unit::host::{DEFAULT_LIMIT, HookUser, UnitHost, check_directory};
use crate::unit::limits::HookLimits;

#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct UnitArgs {
    /// Directory for the units' files. It is refused if other users own it, or can write to it or
    /// to a directory above it [default: below the data directory; for hooks of another user below
    /// $XDG_DATA_HOME/portcullis-units, or /var/lib/portcullis-units]
    #[arg(long, value_name = "DIR")]
    units_dir: Option<PathBuf>,
    /// User that runs hooks: USER or UID:GID for all units, or UID+ for a separate user for each
    /// unit, numbered from UID [default: as root a separate user for each, else the agent's own]
    #[arg(long, value_name = "USER")]
    hook_user: Option<String>,
    /// Seconds after which a running hook is killed
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LIMIT.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    hook_timeout: u64,
    /// Maximum number of processes (including threads) and memory of each unit: its hooks and
    /// everything that they start. `none` removes a limit. Memory is limited only if the agent's
    /// control group has the memory controller
    #[arg(long, value_name = "LIMITS", default_value_t = HookLimits::default())]
    hook_limits: HookLimits,
}

impl UnitArgs {
    /// Whether the directory was named.
    pub(in crate::cli) fn names_directory(&self) -> bool {
        self.units_dir.is_some()
    }

    /// The same flags with this directory, unless another one was named.
    pub(in crate::cli) fn or_directory(&self, directory: Option<PathBuf>) -> Self {
        Self { units_dir: self.units_dir.clone().or(directory), ..self.clone() }
    }

    /// Returns what the machine's units have in common. `data` is the default directory of their
    /// files.
    pub(in crate::cli) fn host(
        &self,
        environment: &EnvironmentName,
        machine: MachineId,
        file: &MachineFile,
        data: &Path,
        resync: Duration,
    ) -> anyhow::Result<UnitHost> {
        let user = self.user()?;
        let another = hook_user::is_another(user, geteuid().as_raw());
        let usual = data.join(machine.key());
        let directory = match &self.units_dir {
            Some(given) => std::path::absolute(given)?,
            None if another => {
                let usual = std::path::absolute(usual)?;
                warn_of(&usual);
                ensure_open_place(environment, machine, &usual)?
            }
            None => std::path::absolute(usual)?,
        };
        // Checked before anything is written to it.
        check_directory(&directory)
            .with_context(|| format!("cannot use {} for units", directory.display()))?;
        let mut tools = tools()?;
        if another {
            check_way(user, directory.parent().unwrap_or(&directory))?;
            if hook_user::closed_to(user, &tools.join(TOOLS[0])).is_some() {
                tools = carry_tools(&tools, &directory)
                    .with_context(|| format!("cannot bring the hook tools to {}", directory.display()))?;
            }
        }
        info!(directory = %directory.display(), "directory of unit files");
        Ok(UnitHost {
            machine,
            identity: file.credential.identity(),
            roles: file.roles.clone(),
            environment: environment.clone(),
            address: file.address.clone(),
            directory,
            runner: env::current_exe()?,
            path: hook_env::hook_path(&tools),
            user,
            users: list_of_users(geteuid().is_root(), env::var_os(UNIT_USERS), env::var_os("XDG_DATA_HOME")),
            limit: Duration::from_secs(self.hook_timeout),
            limits: self.hook_limits,
            resync,
            charm_slot: Arc::default(),
        })
    }

    fn user(&self) -> anyhow::Result<HookUser> {
        // Without these files, users can be given by number only, and units share one user.
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        if let Some(typed) = self.hook_user.as_deref() {
            return Ok(hook_user::parse(typed, &read("/etc/passwd")).map_err(Usage::new)?);
        }
        let maps = [read("/proc/self/uid_map"), read("/proc/self/gid_map")];
        let maps = maps.each_ref().map(String::as_str);
        let (user, shared) = hook_user::usual(&Powers { is_root: geteuid().is_root(), maps });
        if let Some(why) = shared {
            warn!("hooks of all units run as this user and can access each other's files: {why}");
        }
        Ok(user)
    }
}

/// Returns the directory of the hook tools.
pub(in crate::cli) fn tools() -> anyhow::Result<PathBuf> {
    let directory = hook_env::tools_dir()?;
    if !TOOLS.iter().all(|tool| directory.join(tool).is_file()) {
        return Err(Refusal::NoHookTools { directory }.into());
    }
    Ok(directory)
}

/// Warns about units that an earlier agent ran as its own user: their files are in another
/// directory.
fn warn_of(usual: &Path) {
    let listed = fs::read_dir(usual.join("runs")).into_iter().flatten().filter_map(Result::ok);
    let units = listed.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).count();
    if units > 0 {
        warn!(
            directory = %usual.display(), units,
            "units that ran as this user are left as they are, with their files and processes; \
             --hook-user root continues with them"
        );
    }
}

/// Returns a directory that hooks of another user can reach. Its name contains a hash of the data
/// directory, so that environments of the same name do not share it.
fn ensure_open_place(
    environment: &EnvironmentName,
    machine: MachineId,
    usual: &Path,
) -> anyhow::Result<PathBuf> {
    let top = open_top(env::var_os("XDG_DATA_HOME"));
    if !top.exists() {
        let failed = || format!("cannot make {}", top.display());
        trusted_path::ensure_directory(&top, 0o711).with_context(failed)?;
        // The umask may have removed permissions.
        fs::set_permissions(&top, fs::Permissions::from_mode(0o711)).with_context(failed)?;
    }
    Ok(top.join(open_name(environment, machine, usual)))
}

/// Overrides the path of the list of users, for several simulated hosts on one, as in tests.
const UNIT_USERS: &str = "PORTCULLIS_UNIT_USERS";

/// Path of the list of UIDs that units were given. UIDs belong to the host, so root's list does not
/// depend on the data directory: with two lists, two units could get the same UID.
fn list_of_users(is_root: bool, set: Option<OsString>, xdg: Option<OsString>) -> PathBuf {
    let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
    set.unwrap_or_else(|| open_top(xdg.filter(|_| !is_root)).join("users.json"))
}

/// The same directory as of installed services. A relative or empty value counts as unset.
fn open_top(xdg: Option<OsString>) -> PathBuf {
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.unwrap_or_else(|| "/var/lib".into()).join("portcullis-units")
}

fn open_name(environment: &EnvironmentName, machine: MachineId, usual: &Path) -> String {
    let hash = digest_prefix(usual.as_os_str().as_encoded_bytes(), 6);
    format!("{environment}-{machine}-{hash}")
}

fn check_way(user: HookUser, place: &Path) -> anyhow::Result<()> {
    match hook_user::closed_to(user, place) {
        None => Ok(()),
        Some(closed) => bail!(
            "hook users cannot reach their files in {}: they have no search permission in {}; --hook-user \
             root runs hooks as root",
            place.display(),
            closed.display()
        ),
    }
}

const TOOLS: [&str; 3] = ["open-port", "close-port", "opened-ports"];

/// Copies the hook tools to a directory that hooks can reach: for example, hooks cannot reach tools
/// that were built in root's home. Repeated at every start, since the tools may have been rebuilt.
fn carry_tools(from: &Path, directory: &Path) -> io::Result<PathBuf> {
    let to = directory.join("tools");
    fs::create_dir_all(&to)?;
    // Hooks only need search permission in the directory, which may have other uses.
    for (place, open) in [(directory, 0o011), (&to, 0o755)] {
        let mode = fs::metadata(place)?.permissions().mode() & 0o7777;
        fs::set_permissions(place, fs::Permissions::from_mode(mode | open))?;
    }
    let is_missing =
        |tool: &&Path| from.join(tool).exists() && !has_same_bytes(&from.join(tool), &to.join(tool));
    for tool in TOOLS.map(Path::new).into_iter().filter(is_missing) {
        // Replaced atomically, since a hook may be running the tool.
        file::build_aside(&to.join(tool), |aside| {
            fs::copy(from.join(tool), aside)?;
            fs::set_permissions(aside, fs::Permissions::from_mode(0o755))
        })?;
    }
    Ok(to)
}

/// Whether a copy is up to date. An agent must start on a full disk, where it can copy nothing.
fn has_same_bytes(file: &Path, copy: &Path) -> bool {
    matches!((fs::read(file), fs::read(copy)), (Ok(file), Ok(copy)) if file == copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_tools_keeps_the_permissions_of_a_directory() {
        let home = tempfile::tempdir().unwrap();
        let (from, directory) = (home.path().join("from"), home.path().join("units"));
        for place in [&from, &directory] {
            fs::create_dir(place).unwrap();
        }
        fs::write(from.join("open-port"), "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for (before, after) in [(0o775, 0o775), (0o750, 0o751), (0o700, 0o711)] {
            fs::set_permissions(&directory, fs::Permissions::from_mode(before)).unwrap();
            let tools = carry_tools(&from, &directory).unwrap();
            assert_eq!(mode(&directory), after, "{before:o}");
            assert_eq!((mode(&tools), mode(&tools.join("open-port"))), (0o755, 0o755));
        }
    }

    #[test]
    fn unit_files_are_in_a_directory_that_other_users_can_reach() {
        let top = |xdg: Option<&str>| open_top(xdg.map(OsString::from));
        assert_eq!(top(Some("/d")), Path::new("/d/portcullis-units"));
        assert_eq!((top(None), top(Some("d"))), (top(Some("/var/lib")), top(Some("/var/lib"))));
        let list = |is_root, set: Option<&str>, xdg: Option<&str>| {
            list_of_users(is_root, set.map(OsString::from), xdg.map(OsString::from))
        };
        let hosts = Path::new("/var/lib/portcullis-units/users.json");
        for xdg in [None, Some("/d"), Some("/e")] {
            assert_eq!(list(true, None, xdg), hosts, "one list on a host");
            assert_eq!(list(true, Some("relative"), xdg), hosts);
            assert_eq!(list(true, Some("/t/users.json"), xdg), Path::new("/t/users.json"));
        }
        assert_eq!(list(false, None, Some("/d")), Path::new("/d/portcullis-units/users.json"));
        let local: EnvironmentName = "local".parse().unwrap();
        let name = |usual: &str| open_name(&local, MachineId::new(3), Path::new(usual));
        assert!(name("/a").starts_with("local-3-"), "{}", name("/a"));
        assert_ne!(name("/a"), name("/b"));
    }
}
