//! `juju add-machine`: adds a machine that the controller launches, an existing instance, or a
//! plain machine.

use crate::cli::args::environment::{Globals, Target};
use crate::cli::error::{Usage, parse_arg};
use crate::cli::juju::machine::{join_token, print_join_command};
use crate::cli::output;
use crate::store::{self, Environment, NewMachine, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Existing instance to use; it is never terminated [default: the controller launches one]
    #[arg(long, value_name = "ID")]
    instance_id: Option<String>,
    /// Name of the machine: lower-case letters, digits, '-' and '.', at most 63 characters
    /// [default: its number]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Address of a machine that exists already, so that no controller launches it [default: the
    /// one that its agent reports]
    #[arg(long, value_name = "ADDR", conflicts_with = "instance_id")]
    address: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let wanted = NewMachine {
        adopted: args.instance_id.as_deref().map(parse_arg).transpose()?,
        name: args.name.as_deref().map(parse_arg).transpose()?,
        address: args.address.as_deref().map(parse_arg).transpose()?,
    };
    if let Some(name) = wanted.name.as_ref().filter(|name| name.is_reserved()) {
        return Err(Usage::new(store::Error::ReservedMachineName(name.clone())).into());
    }
    let work = async |target: &Target, environment: &Environment<ZkTree>| {
        let machine = environment.add_machine(wanted).await?;
        output::message(&format!("Machine {machine} was added."));
        Ok((machine, join_token(target, environment, machine).await))
    };
    match globals.in_environment(work).await? {
        (_, Ok(token)) => print_join_command(&token),
        // The machine exists: the same command again would add another one.
        (machine, Err(error)) => {
            let advice = format!("`juju machine token {machine}` makes one");
            output::message(&format!("hint: no token to join was made: {error:#}; {advice}"));
            Ok(())
        }
    }
}
