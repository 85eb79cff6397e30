//! `juju destroy-service`: removes a service with all its units. Machines stay.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::{CharmHash, ServiceName};
use crate::store::records::CHARM_HASH;
use crate::store::{Environment, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Service to remove
    service: String,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let name: ServiceName = typed(&args.service)?;
    globals.in_environment(async |_, environment| destroy(environment, &name).await).await
}

async fn destroy(environment: &Environment<ZkTree>, name: &ServiceName) -> anyhow::Result<()> {
    // A record that cannot be read does not say which charm goes with it, and is destroyed all the same.
    let record = environment.service(name).await.ok();
    let hash = record.and_then(|(_, record)| CharmHash::parse(record.rest.get(CHARM_HASH)?.as_str()?));
    environment.destroy_service(name).await?;
    output::message(&format!("Service '{name}' destroyed."));
    if let Some(hash) = hash
        && let Err(error) = environment.sweep_charm(&hash).await
    {
        let error = anyhow::Error::new(error).context(format!("charm {hash} stays in the store"));
        output::message(&format!("{error:#}"));
    }
    Ok(())
}
