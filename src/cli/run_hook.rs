//! `portcullis run-hook`: one hook of one unit, as its agent ordered it; and `portcullis keep-log`, what the hook left running
//! and what it prints. Not for people to type.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::runtime::trusted_path;
use crate::unit::hook::{Runs, keep_on, keep_standard_input};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Where the order is
    directory: PathBuf,
    /// Which one it is
    number: u64,
}

#[derive(Debug, Args)]
pub(super) struct Log {
    /// Where it is kept
    file: PathBuf,
}

/// Blocks until the hook has ended.
pub(super) fn run(args: &Typed) -> anyhow::Result<()> {
    // The order file names the program and the user.
    trusted_path::check(&args.directory)
        .map_err(|refused| anyhow::anyhow!("cannot run the hook: {}", refused.with_repair()))?;
    let runs = Runs::at(args.directory.clone());
    runs.enter_group(args.number);
    runs.carry_out(args.number, keep_on).context("cannot run the hook")
}

/// Blocks until nobody is left who could print.
pub(super) fn keep_log(args: &Log) -> anyhow::Result<()> {
    keep_standard_input(&args.file).context("cannot keep the log")
}
