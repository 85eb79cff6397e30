//! `juju add-machine`: a machine for units to come, to be launched, or one that exists already.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// An instance that exists already: it is used, and never terminated
    #[arg(long, value_name = "ID")]
    instance_id: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let instance = args.instance_id.as_deref().map(typed).transpose()?;
    let machine =
        globals.in_environment(async |_, environment| Ok(environment.add_machine(instance).await?)).await?;
    output::message(&format!("Machine {machine} was added."));
    Ok(())
}
