//! `portcullis run-hook`: one hook of one unit, as its agent ordered it; and `portcullis keep-log`, what the hook left running
//! and what it prints. Not for people to type.

use std::io;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::output;
use crate::unit::hook::{Runs, keep_on};
use crate::unit::output as kept;

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

/// Blocks until nobody is left who could print. What is asked to end may still have something to say, so this does not end
/// when it is asked to, together with all that the unit has: only with the last of them. Needs tokio's runtime.
pub(super) fn keep_log(args: &Log) -> anyhow::Result<()> {
    // Caught for as long as the process lives, and not looked at.
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        drop(signal(kind).context("cannot stay")?);
    }
    // The hook's runner waits for this.
    output::data("\n").context("cannot say that the log is kept")?;
    kept::keep(io::stdin().lock(), &args.file).context("cannot keep the log")
}
