//! `juju terminate-machine`: terminates machines, all that are named or none.

use std::collections::BTreeSet;

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::MachineId;
use crate::store::Termination;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Machines to terminate, by number
    #[arg(required = true, value_name = "ID")]
    machines: Vec<String>,
    /// Also remove the units of the machines, and machines whose agents are down. An agent that
    /// returns later removes its units and leaves
    #[arg(long)]
    force: bool,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let ids = args.machines.iter().map(|id| parse_arg(id)).collect::<Result<BTreeSet<MachineId>, _>>()?;
    let ids: Vec<MachineId> = ids.into_iter().collect();
    let how = if args.force { Termination::Forced } else { Termination::Ordinary };
    globals.in_environment(async |_, environment| Ok(environment.terminate(&ids, how).await?)).await?;
    let shown: Vec<String> = ids.iter().map(ToString::to_string).collect();
    output::message(&format!("Machines terminated: {}", shown.join(", ")));
    Ok(())
}
