//! How a machine runs its units, as it is typed: where their files are, who runs their hooks, and for how long.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::failure::Usage;
use super::hook_env;
use super::machine_file::MachineFile;
use crate::model::{EnvironmentName, MachineId};
use crate::unit::site::{DEFAULT_LIMIT, HookUser, Site};

/// Leaves room for more units than there will ever be.
const MAX_FIRST_USER: u32 = 4_000_000_000;

#[derive(Debug, Clone, Args)]
pub(super) struct UnitOptions {
    /// Where the units' files are [default: below the data directory]
    #[arg(long, value_name = "DIR")]
    units_dir: Option<PathBuf>,
    /// Who runs the hooks: USER or UID:GID for all of them, or UID+ for a user of its own for each unit, counted from
    /// there [default: whoever runs this]
    #[arg(long, value_name = "USER")]
    hook_user: Option<String>,
    /// A hook that takes longer is ended
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LIMIT.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    hook_timeout: u64,
}

impl UnitOptions {
    /// What the machine's units have in common. `data` is where their files go unless it was said.
    pub(super) fn site(
        &self,
        environment: &EnvironmentName,
        machine: MachineId,
        file: &MachineFile,
        data: &Path,
        resync: Duration,
    ) -> anyhow::Result<Site> {
        let user = match self.hook_user.as_deref() {
            Some(user) => find_user(user, &read_passwd()).map_err(Usage::new)?,
            None => HookUser::Agents,
        };
        let directory = self.units_dir.clone().unwrap_or_else(|| data.join(machine.key()));
        Ok(Site {
            machine,
            identity: file.credential.identity(),
            roles: file.roles.clone(),
            environment: environment.clone(),
            address: file.address.clone(),
            directory: std::path::absolute(directory)?,
            runner: std::env::current_exe()?,
            path: hook_env::hook_path()?,
            user,
            limit: Duration::from_secs(self.hook_timeout),
            resync,
        })
    }
}

/// Without the file, users go by their numbers.
fn read_passwd() -> String {
    fs::read_to_string("/etc/passwd").unwrap_or_default()
}

fn find_user(typed: &str, passwd: &str) -> Result<HookUser, String> {
    if let Some(Ok(first)) = typed.strip_suffix('+').map(str::parse::<u32>)
        && (1..=MAX_FIRST_USER).contains(&first)
    {
        return Ok(HookUser::Each(first));
    }
    let numbers = typed.split_once(':').map(|(user, group)| (user.parse(), group.parse()));
    if let Some((Ok(user), Ok(group))) = numbers {
        return Ok(HookUser::One(user, group));
    }
    let entry =
        passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|entry| entry[0] == typed);
    let found =
        entry.and_then(|entry| Some(HookUser::One(entry.get(2)?.parse().ok()?, entry.get(3)?.parse().ok()?)));
    found.ok_or_else(|| {
        format!("no user '{}' on this machine; UID:GID and UID+ are taken as well", typed.escape_debug())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_go_by_name_or_by_numbers() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nweb:x:33:44::/var/www:/bin/false\nodd:x:a:b\n\n";
        assert_eq!(find_user("web", passwd), Ok(HookUser::One(33, 44)));
        assert_eq!(find_user("1000:1001", passwd), Ok(HookUser::One(1000, 1001)));
        assert_eq!(find_user("100000+", passwd), Ok(HookUser::Each(100_000)));
        for unknown in ["nobody", "odd", "33", "33:x", "", "-1:5", "+", "0+", "4294967295+"] {
            let refused = find_user(unknown, passwd).expect_err(unknown);
            assert!(refused.starts_with("no user '"), "{refused}");
        }
    }
}
