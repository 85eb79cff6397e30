//! `portcullis run-hook`: one hook of one unit, as its agent ordered it; and `portcullis keep-log`, what the hook left running
//! and what it prints. Not for people to type.

use std::io::{self, PipeReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use clap::Args;

use crate::unit::hook::Runs;
use crate::unit::output;

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
    let runs = Runs::at(args.directory.clone());
    runs.enter_group();
    runs.carry_out(args.number, keep_on).context("cannot run the hook")
}

/// Blocks until nobody is left who could print.
pub(super) fn keep_log(args: &Log) -> anyhow::Result<()> {
    output::keep(io::stdin().lock(), &args.file).context("cannot keep the log")
}

/// In a process of its own: whoever waits for the hook waits for this one, and should not wait for what it left running.
fn keep_on(pipe: PipeReader, log: &Path) -> io::Result<()> {
    let mut keeper = Command::new(std::env::current_exe()?);
    keeper.arg("keep-log").arg(log).stdin(pipe).stdout(Stdio::null()).stderr(Stdio::null());
    keeper.process_group(0).spawn().map(drop)
}
