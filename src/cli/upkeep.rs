//! What all roles that look after rules are told in the same words, and do in the same way: how often everything is compared,
//! what may never be opened, who may look on, and how a last pass ends.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::watch;

use super::failure::{self, Refusal};
use super::file;
use super::metrics::Watched;
use crate::firewall::agent::PolicyReader;
use crate::firewall::policy::{self, Policy};

/// How long a pass that is under way may take once we are asked to end.
pub(super) const LAST_PASS: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, Args)]
pub(super) struct Upkeep {
    /// Everything is compared this often, whatever was noticed in between
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) resync: u64,
    /// File with the ports and sources that are never opened, read again at every resync. A file
    /// that cannot be used then leaves the last policy in force, and status shows the problem
    /// [default: ssh, the store's ports and those of --metrics and --heartbeat]
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    #[command(flatten)]
    pub(super) watched: Watched,
}

impl Upkeep {
    pub(super) fn resync(&self) -> Duration {
        Duration::from_secs(self.resync)
    }

    /// What the file says over `base`, or `base` if none was named.
    pub(super) fn policy(&self, base: Policy) -> anyhow::Result<Policy> {
        let Some(path) = &self.policy else { return Ok(base) };
        let bytes = file::read_trusted(path, policy::MAX_BYTES)?
            .ok_or_else(|| Refusal::NoPolicy { path: path.to_owned() })?;
        let wrong = || format!("cannot use the policy in {}", path.display());
        let text = std::str::from_utf8(&bytes).with_context(wrong)?;
        base.changed_by(text).with_context(wrong)
    }

    /// Reads the policy file again, over the same `base`. `None` if no file was named.
    pub(super) fn policy_reader(&self, base: Policy) -> Option<PolicyReader> {
        self.policy.as_ref()?;
        let upkeep = self.clone();
        Some(Box::new(move || {
            upkeep.policy(base.clone()).map_err(|error| {
                let repair = failure::hint(&error).map_or_else(String::new, |hint| format!("; {hint}"));
                format!("{error:#}{repair}")
            })
        }))
    }
}

/// Lets who was asked to end come to its end, but not for ever. Whatever else is to be ended must not hang on the answer.
pub(super) async fn last_pass<E: Into<anyhow::Error>>(
    running: impl Future<Output = Result<(), E>>,
) -> anyhow::Result<()> {
    match tokio::time::timeout(LAST_PASS, running).await {
        Ok(ended) => ended.map_err(Into::into),
        Err(_) => Err(anyhow::anyhow!("the last pass does not end")),
    }
}

/// Runs until it ends by itself or `stop` says so, and then for a last pass. A sender of `stop` that is gone means the same
/// as its word.
pub(super) async fn until_stopped<E: Into<anyhow::Error>>(
    running: impl Future<Output = Result<(), E>>,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let mut running = std::pin::pin!(running);
    tokio::select! {
        biased;
        ended = &mut running => return ended.map_err(Into::into),
        _ = stop.wait_for(|stop| *stop) => {}
    }
    last_pass(running).await
}

/// Spreads retries. Without the system's randomness they are only less spread.
pub(super) fn jitter() -> u64 {
    getrandom::u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_policy_that_was_named_is_used_or_refused() {
        let base = Policy::with_own_ports([4711, 2182]);
        let read = |path: Option<&Path>| {
            let policy = path.map(Path::to_owned);
            Upkeep { resync: 60, policy, watched: Watched::default() }.policy(base.clone())
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

    #[tokio::test(start_paused = true)]
    async fn a_last_pass_that_hangs_is_a_failure_to_be_told_in_order() {
        let hangs = last_pass(std::future::pending::<anyhow::Result<()>>());
        let told = tokio::time::timeout(2 * LAST_PASS, hangs).await.expect("an end");
        assert_eq!(told.unwrap_err().to_string(), "the last pass does not end");
        last_pass(std::future::ready(anyhow::Ok(()))).await.unwrap();
        let failed = last_pass(std::future::ready(Err(anyhow::anyhow!("no")))).await;
        assert_eq!(failed.unwrap_err().to_string(), "no");
    }

    #[tokio::test(start_paused = true)]
    async fn only_who_was_asked_to_end_is_cut_off() {
        let (stop, stopped) = watch::channel(false);
        let long = 10 * LAST_PASS;
        let works = async {
            tokio::time::sleep(long).await;
            anyhow::Ok(())
        };
        until_stopped(works, stopped.clone()).await.unwrap();
        let begun = tokio::time::Instant::now();
        let asking = async {
            tokio::time::sleep(long).await;
            stop.send_replace(true);
        };
        let hangs = until_stopped(std::future::pending::<anyhow::Result<()>>(), stopped);
        let (ended, ()) = tokio::join!(hangs, asking);
        assert_eq!(ended.unwrap_err().to_string(), "the last pass does not end");
        assert_eq!(begun.elapsed(), long + LAST_PASS);
    }
}
