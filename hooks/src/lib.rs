//! The hook tools: `open-port`, `close-port` and `opened-ports`, which a charm's hook calls to say which ports its unit
//! wants. They write the unit's ports node themselves, so that a port counts at once and also while an agent restarts.
//!
//! Here is the order of things; what is typed is read in `arguments`, what the hook was given in `surroundings`.
//! Nothing here knows a cloud or decides what a firewall does.

mod arguments;
mod surroundings;

pub use arguments::Tool;

use arguments::{Format, Task};
use portcullis::model::PortRange;
use portcullis::store::{UnitPorts, ZkTree};
use std::error::Error as StdError;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use surroundings::Surroundings;

/// No hook waits longer than this for a store that is not there.
const PATIENCE: Duration = Duration::from_secs(9);

/// What a tool did: its exit code, and what it says where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// 0 done, 1 failed, 2 wrongly called.
    pub code: u8,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    fn done(stdout: String) -> Self {
        Self { code: 0, stdout, stderr: String::new() }
    }

    /// The whole chain, once, on one line.
    fn refused(code: u8, error: &dyn StdError) -> Self {
        let mut stderr = format!("error: {error}");
        let mut source = error.source();
        while let Some(cause) = source {
            stderr.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        stderr.push('\n');
        Self { code, stdout: String::new(), stderr }
    }
}

/// Does what `tool` was asked with `args`, in the environment that `env` gives.
pub fn run(
    tool: Tool,
    args: impl IntoIterator<Item = OsString>,
    env: impl Fn(&str) -> Option<OsString>,
) -> Outcome {
    let task = match arguments::parse(tool, args) {
        Ok(Task::Explain(text)) => return Outcome::done(text),
        Ok(task) => task,
        Err(e) => return Outcome::refused(2, &e),
    };
    let surroundings = match Surroundings::read(tool, env) {
        Ok(surroundings) => surroundings,
        Err(e) => return Outcome::refused(1, &e),
    };
    // One thread: there is one thing to do, and starting more costs more than it saves.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime,
        Err(e) => return Outcome::refused(1, &e),
    };
    match runtime.block_on(perform(&task, &surroundings)) {
        Ok(stdout) => Outcome::done(stdout),
        Err(e) => Outcome::refused(1, &e),
    }
}

async fn perform(task: &Task, surroundings: &Surroundings) -> Result<String, portcullis::store::Error> {
    let deadline = Instant::now() + PATIENCE;
    let tree = ZkTree::connect(&surroundings.address, Some(&surroundings.credential)).await?;
    let tree = tree.until(deadline.into());
    let ports = UnitPorts::new(&tree, surroundings.unit);
    let result = match task {
        Task::Open(range) => ports.open(*range).await.map(|()| String::new()),
        Task::Close(range) => ports.close(*range).await.map(|()| String::new()),
        Task::List(format) => ports.read().await.map(|document| show(document.ranges(), *format)),
        Task::Explain(text) => Ok(text.clone()),
    };
    tree.close().await;
    result
}

fn show(ranges: impl Iterator<Item = PortRange>, format: Format) -> String {
    let names: Vec<String> = ranges.map(|range| range.to_string()).collect();
    match format {
        Format::Smart => names.iter().map(|name| format!("{name}\n")).collect(),
        Format::Json => format!("{}\n", serde_json::Value::from(names)),
        Format::Yaml if names.is_empty() => "[]\n".to_owned(),
        Format::Yaml => names.iter().map(|name| format!("- {name}\n")).collect(),
    }
}

/// Runs a tool as a process: its own arguments, environment and streams.
pub fn main(tool: Tool) -> ExitCode {
    let outcome = run(tool, std::env::args_os().skip(1), |name| std::env::var_os(name));
    let written =
        std::io::stdout().write_all(outcome.stdout.as_bytes()).and_then(|()| std::io::stdout().flush());
    // Nowhere is left to complain to if this one fails.
    let _ = std::io::stderr().write_all(outcome.stderr.as_bytes());
    if written.is_err() { ExitCode::FAILURE } else { ExitCode::from(outcome.code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis::model::ports::parse_argument;

    #[test]
    fn formats() {
        let some = || ["53/udp", "8000-8080"].into_iter().map(|text| parse_argument(text).unwrap());
        assert_eq!(show(some(), Format::Smart), "53/udp\n8000-8080/tcp\n");
        assert_eq!(show(some(), Format::Json), "[\"53/udp\",\"8000-8080/tcp\"]\n");
        assert_eq!(show(some(), Format::Yaml), "- 53/udp\n- 8000-8080/tcp\n");
        assert_eq!(show(std::iter::empty(), Format::Smart), "");
        assert_eq!(show(std::iter::empty(), Format::Json), "[]\n");
        assert_eq!(show(std::iter::empty(), Format::Yaml), "[]\n");
    }

    #[test]
    fn what_is_typed_is_judged_before_the_surroundings() {
        let outcome = run(Tool::OpenPort, ["eighty".into()], |_| None);
        assert_eq!(
            (outcome.code, outcome.stderr.as_str()),
            (2, "error: Invalid port, must be an integer, got 'eighty'\n")
        );
        let outcome = run(Tool::OpenPort, ["80".into()], |_| None);
        assert_eq!(
            (outcome.code, outcome.stderr.as_str()),
            (1, "error: JUJU_UNIT_NAME is not set; open-port is for hooks to call\n")
        );
    }
}
