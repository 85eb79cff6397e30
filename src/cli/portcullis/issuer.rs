//! The issuer of certificates as a role of `controller` and `up`, on hosts that have the key of the
//! environment's authority.

use anyhow::Context as _;
use tracing::info;

use crate::cli::args::environment::Settings;
use crate::cli::authority;
use crate::identity::issuer::Issuer;
use crate::runtime::clock::wall_ms;
use crate::runtime::service::{OnEnd, Service, stopped};

/// Starts the role with a session of its own, if this host has the key.
pub(super) fn start(service: &mut Service<anyhow::Error>, settings: Settings) -> anyhow::Result<()> {
    let Some(authority) = authority::read(&settings.config, &settings.environment)? else {
        let path = settings.config.authority(&settings.environment);
        info!(missing = %path.display(), "certificates are not issued by this process");
        return Ok(());
    };
    if settings.saved.is_none() {
        // The process cannot start without credentials, and another role reports that.
        return Ok(());
    }
    service.start("issuer", OnEnd::Continue, |mut stop| async move {
        let opened = tokio::select! {
            opened = settings.wait_and_open() => opened?,
            () = stopped(&mut stop) => return Ok(()),
        };
        let tree = opened.into_tree();
        let ended = Issuer::new(tree.clone(), authority, wall_ms).run(stop).await;
        tree.close().await;
        ended.context("certificates are not issued")
    });
    Ok(())
}
