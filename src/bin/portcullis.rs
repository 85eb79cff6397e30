//! The daemon. Everything is in `portcullis::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    portcullis::cli::portcullis::main()
}
