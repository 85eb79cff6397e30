//! The issuer of certificates as a role of `controller` and `up`, on hosts that have the key of the
//! environment's authority.

use anyhow::Context as _;
use tracing::{error, info};

use crate::cli::args::environment::{Settings, wait_for_store};
use crate::cli::authority;
use crate::cli::error::Refusal;
use crate::identity::issuer::Issuer;
use crate::net::tls::authority::Authority;
use crate::runtime::clock::wall_ms;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::store::ZkTree;

/// Starts the role with a session of its own, if this host has the key.
pub(super) fn start(service: &mut Service<anyhow::Error>, settings: Settings) -> anyhow::Result<()> {
    if authority::read(&settings.config, &settings.environment)?.is_none() {
        let path = settings.config.authority(&settings.environment);
        info!(missing = %path.display(), "certificates are not issued by this process");
        return Ok(());
    }
    if settings.saved.is_none() {
        // The process cannot start without credentials, and another role reports that.
        return Ok(());
    }
    service.start("issuer", OnEnd::Continue, |mut stop| async move {
        let opened = tokio::select! {
            opened = wait_for_store(|| open(&settings)) => opened,
            () = stopped(&mut stop) => return Ok(()),
        };
        let (tree, authority) = match opened {
            Err(other) if matches!(other.downcast_ref(), Some(Refusal::OtherAuthority { .. })) => {
                error!(reason = %other, "certificates are not issued");
                return Ok(());
            }
            opened => opened?,
        };
        let ended = Issuer::new(tree.clone(), authority, wall_ms).run(stop).await;
        tree.close().await;
        ended.context("certificates are not issued")
    });
    Ok(())
}

/// Connects to the store, and refuses a key of another authority than the environment's.
async fn open(settings: &Settings) -> anyhow::Result<(ZkTree, Authority)> {
    let (config, environment) = (&settings.config, &settings.environment);
    let tree = settings.open().await?.into_tree();
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
