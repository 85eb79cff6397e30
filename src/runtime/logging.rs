//! Logs to stderr. `RUST_LOG` takes precedence over the command line.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

/// Replaces the filter.
type SetLevel = Box<dyn Fn(&str) + Send + Sync>;

/// Set once logging has started.
static SET_LEVEL: OnceLock<SetLevel> = OnceLock::new();

/// Starts logging at `level` (a directive of `RUST_LOG`'s kind). A second call changes nothing.
pub fn init(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let colour = colour_wanted(std::env::var_os("NO_COLOR").as_deref(), io::stderr().is_terminal());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colour)
        .with_writer(io::stderr)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    // An error means that a subscriber is installed already, which then stays.
    if tracing::subscriber::set_global_default(builder.finish()).is_ok() {
        let set = move |level: &str| {
            // An error means that the subscriber is gone, which is the one of this process.
            let _ = handle.reload(EnvFilter::new(level));
        };
        SET_LEVEL.get_or_init(|| Box::new(set));
    }
}

/// Changes the level of all messages from now on, also if `RUST_LOG` is set. Without a call of
/// [`init`] before, nothing is logged.
pub fn set_level(level: &str) {
    if let Some(set) = SET_LEVEL.get() {
        set(level);
    }
}

/// Follows <https://no-color.org>: any value of `NO_COLOR` but the empty one turns colour off.
pub fn colour_wanted(no_color: Option<&OsStr>, terminal: bool) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_needs_a_terminal_and_no_no_color() {
        let set = |text: &'static str| Some(OsStr::new(text));
        assert!(colour_wanted(None, true));
        assert!(colour_wanted(set(""), true));
        assert!(!colour_wanted(set("1"), true));
        assert!(!colour_wanted(None, false));
    }
}
