//! `juju terminate-machine`: lets machines go, all that were named or none.

use std::collections::BTreeSet;

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::MachineId;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Machines to terminate, by number
    #[arg(required = true, value_name = "ID")]
    machines: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let ids = args.machines.iter().map(|id| typed(id)).collect::<Result<BTreeSet<MachineId>, _>>()?;
    let ids: Vec<MachineId> = ids.into_iter().collect();
    globals.in_environment(async |_, environment| Ok(environment.terminate_machines(&ids).await?)).await?;
    let shown: Vec<String> = ids.iter().map(ToString::to_string).collect();
    output::message(&format!("Machines terminated: {}", shown.join(", ")));
    Ok(())
}
