//! Entries of the journal, read by the program `journalctl` on the node. Its arguments and its
//! output are bounded.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use crate::fleet::dbus::errors::{CallError, FAILED, INVALID_ARGS, LIMITS_EXCEEDED, TIMEOUT};

/// Entries of one reply.
pub const MAX_ENTRIES: u32 = 10_000;
/// A reply has to fit into one message with its overhead.
const MAX_BYTES: u64 = 4 << 20;
/// The time of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer cursors do not exist.
const MAX_CURSOR: usize = 512;

/// Reads the last entries of a unit, as lines of JSON; with a cursor, those that follow its entry.
/// `is_user` selects the units of the user's own systemd.
pub(super) async fn read(
    is_user: bool,
    unit: &str,
    entries: u32,
    cursor: &str,
) -> Result<Vec<String>, CallError> {
    let arguments = arguments(is_user, unit, entries, cursor)?;
    let failed = |error: std::io::Error| CallError::new(FAILED, format!("cannot run journalctl: {error}"));
    let mut command = Command::new("journalctl");
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map_err(failed)?;
    let output = async {
        let mut output = Vec::new();
        if let Some(stdout) = process.stdout.take() {
            stdout.take(MAX_BYTES + 1).read_to_end(&mut output).await?;
        }
        Ok(output)
    };
    let late = || CallError::new(TIMEOUT, "journalctl did not end in time");
    let output = timeout(READ_TIMEOUT, output).await.map_err(|_| late())?.map_err(failed)?;
    if output.len() as u64 > MAX_BYTES {
        return Err(CallError::new(LIMITS_EXCEEDED, "the entries are too large; read fewer of them"));
    }
    let ended = timeout(READ_TIMEOUT, process.wait()).await.map_err(|_| late())?.map_err(failed)?;
    if !ended.success() {
        return Err(CallError::new(FAILED, format!("journalctl failed: {ended}")));
    }
    Ok(String::from_utf8_lossy(&output).lines().map(str::to_owned).collect())
}

fn arguments(is_user: bool, unit: &str, entries: u32, cursor: &str) -> Result<Vec<String>, CallError> {
    let invalid = |text: String| CallError::new(INVALID_ARGS, text);
    if !(1..=MAX_ENTRIES).contains(&entries) {
        return Err(invalid(format!("the number of entries has to be 1 to {MAX_ENTRIES}")));
    }
    let is_cursor = |c: char| c.is_ascii_alphanumeric() || matches!(c, '=' | ';' | '-' | '_');
    if cursor.len() > MAX_CURSOR || !cursor.chars().all(is_cursor) {
        return Err(invalid("this is not a cursor of the journal".to_owned()));
    }
    let scope = if is_user { "--user-unit" } else { "--unit" };
    let mut arguments = vec!["--output=json".to_owned(), "--no-pager".to_owned(), "--quiet".to_owned()];
    arguments.extend([format!("--lines={entries}"), format!("{scope}={unit}")]);
    if !cursor.is_empty() {
        arguments.push(format!("--after-cursor={cursor}"));
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_callers_cannot_be_options() {
        let cursor = "s=0a;i=1;b=2;m=3;t=4;x=5";
        let given = arguments(false, "--root=x.service", 7, cursor).unwrap();
        assert_eq!(given[3..], ["--lines=7", "--unit=--root=x.service", &format!("--after-cursor={cursor}")]);
        assert_eq!(arguments(true, "a.service", 1, "").unwrap()[3..], ["--lines=1", "--user-unit=a.service"]);
        for (entries, cursor) in [(0, ""), (MAX_ENTRIES + 1, ""), (1, "a b"), (1, &*"s".repeat(513))] {
            let refused = arguments(false, "a.service", entries, cursor).unwrap_err();
            assert_eq!(refused.name, INVALID_ARGS, "{entries} {cursor}");
        }
    }
}
