//! `juju node`: control of systemd on the nodes of a manager.

use std::process::ExitCode;

use crate::cli::node::{self, Action, Options};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Message bus of the manager: system, user or a D-Bus address
    #[arg(long, global = true, value_name = "BUS", default_value = "system")]
    bus: String,
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    action: Action,
}

pub(super) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    node::run(&args.bus, &args.options, &args.action).await
}
