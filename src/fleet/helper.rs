//! `hirte-proxy`: systemd runs it when a proxy service starts and after it has stopped. It calls the
//! agent of this machine, and waits until the target is active.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use zbus::Connection;

use super::dbus::bus::Bus;
use super::dbus::errors::CallError;
use super::dbus::names::{AGENT_BUS_NAME, AGENT_INTERFACE, MANAGER_PATH};
use super::proxy::name::target_of;

/// How long an agent is awaited that does not run, because it is restarted for example.
const AGENT_LIMIT: Duration = Duration::from_secs(10);
/// The same after a proxy service has stopped. An agent removes such proxies when it starts.
const REMOVE_LIMIT: Duration = Duration::from_secs(2);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

const USAGE: &str = "\
Usage: hirte-proxy [--user] create|remove hirte-proxy@NODE_UNIT.service

systemd runs this program for proxy services. `create` returns when UNIT.service is active on NODE, and
`remove` ends the use of it. Exit code 0: done, 1: failed, 2: wrong usage.
";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Create,
    Remove,
}

#[derive(Debug, PartialEq, Eq)]
struct Call {
    bus: Bus,
    action: Action,
    proxy: String,
}

/// Why a call has no success.
#[derive(Debug)]
enum Failed {
    /// The agent does not run, or was lost during the call.
    NoAgent(String),
    Refused(String),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    if arguments == ["--help"] || arguments == ["-h"] {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let Some(call) = parse(&arguments) else {
        eprint!("{USAGE}");
        return ExitCode::from(2);
    };
    // One thread, because starting more costs more time than they save.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(run(&call)),
        Err(error) => Err(error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: &[&str]) -> Option<Call> {
    let (bus, rest) = match arguments {
        ["--user", rest @ ..] => (Bus::User, rest),
        rest => (Bus::System, rest),
    };
    let (action, proxy) = match rest {
        ["create", proxy] => (Action::Create, *proxy),
        ["remove", proxy] => (Action::Remove, *proxy),
        _ => return None,
    };
    Some(Call { bus, action, proxy: proxy.to_owned() })
}

async fn run(call: &Call) -> Result<(), String> {
    let limit = match call.action {
        Action::Create => AGENT_LIMIT,
        Action::Remove => REMOVE_LIMIT,
    };
    let mut until = Instant::now() + limit;
    loop {
        let began = Instant::now();
        let problem = match once(call).await {
            Ok(()) => return Ok(()),
            Err(Failed::Refused(problem)) => return Err(problem),
            Err(Failed::NoAgent(problem)) => problem,
        };
        // An agent that was lost during a long call has the whole time to return.
        if began.elapsed() > RETRY_PAUSE {
            until = Instant::now() + limit;
        }
        if until <= Instant::now() {
            return match call.action {
                Action::Create => {
                    Err(format!("no agent has the name {AGENT_BUS_NAME} on {}: {problem}", call.bus))
                }
                Action::Remove => {
                    eprintln!("the agent does not run; it removes the proxy when it starts: {problem}");
                    Ok(())
                }
            };
        }
        sleep(RETRY_PAUSE).await;
    }
}

async fn once(call: &Call) -> Result<(), Failed> {
    let connecting = timeout(CONNECT_LIMIT, call.bus.connect_without_limit()).await;
    let connection: Connection = match connecting {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return Err(Failed::NoAgent(error.to_string())),
        Err(_) => return Err(Failed::NoAgent("the bus does not answer".to_owned())),
    };
    // The agent refuses names of another form, and reports them.
    let (node, unit) = match target_of(&call.proxy) {
        Ok((node, unit)) => (node.to_string(), unit),
        Err(_) => (String::new(), String::new()),
    };
    let method = match call.action {
        Action::Create => "CreateProxy",
        Action::Remove => "RemoveProxy",
    };
    let arguments = (call.proxy.as_str(), node.as_str(), unit.as_str());
    let called = connection
        .call_method(Some(AGENT_BUS_NAME), MANAGER_PATH, Some(AGENT_INTERFACE), method, &arguments)
        .await;
    let lost = matches!(called, Err(zbus::Error::InputOutput(_)));
    let error = match called {
        Ok(_) => return Ok(()),
        Err(error) => CallError::from(error),
    };
    let is_gone = ["ServiceUnknown", "NameHasNoOwner", "NoReply", "Disconnected"]
        .iter()
        .any(|gone| error.name.strip_prefix("org.freedesktop.DBus.Error.") == Some(gone));
    Err(if lost || is_gone { Failed::NoAgent(error.message) } else { Failed::Refused(error.message) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_those_of_the_unit_file() {
        let call = |bus, action| {
            let proxy = "hirte-proxy@bar_db.service".to_owned();
            Some(Call { bus, action, proxy })
        };
        let proxy = "hirte-proxy@bar_db.service";
        assert_eq!(parse(&["create", proxy]), call(Bus::System, Action::Create));
        assert_eq!(parse(&["--user", "remove", proxy]), call(Bus::User, Action::Remove));
        for wrong in
            [&[][..], &["create"], &["create", "a", "b"], &["start", "a"], &["create", "a", "--user"]]
        {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
