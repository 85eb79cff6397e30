//! `juju destroy-service`: removes a service and all its units, but no machines.

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::{CharmHash, ServiceName};
use crate::store::records::CHARM_HASH;
use crate::store::{Environment, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Service to remove
    service: String,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let name: ServiceName = parse_arg(&args.service)?;
    globals.in_environment(async |_, environment| destroy(environment, &name).await).await
}

async fn destroy(environment: &Environment<ZkTree>, name: &ServiceName) -> anyhow::Result<()> {
    // If the record cannot be read, the service is destroyed and its charm stays in the store.
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
