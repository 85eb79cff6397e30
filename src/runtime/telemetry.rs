//! Logs, on stderr. `RUST_LOG` comes before what the command line says.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

/// Starts logging at `level` (a directive of `RUST_LOG`'s kind). A second call changes nothing.
pub fn init(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let colour = colour_wanted(std::env::var_os("NO_COLOR").as_deref(), io::stderr().is_terminal());
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_writer(io::stderr).finish();
    // Refused only if one is installed already, which then stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// As <https://no-color.org> has it: any value but the empty one turns colour off.
pub fn colour_wanted(no_color: Option<&OsStr>, terminal: bool) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_for_terminals_that_want_it() {
        let set = |text: &'static str| Some(OsStr::new(text));
        assert!(colour_wanted(None, true));
        assert!(colour_wanted(set(""), true));
        assert!(!colour_wanted(set("1"), true));
        assert!(!colour_wanted(None, false));
    }
}
