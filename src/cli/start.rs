//! Shared by both programs: parses arguments and starts the async runtime.

use std::future::Future;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use clap::error::ErrorKind;

use super::output;

/// Returns the arguments, or the exit code once help or an error is printed.
pub(super) fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|refusal| match refusal.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A failure to print help cannot be reported either.
            let _ = refusal.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // As above; this one goes to stderr.
            let _ = refusal.print();
            ExitCode::from(2)
        }
        _ => {
            let (problem, hint) = summary(&refusal.render().to_string());
            output::error(&anyhow::Error::msg(problem));
            if let Some(hint) = hint {
                output::hint(&hint);
            }
            ExitCode::from(2)
        }
    })
}

/// Shortens a message of the parser to a problem and a hint. Its first paragraph is the problem;
/// another may have a tip, and one shows the usage.
fn summary(rendered: &str) -> (String, Option<String>) {
    let one_line = |paragraph: &str| paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut paragraphs = rendered.split("\n\n").map(one_line);
    let first = paragraphs.next().unwrap_or_default();
    let problem = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
    let rest: Vec<String> = paragraphs.collect();
    let tip = rest.iter().find_map(|paragraph| paragraph.strip_prefix("tip: ").map(str::to_owned));
    let help = rest.iter().find_map(|paragraph| paragraph.strip_prefix("Usage: ")).map(|usage| {
        let words = usage.split(' ').take_while(|word| !word.starts_with(['[', '<', '-']));
        format!("see `{} --help`", words.collect::<Vec<_>>().join(" "))
    });
    (problem, tip.or(help))
}

/// Runs a future on this thread.
pub(super) fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(work)
}

/// Like [`block_on`], with another thread for the session with the store: parsing long answers of a
/// cloud must not delay the session's heartbeats.
pub(super) fn block_on_beside_sessions<T>(
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.context("cannot start")?.block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_parser_becomes_one_line() {
        let rendered = "error: the following required arguments were not provided:\n  <SERVICE>\n\n\
                        Usage: juju expose --zookeeper <HOSTS> <SERVICE>\n\nFor more information, \
                        try '--help'.\n";
        let (problem, hint) = summary(rendered);
        assert_eq!(problem, "the following required arguments were not provided: <SERVICE>");
        assert_eq!(hint.as_deref(), Some("see `juju expose --help`"));
    }

    #[test]
    fn a_tip_takes_precedence_over_the_help() {
        let rendered = "error: unrecognized subcommand 'expse'\n\n  tip: a similar subcommand \
                        exists: 'expose'\n\n\
                        Usage: juju [OPTIONS] <COMMAND>\n";
        let (problem, hint) = summary(rendered);
        assert_eq!(problem, "unrecognized subcommand 'expse'");
        assert_eq!(hint.as_deref(), Some("a similar subcommand exists: 'expose'"));
    }
}
