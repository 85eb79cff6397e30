//! `juju unexpose`: removes the exposed flag of a service. The firewall controller then closes its
//! ports.

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::ServiceName;
use crate::store::Flag;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Service to unexpose
    service: String,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let name: ServiceName = parse_arg(&args.service)?;
    let became =
        globals.in_environment(async |_, environment| Ok(environment.unexpose(&name).await?)).await?;
    output::message(&match became {
        Flag::Changed => format!("Service '{name}' was unexposed."),
        Flag::AlreadySo => format!("Service '{name}' was not exposed."),
    });
    Ok(())
}
