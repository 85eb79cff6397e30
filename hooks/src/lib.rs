//! The hook tools `open-port`, `close-port` and `opened-ports`, which a charm's hooks call to
//! request ports for their unit. The tools write the unit's ports node themselves, so that a change
//! applies at once, and also while an agent restarts.
//!
//! `arguments` parses the command line and `hook_env` reads the environment. Cloud code and
//! firewall decisions do not belong here.

mod arguments;
mod hook_env;

pub use arguments::Tool;

use arguments::{Format, Task};
use hook_env::HookEnv;
use portcullis::model::{PortRange, error_chain};
use portcullis::store::{UnitPorts, ZkTree};
use std::error::Error as StdError;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time limit of all store operations, so that a hook does not hang without a store.
const STORE_TIMEOUT: Duration = Duration::from_secs(9);

/// The result of a tool: exit code and output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// 0 success, 1 failure, 2 usage error.
    pub code: u8,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    fn done(stdout: String) -> Self {
        Self { code: 0, stdout, stderr: String::new() }
    }

    fn refused(code: u8, error: &dyn StdError) -> Self {
        Self { code, stdout: String::new(), stderr: format!("error: {}\n", error_chain(error)) }
    }
}

/// Runs `tool` with `args` and the environment variables of `env`.
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
    let hook_env = match HookEnv::read(tool, env) {
        Ok(hook_env) => hook_env,
        Err(e) => return Outcome::refused(1, &e),
    };
    // One thread, because starting more costs more time than they save.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return Outcome::refused(1, &e),
    };
    match runtime.block_on(perform(&task, &hook_env)) {
        Ok(stdout) => Outcome::done(stdout),
        Err(e) => Outcome::refused(1, &e),
    }
}

async fn perform(task: &Task, hook_env: &HookEnv) -> Result<String, portcullis::store::Error> {
    let deadline = Instant::now() + STORE_TIMEOUT;
    let tree = ZkTree::connect(&hook_env.address, Some(&hook_env.credential)).await?;
    let tree = tree.until(deadline.into());
    let ports = UnitPorts::new(&tree, hook_env.unit);
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
    // A failure to write to stderr cannot be reported.
    let _ = std::io::stderr().write_all(outcome.stderr.as_bytes());
    if written.is_err() { ExitCode::FAILURE } else { ExitCode::from(outcome.code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis::model::ports::parse_argument;

    #[test]
    fn ports_are_listed_in_each_format() {
        let some = || ["53/udp", "8000-8080"].into_iter().map(|text| parse_argument(text).unwrap());
        assert_eq!(show(some(), Format::Smart), "53/udp\n8000-8080/tcp\n");
        assert_eq!(show(some(), Format::Json), "[\"53/udp\",\"8000-8080/tcp\"]\n");
        assert_eq!(show(some(), Format::Yaml), "- 53/udp\n- 8000-8080/tcp\n");
        assert_eq!(show(std::iter::empty(), Format::Smart), "");
        assert_eq!(show(std::iter::empty(), Format::Json), "[]\n");
        assert_eq!(show(std::iter::empty(), Format::Yaml), "[]\n");
    }

    #[test]
    fn arguments_are_checked_before_the_environment() {
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
