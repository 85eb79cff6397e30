//! Output of both programs, and the only file that writes to stdout and stderr: data to stdout,
//! messages to stderr. Control characters in messages are escaped.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::runtime::logging;

/// Writes data to stdout. A closed pipe counts as success.
pub(super) fn data(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Whether stdout is a pipe without a reader.
pub(super) fn reader_is_gone() -> bool {
    let stdout = io::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    asked.is_ok() && fds[0].revents().contains(PollFlags::ERR)
}

/// Prefixes a text that is shown repeatedly: clears a terminal, separates documents otherwise.
pub(super) fn screen(text: &str) -> String {
    if io::stdout().is_terminal() { format!("\u{1b}[H\u{1b}[2J{text}") } else { format!("---\n{text}") }
}

/// Writes one line to stderr.
pub(super) fn message(text: &str) {
    line("", text);
}

/// Writes an error with its causes on one line.
pub(super) fn error(error: &anyhow::Error) {
    line(if coloured() { "\u{1b}[1;31merror:\u{1b}[0m " } else { "error: " }, &chain(error));
}

/// Writes a hint after an error.
pub(super) fn hint(text: &str) {
    line(if coloured() { "\u{1b}[1;36mhint:\u{1b}[0m " } else { "hint: " }, text);
}

/// Errors of stderr are ignored, since they cannot be reported.
fn line(prefix: &str, text: &str) {
    let _ = writeln!(io::stderr().lock(), "{prefix}{}", printable(text));
}

fn coloured() -> bool {
    logging::colour_wanted(std::env::var_os("NO_COLOR").as_deref(), io::stderr().is_terminal())
}

fn chain(error: &anyhow::Error) -> String {
    format!("{error:#}")
}

/// Escapes control characters, including line breaks, so that one message is one line.
fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            c if is_unprintable(c) => {
                // Writing to a String cannot fail.
                let _ = write!(shown, "{}", c.escape_default());
            }
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Control characters and marks that change the direction of text.
fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_chain_is_one_line_without_control_characters() {
        let error = anyhow!("no such\nfile").context("cannot read \u{1b}[2J");
        assert_eq!(printable(&chain(&error)), "cannot read \\u{1b}[2J: no such\\nfile");
        assert_eq!(printable("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(printable("plain ä"), "plain ä");
    }
}
