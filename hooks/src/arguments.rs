//! Parses the arguments of the hook tools. Written by hand: three tools with one argument each
//! start faster without a parser library, and the error texts are specified. Does no I/O.

use portcullis::model::PortRange;
use portcullis::model::ports::{InvalidPort, parse_argument};
use std::ffi::OsString;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    OpenPort,
    ClosePort,
    OpenedPorts,
}

/// The operation to perform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    Open(PortRange),
    Close(PortRange),
    List(Format),
    /// Prints the help or version text.
    Explain(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// One per line.
    Smart,
    Json,
    Yaml,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UsageError {
    #[error(transparent)]
    Port(#[from] InvalidPort),
    #[error("Invalid format, must be 'smart', 'json' or 'yaml', got {0:?}")]
    Format(String),
    #[error("unknown option {option:?}; see {tool} --help")]
    Option { option: String, tool: &'static str },
    #[error("{tool} takes {wanted}; see {tool} --help")]
    Count { tool: &'static str, wanted: &'static str },
}

impl Tool {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenPort => "open-port",
            Self::ClosePort => "close-port",
            Self::OpenedPorts => "opened-ports",
        }
    }

    fn help(self) -> &'static str {
        match self {
            Self::OpenPort => OPEN_HELP,
            Self::ClosePort => CLOSE_HELP,
            Self::OpenedPorts => OPENED_HELP,
        }
    }
}

pub(crate) fn parse(tool: Tool, args: impl IntoIterator<Item = OsString>) -> Result<Task, UsageError> {
    let mut format = None;
    let mut words = Vec::new();
    let mut options_end = false;
    let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--" if !options_end => options_end = true,
            "--help" | "-h" if !options_end => return Ok(Task::Explain(tool.help().to_owned())),
            "--version" | "-V" if !options_end => {
                return Ok(Task::Explain(format!("{} {}\n", tool.name(), env!("CARGO_PKG_VERSION"))));
            }
            "--format" if !options_end && tool == Tool::OpenedPorts => {
                let value = args
                    .next()
                    .ok_or(UsageError::Count { tool: tool.name(), wanted: "a format after --format" })?;
                format = Some(parse_format(&value)?);
            }
            _ => match arg.strip_prefix("--format=") {
                Some(value) if !options_end && tool == Tool::OpenedPorts => {
                    format = Some(parse_format(value)?);
                }
                _ if !options_end && is_option(&arg) => {
                    return Err(UsageError::Option {
                        option: arg.chars().take(60).collect(),
                        tool: tool.name(),
                    });
                }
                _ => words.push(arg),
            },
        }
    }
    let wrong = |wanted| UsageError::Count { tool: tool.name(), wanted };
    match (tool, words.as_slice()) {
        (Tool::OpenPort, [port]) => Ok(Task::Open(parse_argument(port)?)),
        (Tool::ClosePort, [port]) => Ok(Task::Close(parse_argument(port)?)),
        (Tool::OpenedPorts, []) => Ok(Task::List(format.unwrap_or(Format::Smart))),
        (Tool::OpenPort | Tool::ClosePort, _) => Err(wrong("one argument, PORT[-PORT][/PROTOCOL]")),
        (Tool::OpenedPorts, _) => Err(wrong("no argument but --format")),
    }
}

