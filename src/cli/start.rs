//! What both programs do first: read their arguments, and get a place for futures to run.

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use clap::error::ErrorKind;

use super::output;

/// What was typed; or the exit code, once help was shown or the refusal told.
pub(super) fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|refusal| match refusal.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Nobody is there to be told that the help could not be shown.
            let _ = refusal.print();
            ExitCode::SUCCESS
        }
        _ => {
            let (problem, usage) = summary(&refusal.render().to_string());
            output::error(&anyhow::Error::msg(problem));
            if let Some(usage) = usage {
                output::hint(&usage);
            }
            ExitCode::from(2)
        }
    })
}

/// The parser explains itself in several paragraphs; the first says what is wrong, and one how to do it right.
fn summary(rendered: &str) -> (String, Option<String>) {
    let one_line = |paragraph: &str| paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut paragraphs = rendered.split("\n\n");
    let first = one_line(paragraphs.next().unwrap_or_default());
    let problem = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
    let usage = paragraphs
        .map(one_line)
        .find_map(|p| p.strip_prefix("Usage: ").map(|usage| format!("usage: {usage}")));
    (problem, usage)
}

/// Runs a future to its end on this thread.
pub(super) fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_parser_becomes_one_line() {
        let rendered = "error: the following required arguments were not provided:\n  <SERVICE>\n\n\
                        Usage: juju expose <SERVICE>\n\nFor more information, try '--help'.\n";
        let (problem, usage) = summary(rendered);
        assert_eq!(problem, "the following required arguments were not provided: <SERVICE>");
        assert_eq!(usage.as_deref(), Some("usage: juju expose <SERVICE>"));
    }
}
