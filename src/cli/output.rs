//! The only place that writes to stdout and stderr: data to the one, everything meant for a person to the other.
//! Control characters never reach a terminal from here, whoever put them into a name or a file.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::runtime::telemetry;

/// Data that the caller asked for. A reader that has gone away wants no more of it, so that is success.
pub(super) fn data(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Whether what is said on stdout ends in a pipe that nobody reads any more.
pub(super) fn reader_is_gone() -> bool {
    let stdout = io::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    asked.is_ok() && fds[0].revents().contains(PollFlags::ERR)
}

/// The same for a reader who sees it again and again: a terminal is wiped first, and anything else gets a line between.
pub(super) fn screen(text: &str) -> String {
    if io::stdout().is_terminal() { format!("\u{1b}[H\u{1b}[2J{text}") } else { format!("---\n{text}") }
}

/// One line for a person.
pub(super) fn message(text: &str) {
    line("", text);
}

/// A failure with everything that led to it, on one line.
pub(super) fn error(error: &anyhow::Error) {
    line(if coloured() { "\u{1b}[1;31merror:\u{1b}[0m " } else { "error: " }, &chain(error));
}

/// What the operator could try after a failure.
pub(super) fn hint(text: &str) {
    line(if coloured() { "\u{1b}[1;36mhint:\u{1b}[0m " } else { "hint: " }, text);
}

/// A failure to write to stderr has nobody left to be told.
fn line(prefix: &str, text: &str) {
    let _ = writeln!(io::stderr().lock(), "{prefix}{}", printable(text));
}

fn coloured() -> bool {
    telemetry::colour_wanted(std::env::var_os("NO_COLOR").as_deref(), io::stderr().is_terminal())
}

fn chain(error: &anyhow::Error) -> String {
    format!("{error:#}")
}

/// The text with control characters spelled out, line ends among them: one message stays one line.
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

/// Control characters, and the marks that turn the direction of text around.
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
