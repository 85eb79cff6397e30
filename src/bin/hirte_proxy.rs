//! `hirte-proxy`, which systemd runs for proxy services. Everything is in
//! `portcullis::cli::hirte_proxy`.

use std::process::ExitCode;

fn main() -> ExitCode {
    portcullis::cli::hirte_proxy::main()
}
