//! `hirtectl`, a client of the manager. Everything is in `portcullis::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    portcullis::cli::hirtectl::main()
}
