//! `opened-ports`. Everything is in `portcullis_hooks`.

fn main() -> std::process::ExitCode {
    portcullis_hooks::main(portcullis_hooks::Tool::OpenedPorts)
}
