//! `portcullis run-hook`: one hook of one unit, as its agent ordered it. Not for people to type.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::unit::hook::Runs;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Where the order is
    directory: PathBuf,
    /// Which one it is
    number: u64,
}

/// Blocks until the hook has ended.
pub(super) fn run(args: &Typed) -> anyhow::Result<()> {
    Runs::at(args.directory.clone()).carry_out(args.number).context("cannot run the hook")
}
