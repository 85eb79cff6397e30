//! `portcullis run-hook` runs one hook for the unit agent; `portcullis keep-log` logs the output of
//! processes that a hook started. Both are internal commands.

use std::path::PathBuf;

use anyhow::Context as _;

use crate::runtime::trusted_path;
use crate::unit::hook::{Runs, keep_on, keep_standard_input};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Directory of the hook's specification
    directory: PathBuf,
    /// Number of the run
    number: u64,
}

#[derive(Debug, clap::Args)]
pub(super) struct Log {
    /// Log file
    file: PathBuf,
}

/// Blocks until the hook has ended.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // The specification names the program and the user.
    trusted_path::check(&args.directory)
        .map_err(|refused| anyhow::anyhow!("cannot run the hook: {}", refused.with_repair()))?;
    let runs = Runs::at(args.directory.clone());
    runs.enter_group(args.number);
    runs.carry_out(args.number, keep_on).context("cannot run the hook")
}

/// Blocks until all writers have closed stdin.
pub(super) fn keep_log(args: &Log) -> anyhow::Result<()> {
    keep_standard_input(&args.file).context("cannot keep the log")
}
