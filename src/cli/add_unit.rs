//! `juju add-unit`: more units of a service that is there.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::{MachineId, ServiceName};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Service to add to
    service: String,
    /// How many
    #[arg(short = 'n', long = "num-units", value_name = "UNITS", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    units: u32,
    /// Machine that all of them go to
    #[arg(long, value_name = "MACHINE")]
    to: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let service: ServiceName = typed(&args.service)?;
    let to: Option<MachineId> = args.to.as_deref().map(typed).transpose()?;
    let added = globals
        .in_environment(async |_, environment| Ok(environment.add_units(&service, args.units, to).await?))
        .await?;
    for unit in added {
        output::message(&format!("Unit '{}' added to service '{service}'", unit.name));
    }
    Ok(())
}
