//! `completions SHELL` of both programs, generated from their command definitions.

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;

use super::output;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Shell to generate the script for
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(mut program: Command, args: &Args) -> anyhow::Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    let script = String::from_utf8(script).context("the completions are not text")?;
    output::data(&script).context("cannot write to stdout")
}
