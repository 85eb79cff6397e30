//! `juju node`: control of systemd on the nodes of the environment's manager, or of a manager on a
//! bus.

use std::process::ExitCode;

use crate::cli::args::environment::Globals;
use crate::cli::node::{self, Action, Options, Through};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Message bus of a manager to use instead of the environment's manager: system, user or a
    /// D-Bus address
    #[arg(long, global = true, value_name = "BUS")]
    bus: Option<String>,
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    action: Action,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<ExitCode> {
    let through = match &args.bus {
        Some(bus) => Through::Bus(bus),
        None => Through::Environment(globals),
    };
    node::run(&through, &args.options, &args.action).await
}
