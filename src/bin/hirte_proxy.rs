//! `hirte-proxy`, which systemd runs for proxy services. Everything is in `portcullis::fleet::helper`.

use std::process::ExitCode;

fn main() -> ExitCode {
    portcullis::fleet::helper::main()
}
