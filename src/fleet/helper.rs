//! The call of `hirte-proxy` to the agent of its machine, repeated while no agent answers.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::dbus::bus::Bus;
use super::dbus::errors::CallError;
use super::dbus::names::{AGENT_BUS_NAME, AGENT_INTERFACE, MANAGER_PATH};
use super::proxy::name::target_of;

/// How long the helper waits for the agent, for example while the machine starts.
const AGENT_LIMIT: Duration = Duration::from_secs(30);
/// The same after a proxy service has stopped. An agent removes such proxies when it starts.
const REMOVE_LIMIT: Duration = Duration::from_secs(2);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Create,
    Remove,
}

/// A call to the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub bus: Bus,
    pub action: Action,
    /// The name of the proxy service.
    pub proxy: String,
}

/// The reason why an attempt failed.
#[derive(Debug)]
enum Failed {
    NoAgent(String),
    /// The agent was lost during the call.
    Lost(String),
    Refused(String),
}

/// Makes a call. Returns a remark if a removal is left to the agent.
///
/// # Errors
/// The reason why the proxy has failed.
pub async fn run(call: &Call) -> Result<Option<String>, String> {
    let limit = match call.action {
        Action::Create => AGENT_LIMIT,
        Action::Remove => REMOVE_LIMIT,
    };
    let mut until = Instant::now() + limit;
    loop {
        let problem = match attempt(call).await {
            Ok(()) => return Ok(None),
            Err(Failed::Refused(problem)) => return Err(problem),
            Err(Failed::Lost(problem)) => {
                // The agent has the whole time to return.
                until = Instant::now() + limit;
                problem
            }
            Err(Failed::NoAgent(problem)) => problem,
        };
        if until <= Instant::now() {
            let text = format!("no agent has the name {AGENT_BUS_NAME} on {}: {problem}", call.bus);
            return match call.action {
                Action::Create => Err(text),
                Action::Remove => Ok(Some(format!("{text}; the agent removes the proxy when it starts"))),
            };
        }
        sleep(RETRY_PAUSE).await;
    }
}

async fn attempt(call: &Call) -> Result<(), Failed> {
    let connection = match timeout(CONNECT_LIMIT, call.bus.connect_without_limit()).await {
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
    let is_cut = matches!(called, Err(zbus::Error::InputOutput(_)));
    let error = match called {
        Ok(_) => return Ok(()),
        Err(error) => CallError::from(error),
    };
    match error.name.strip_prefix("org.freedesktop.DBus.Error.") {
        Some("NoReply" | "Disconnected") => Err(Failed::Lost(error.message)),
        Some("ServiceUnknown" | "NameHasNoOwner") => Err(Failed::NoAgent(error.message)),
        _ if is_cut => Err(Failed::Lost(error.message)),
        _ => Err(Failed::Refused(error.message)),
    }
}
