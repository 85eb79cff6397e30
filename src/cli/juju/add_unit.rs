//! `juju add-unit`: adds units to a service.

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::{MachineId, ServiceName};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Service to add units to
    service: String,
    /// Number of units to add
    #[arg(short = 'n', long = "num-units", value_name = "UNITS", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    units: u32,
    /// Machine to place all new units on [default: see `juju bootstrap --placement`]
    #[arg(long, value_name = "MACHINE")]
    to: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let service: ServiceName = parse_arg(&args.service)?;
    let to: Option<MachineId> = args.to.as_deref().map(parse_arg).transpose()?;
    let added = globals
        .in_environment(async |_, environment| Ok(environment.add_units(&service, args.units, to).await?))
        .await?;
    for unit in added {
        output::message(&format!("Unit '{}' added to service '{service}'", unit.name));
    }
    Ok(())
}
