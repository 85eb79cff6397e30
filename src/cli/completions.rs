//! `completions SHELL` of both programs, made from their own definitions.

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::Shell;

use super::output;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Shell to write them for
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(mut program: Command, args: &Typed) -> anyhow::Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    let script = String::from_utf8(script).context("the completions are not text")?;
    output::data(&script).context("cannot write to stdout")
}
