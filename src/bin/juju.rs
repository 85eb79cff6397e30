//! The operator's client. Everything is in `portcullis::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    portcullis::cli::juju::main()
}
