//! `juju destroy-service`: removes a service with all its units. Machines stay.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::ServiceName;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Service to remove
    service: String,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let name: ServiceName = typed(&args.service)?;
    globals.in_environment(async |_, environment| Ok(environment.destroy_service(&name).await?)).await?;
    output::message(&format!("Service '{name}' destroyed."));
    Ok(())
}
