//! The issuer of certificates as a role of `controller` and `up`, on hosts that have the key of the
//! environment's authority. It also renews the certificates of the operator and the controller on
//! that host. On every host, it deletes the offers of expired tokens.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::cli::args::environment::{Target, wait_for_store};
use crate::cli::authority;
use crate::cli::error::Refusal;
use crate::identity::expired_offers;
use crate::identity::issuer::Issuer;
use crate::net::tls::authority::Authority;
use crate::runtime::clock::wall_ms;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::store::ZkTree;

/// Time between two checks of the age of certificates, and of the addresses of the host.
const CHECK: Duration = Duration::from_secs(3600);

/// Starts the role with a session of its own. Without the key, it issues no certificates.
pub(super) fn start(service: &mut Service<anyhow::Error>, target: Target) -> anyhow::Result<()> {
    if authority::read(&target.config, &target.environment)?.is_none() {
        let path = target.config.authority(&target.environment);
        info!(missing = %path.display(), "certificates are not issued by this process");
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
        let (tree, authority) = opened?;
        let ended = tokio::select! {
            ended = issue(&target, &tree, authority, stop) => ended,
            never = expired_offers::keep_deleting(&tree, wall_ms) => match never {},
        };
        tree.close().await;
        ended
    });
    Ok(())
}

/// Connects to the store, and reads the authority. A key of another authority than the
/// environment's is not used.
async fn open(target: &Target) -> anyhow::Result<(ZkTree, Option<Authority>)> {
    let tree = target.open().await?.into_tree();
    match authority::read_published(&target.config, &target.environment, &tree).await {
        Ok(authority) => Ok((tree, authority)),
        Err(other) if matches!(other.downcast_ref(), Some(Refusal::OtherAuthority { .. })) => {
            error!(reason = %other, "certificates are not issued");
            Ok((tree, None))
        }
        Err(error) => {
            tree.close().await;
            Err(error)
        }
    }
}

/// Issues certificates with the authority's key, if there is one, until the process stops.
async fn issue(
    target: &Target,
    tree: &ZkTree,
    authority: Option<Authority>,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let Some(authority) = authority else {
        stopped(&mut stop).await;
        return Ok(());
    };
    let for_roles = Authority::load(authority.certificate(), authority.key())?;
    let ended = tokio::select! {
        ended = Issuer::new(tree.clone(), authority, wall_ms).run(stop) => ended,
        never = check_hourly("of the operator and the controller", || {
            authority::issue_to_roles(&target.config, &target.environment, &for_roles)
        }) => match never {},
    };
    ended.context("certificates are not issued")
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
