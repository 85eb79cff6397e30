//! `juju add-machine`: adds a machine that the controller launches, or an existing instance.

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Existing instance to use; it is never terminated [default: the controller launches one]
    #[arg(long, value_name = "ID")]
    instance_id: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let instance = args.instance_id.as_deref().map(parse_arg).transpose()?;
    let machine =
        globals.in_environment(async |_, environment| Ok(environment.add_machine(instance).await?)).await?;
    output::message(&format!("Machine {machine} was added."));
    Ok(())
}
