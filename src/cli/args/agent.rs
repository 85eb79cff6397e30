//! Options of all roles that manage firewall rules: the resync interval, the policy file and the
//! metrics endpoint.

#[cfg(feature = "fleet")]
use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;

use crate::cli::args::metrics::MetricsArgs;
use crate::cli::error::{self, Refusal};
#[cfg(feature = "fleet")]
use crate::cli::portcullis::up::data_base;
use crate::firewall::controller::PolicyReader;
use crate::firewall::policy::{self, Policy};
#[cfg(feature = "fleet")]
use crate::model::NodeName;
use crate::runtime::trusted_file;

#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct AgentArgs {
    /// Seconds between two complete comparisons of wanted and actual rules
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(in crate::cli) resync: u64,
    /// File with the ports and sources that are never opened, read again at every resync. If a
    /// later version is invalid, the last policy stays in force and status shows the problem
    /// [default: ssh, the store's ports and those of --metrics and --heartbeat]
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) policy: Option<PathBuf>,
    #[command(flatten)]
    pub(in crate::cli) metrics: MetricsArgs,
}

impl AgentArgs {
    pub(in crate::cli) fn resync(&self) -> Duration {
        Duration::from_secs(self.resync)
    }

    /// Returns `base` with the changes of the policy file, if one was named.
    pub(in crate::cli) fn policy(&self, base: Policy) -> anyhow::Result<Policy> {
        let Some(path) = &self.policy else { return Ok(base) };
        let bytes = trusted_file::read_trusted(path, policy::MAX_BYTES)?
            .ok_or_else(|| Refusal::NoPolicy { path: path.to_owned() })?;
        let wrong = || format!("cannot use the policy in {}", path.display());
        let text = std::str::from_utf8(&bytes).with_context(wrong)?;
        base.changed_by(text).with_context(wrong)
    }

    /// Returns a function that reads the policy file again over the same `base`; `None` if no file
    /// was named.
    pub(in crate::cli) fn policy_reader(&self, base: Policy) -> Option<PolicyReader> {
        self.policy.as_ref()?;
        let agent_args = self.clone();
        Some(Box::new(move || {
            agent_args.policy(base.clone()).map_err(|error| {
                let repair = error::hint(&error).map_or_else(String::new, |hint| format!("; {hint}"));
                format!("{error:#}{repair}")
            })
        }))
    }
}

/// Returns the directory for the state of agents; `None` if no variable names one.
#[cfg(feature = "fleet")]
pub(in crate::cli) fn agents_dir() -> Option<PathBuf> {
    let base = data_base(env::var_os("XDG_DATA_HOME"), env::var_os("HOME"));
    base.map(|base| base.join("portcullis-agents"))
}

/// Returns the file for the proxy services of a node.
#[cfg(feature = "fleet")]
pub(in crate::cli) fn proxies_file(directory: Option<PathBuf>, node: &NodeName) -> Option<PathBuf> {
    directory.map(|directory| directory.join(format!("proxies-{node}.json")))
}

/// Returns a random part of a duration, which spreads retries.
#[cfg(feature = "fleet")]
pub(in crate::cli) fn part_of(whole: Duration) -> Duration {
    let nanoseconds = u64::try_from(whole.as_nanos()).unwrap_or(u64::MAX);
    Duration::from_nanos(jitter() % nanoseconds.max(1))
}

/// Returns a random number that spreads retries, or 0 if the system has no randomness.
pub(in crate::cli) fn jitter() -> u64 {
    getrandom::u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_named_policy_file_is_used_or_refused() {
        let base = Policy::with_own_ports([4711, 2182]);
        let read = |path: Option<&Path>| {
            let policy = path.map(Path::to_owned);
            AgentArgs { resync: 60, policy, metrics: MetricsArgs::default() }.policy(base.clone())
        };
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("policy.yaml");
        assert_eq!(read(None).unwrap(), base);
        let missing = format!("{:#}", read(Some(&path)).unwrap_err());
        assert!(missing.ends_with("policy.yaml does not exist"), "{missing}");
        std::fs::write(&path, "max-rules: 3\n").unwrap();
        assert_eq!(read(Some(&path)).unwrap().max_rules(), 3);
        for broken in [&b"max-rulse: 3\n"[..], b"\xff\xfe", b"forbidden-ports: [0]", b"", b"# nothing\n"] {
            std::fs::write(&path, broken).unwrap();
            let refused = format!("{:#}", read(Some(&path)).unwrap_err());
            assert!(refused.contains("cannot use the policy in ") && !refused.contains('\n'), "{refused}");
        }
        std::fs::write(&path, vec![b' '; policy::MAX_BYTES + 1]).unwrap();
        assert!(read(Some(&path)).is_err());
        std::fs::write(&path, "max-rules: 3\n").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        let refused = read(Some(&path)).unwrap_err();
        assert!(format!("{refused:#}").contains("can be written by other users (mode 0666)"), "{refused:#}");
    }
}