/// Returns whether an argument is an option. `-5` is an invalid port, not an option.
fn is_option(arg: &str) -> bool {
    arg.strip_prefix('-').is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn parse_format(text: &str) -> Result<Format, UsageError> {
    match text {
        "smart" => Ok(Format::Smart),
        "json" => Ok(Format::Json),
        "yaml" => Ok(Format::Yaml),
        _ => Err(UsageError::Format(text.chars().take(60).collect())),
    }
}

const OPEN_HELP: &str = "\
Says that the unit whose hook is running wants a port, or a range of ports, open.

Usage: open-port PORT[-PORT][/PROTOCOL]

  PORT       from 1 to 65535
  PROTOCOL   tcp (the default) or udp

The port is opened to the world while the service is exposed (`juju expose SERVICE`), and \
remembered while it is
not. It counts at once, whether or not the hook goes on to fail. Opening a port twice is opening \
it once. 53/tcp
and 53/udp are two ports. Prints nothing when all is well.

  open-port 80
  open-port 8000-8080/tcp
  open-port 53/udp

Exit: 0 stored; 1 not stored, with the reason; 2 wrongly called.
";

const CLOSE_HELP: &str = "\
Takes back what open-port said: the unit whose hook is running no longer wants the port open.

Usage: close-port PORT[-PORT][/PROTOCOL]

  PORT       from 1 to 65535
  PROTOCOL   tcp (the default) or udp

A range is closed as it was opened: after `open-port 8000-8080`, `close-port 8000` changes \
nothing. Closing what is
not open is fine. The port stays open on the machine for as long as another unit there wants it.

  close-port 80
  close-port 8000-8080/tcp

Exit: 0 stored; 1 not stored, with the reason; 2 wrongly called.
";

const OPENED_HELP: &str = "\
Lists the ports that the unit whose hook is running has opened, in the order of opening.

Usage: opened-ports [--format FORMAT]

  --format FORMAT   smart (the default: one per line), json or yaml

  $ opened-ports
  80/tcp
  8000-8080/tcp

Exit: 0 listed; 1 not readable, with the reason; 2 wrongly called.
";

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(tool: Tool, line: &str) -> Result<Task, String> {
        parse(tool, line.split_whitespace().map(OsString::from)).map_err(|e| e.to_string())
    }

    fn port(text: &str) -> PortRange {
        parse_argument(text).unwrap()
    }

    #[test]
    fn valid_arguments_are_parsed() {
        assert_eq!(parsed(Tool::OpenPort, "80"), Ok(Task::Open(port("80"))));
        assert_eq!(parsed(Tool::OpenPort, "-- 80-90/UDP"), Ok(Task::Open(port("80-90/udp"))));
        assert_eq!(parsed(Tool::ClosePort, "53/udp"), Ok(Task::Close(port("53/udp"))));
        assert_eq!(parsed(Tool::OpenedPorts, ""), Ok(Task::List(Format::Smart)));
        assert_eq!(parsed(Tool::OpenedPorts, "--format json"), Ok(Task::List(Format::Json)));
        assert_eq!(parsed(Tool::OpenedPorts, "--format=yaml"), Ok(Task::List(Format::Yaml)));
    }

    #[test]
    fn invalid_arguments_are_refused() {
        let one = "open-port takes one argument, PORT[-PORT][/PROTOCOL]; see open-port --help";
        for (tool, line, text) in [
            (Tool::OpenPort, "", one),
            (Tool::OpenPort, "80 81", one),
            (Tool::OpenPort, "--format json 80", "unknown option \"--format\"; see open-port --help"),
            (Tool::OpenPort, "-x", "unknown option \"-x\"; see open-port --help"),
            (Tool::OpenPort, "-80", "Invalid port, must be from 1 to 65535, got -80"),
            (Tool::ClosePort, "-- -x", "Invalid port, must be an integer, got '-x'"),
            (Tool::OpenedPorts, "80", "opened-ports takes no argument but --format; see opened-ports --help"),
            (
                Tool::OpenedPorts,
                "--format",
                "opened-ports takes a format after --format; see opened-ports --help",
            ),
            (
                Tool::OpenedPorts,
                "--format xml",
                "Invalid format, must be 'smart', 'json' or 'yaml', got \"xml\"",
            ),
        ] {
            assert_eq!(parsed(tool, line), Err(text.to_owned()), "{line}");
        }
    }

    #[test]
    fn help_names_every_tool_and_its_exits() {
        for tool in [Tool::OpenPort, Tool::ClosePort, Tool::OpenedPorts] {
            let Ok(Task::Explain(help)) = parsed(tool, "80 --help") else { panic!("no help") };
            assert!(help.contains(&format!("Usage: {}", tool.name())) && help.contains("Exit: 0"), "{help}");
            assert!(help.lines().all(|line| line.len() <= 115), "{help}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn argument_that_is_not_utf8_is_an_invalid_port() {
        use std::os::unix::ffi::OsStringExt;
        let refusal = parse(Tool::OpenPort, [OsString::from_vec(vec![0xff, b'8'])]).unwrap_err();
        assert!(refusal.to_string().starts_with("Invalid port, must be an integer"), "{refusal}");
    }
}
