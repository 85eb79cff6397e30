//! Logs, on stderr. `RUST_LOG` comes before what the command line says.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

/// Starts logging at `level` (a directive of `RUST_LOG`'s kind). A second call changes nothing.
pub fn init(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let colour =
        io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_writer(io::stderr).finish();
    // Refused only if one is installed already, which then stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
