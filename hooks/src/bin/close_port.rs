fn main() -> std::process::ExitCode {
    portcullis_hooks::main(portcullis_hooks::Tool::ClosePort)
}
