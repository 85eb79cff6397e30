//! The issuer of certificates as a role of `controller` and `up`, on hosts that have the key of the
//! environment's authority. It also renews the certificates of the operator and the controller on
//! that host.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context as _;
use tracing::{error, info, warn};

use crate::cli::args::environment::{Target, wait_for_store};
use crate::cli::authority;
use crate::cli::error::Refusal;
use crate::identity::issuer::Issuer;
use crate::net::tls::authority::Authority;
use crate::runtime::clock::wall_ms;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::store::ZkTree;

/// Time between two checks of the age of certificates, and of the addresses of the host.
const CHECK: Duration = Duration::from_secs(3600);

/// Starts the role with a session of its own, if this host has the key.
pub(super) fn start(service: &mut Service<anyhow::Error>, target: Target) -> anyhow::Result<()> {
    if authority::read(&target.config, &target.environment)?.is_none() {
        let path = target.config.authority(&target.environment);
        info!(missing = %path.display(), "certificates are not issued by this process");
        return Ok(());
    }
    if target.saved.is_none() {
        // The process cannot start without credentials, and another role reports that.
        return Ok(());
    }
    service.start("issuer", OnEnd::Continue, |mut stop| async move {
        let opened = tokio::select! {
            opened = wait_for_store(|| open(&target)) => opened,
            () = stopped(&mut stop) => return Ok(()),
        };
        let (tree, authority) = match opened {
            Err(other) if matches!(other.downcast_ref(), Some(Refusal::OtherAuthority { .. })) => {
                error!(reason = %other, "certificates are not issued");
                return Ok(());
            }
            opened => opened?,
        };
        let for_roles = Authority::load(authority.certificate(), authority.key())?;
        let ended = tokio::select! {
            ended = Issuer::new(tree.clone(), authority, wall_ms).run(stop) => ended,
            never = check_hourly("of the operator and the controller", || {
                authority::issue_to_roles(&target.config, &target.environment, &for_roles)
            }) => match never {},
        };
        tree.close().await;
        ended.context("certificates are not issued")
    });
    Ok(())
}

/// Connects to the store, and refuses a key of another authority than the environment's.
async fn open(target: &Target) -> anyhow::Result<(ZkTree, Authority)> {
    let (config, environment) = (&target.config, &target.environment);
    let tree = target.open().await?.into_tree();
    let read = authority::read_published(config, environment, &tree).await;
    let path = config.authority(environment);
    let found = read.and_then(|read| read.with_context(|| format!("{} was removed", path.display())));
    match found {
        Ok(authority) => Ok((tree, authority)),
        Err(error) => {
            tree.close().await;
            Err(error)
        }
    }
}

/// Runs `renew` now and every hour, which renews certificates before they expire.
pub(super) async fn check_hourly(
    certificate: &str,
    mut renew: impl FnMut() -> anyhow::Result<()>,
) -> Infallible {
    loop {
        if let Err(error) = renew() {
            let problem = format!("{error:#}");
            warn!(certificate, problem, "certificate cannot be renewed");
        }
        tokio::time::sleep(CHECK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::config::{ConfigDir, Role};
    use crate::net::tls::authority::{Names, ROLE_LIFETIME, Validity};
    use crate::net::tls::key::PrivateKey;

    #[tokio::test(start_paused = true)]
    async fn certificates_of_roles_are_renewed_while_the_process_runs() {
        let home = tempfile::tempdir().unwrap();
        let target = Target {
            environment: "prod".parse().unwrap(),
            role: Role::Controller,
            config: ConfigDir::below(home.path()),
            address: "127.0.0.1:2181".parse().unwrap(),
            saved: None,
        };
        let authority = Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
        let files = [Role::Operator, Role::Controller]
            .map(|role| authority::role_identity(&target.config, &target.environment, role));
        let installed = || files.each_ref().map(|files| files.certificate().unwrap());
        let mut old = [None, None];
        let work = async {
            tokio::time::sleep(CHECK / 2).await;
            let made = installed();
            tokio::time::sleep(CHECK).await;
            assert_eq!(installed(), made, "they are not due for renewal");
            let lifetime_ms = Validity::starting(0, ROLE_LIFETIME).until_ms;
            let validity = Validity::starting(wall_ms() - lifetime_ms * 3 / 4, ROLE_LIFETIME);
            for (files, name) in files.iter().zip(["operator", "controller"]) {
                let key = files.ensure_key().unwrap();
                files.install(&authority.issue_for(&key, &Names::of([name]), validity).unwrap()).unwrap();
            }
            old = installed();
            tokio::time::sleep(CHECK).await;
        };
        tokio::select! {
            never = check_hourly("of roles", || {
                authority::issue_to_roles(&target.config, &target.environment, &authority)
            }) => match never {},
            () = work => {}
        }
        let renewed = installed();
        for (renewed, old) in renewed.iter().zip(&old) {
            let [renewed, old] = [renewed, old].map(|found| found.as_ref().unwrap().validity().until_ms);
            assert!(renewed > old && renewed > wall_ms(), "{renewed} {old}");
        }
    }
}
