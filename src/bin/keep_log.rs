//! Writes the output of one service of a unit to its log, as `portcullis keep-log` does. It is a
//! program of its own, because there is one process of it for each such service, and the daemon is
//! ten times its size. The code is in `portcullis::unit::hook`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(log) = std::env::args_os().nth(2) else { return ExitCode::from(2) };
    match portcullis::unit::hook::keep_standard_input(Path::new(&log)) {
        Ok(()) => ExitCode::SUCCESS,
        // The standard error of this process is read by no other process.
        Err(_) => ExitCode::FAILURE,
    }
}
