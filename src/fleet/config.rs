//! The configuration files of a manager and of an agent, with hirte's and BlueChi's names of
//! sections and keys. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use super::address::ManagerAddress;
use super::dbus::names::DEFAULT_PORT;
use super::ini::{Entry, LineError, Section, parse};
use super::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use super::name::NodeName;
use crate::model::{InvalidName, is_reserved_name};

/// The accepted heartbeat intervals. Shorter ones overload the network, and longer ones detect a
/// loss too late.
const HEARTBEAT_MS: std::ops::RangeInclusive<u64> = 100..=600_000;

/// Keys of hirte and BlueChi that have no effect here.
const IGNORED: [&str; 8] = [
    "LogTarget",
    "LogIsQuiet",
    "UseTCP",
    "UseUDS",
    "IPReceiveErrors",
    "TCPKeepAliveTime",
    "TCPKeepAliveInterval",
    "TCPKeepAliveCount",
];

/// A manager's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ManagerFile {
    pub port: Option<u16>,
    /// All nodes that may register, with their own settings.
    pub nodes: BTreeMap<NodeName, NodeSettings>,
    pub heartbeat_interval: Option<Duration>,
    pub silence_limit: Option<Duration>,
    /// `debug`, `info`, `warn` or `error`.
    pub log_level: Option<&'static str>,
}

/// A `[node NAME]` section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// The PEM file with the certificate that the node has to present, and the line that names it.
    pub certificate: Option<(PathBuf, usize)>,
    pub may_depend_on: BTreeSet<NodeName>,
}

impl ManagerFile {
    /// # Errors
    /// With the line of the first error.
    pub fn read(text: &str) -> Result<Self, LineError> {
        let mut file = Self::default();
        let sections = parse(text)?;
        for section in &sections {
            match section.name.as_str() {
                "hirte" | "bluechi-controller" => file.main(section)?,
                name => match name.strip_prefix("node ").or_else(|| name.strip_prefix("node\t")) {
                    Some(node) => file.node(node.trim(), section)?,
                    None => return Err(unknown_section(section)),
                },
            }
        }
        check_heartbeat(&sections, file.heartbeat_interval, file.silence_limit)?;
        Ok(file)
    }

    fn main(&mut self, section: &Section) -> Result<(), LineError> {
        for entry in &section.entries {
            match entry.key.as_str() {
                "ManagerPort" | "ControllerPort" => self.port = Some(port(entry)?),
                "AllowedNodeNames" => {
                    for name in names(entry)? {
                        self.nodes.entry(name).or_default();
                    }
                }
                "HeartbeatInterval" => self.heartbeat_interval = Some(heartbeat(entry)?),
                "NodeHeartbeatThreshold" => self.silence_limit = Some(heartbeat(entry)?),
                "LogLevel" => self.log_level = Some(log_level(entry)?),
                key if IGNORED.contains(&key) => {}
                _ => return Err(unknown_key(entry)),
            }
        }
        Ok(())
    }

    fn node(&mut self, name: &str, section: &Section) -> Result<(), LineError> {
        let name = node_name(name).map_err(|reason| LineError::new(section.line, reason))?;
        let node = self.nodes.entry(name).or_default();
        for entry in &section.entries {
            match entry.key.as_str() {
                "Certificate" if entry.value.is_empty() => {
                    return Err(LineError::new(entry.line, "Certificate: expected the path of a PEM file"));
                }
                "Certificate" => node.certificate = Some((PathBuf::from(&entry.value), entry.line)),
                "AllowDependenciesOn" => node.may_depend_on.extend(names(entry)?),
                _ => return Err(unknown_key(entry)),
            }
        }
        Ok(())
    }
}

/// An agent's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AgentFile {
    pub name: Option<NodeName>,
    pub manager: Option<ManagerAddress>,
    pub heartbeat_interval: Option<Duration>,
    pub silence_limit: Option<Duration>,
    /// `debug`, `info`, `warn` or `error`.
    pub log_level: Option<&'static str>,
}

impl AgentFile {
    /// # Errors
    /// With the line of the first error.
    pub fn read(text: &str) -> Result<Self, LineError> {
        let mut file = Self::default();
        let (mut host, mut port_number) = (None, DEFAULT_PORT);
        let sections = parse(text)?;
        for section in &sections {
            if !matches!(section.name.as_str(), "hirte-agent" | "bluechi-agent") {
                return Err(unknown_section(section));
            }
            for entry in &section.entries {
                let line = entry.line;
                match entry.key.as_str() {
                    "NodeName" => {
                        let name = node_name(&entry.value);
                        file.name = Some(name.map_err(|reason| LineError::new(line, reason))?);
                    }
                    "ManagerHost" | "ControllerHost" => host = Some(entry.clone()),
                    "ManagerPort" | "ControllerPort" => port_number = port(entry)?,
                    "ManagerAddress" | "ControllerAddress" => {
                        let address = ManagerAddress::from_dbus(&entry.value);
                        file.manager = Some(address.map_err(|error| invalid(line, &error))?);
                    }
                    "HeartbeatInterval" => file.heartbeat_interval = Some(heartbeat(entry)?),
                    "ControllerHeartbeatThreshold" => file.silence_limit = Some(heartbeat(entry)?),
                    "LogLevel" => file.log_level = Some(log_level(entry)?),
                    key if IGNORED.contains(&key) => {}
                    _ => return Err(unknown_key(entry)),
                }
            }
        }
        // As in hirte, the address takes precedence over host and port.
        if let (None, Some(host)) = (&file.manager, host) {
            let address = ManagerAddress::tcp(&host.value, port_number);
            file.manager = Some(address.map_err(|error| invalid(host.line, &error))?);
        }
        check_heartbeat(&sections, file.heartbeat_interval, file.silence_limit)?;
        Ok(file)
    }
}

/// Reads the name of a node. Names of roles are refused, because certificates with these names have
/// other rights.
fn node_name(text: &str) -> Result<NodeName, String> {
    if is_reserved_name(text) {
        return Err(format!("the name '{text}' is reserved"));
    }
    text.parse().map_err(|error: InvalidName| error.to_string())
}

fn invalid(line: usize, error: &dyn std::fmt::Display) -> LineError {
    LineError::new(line, error.to_string())
}

fn unknown_section(section: &Section) -> LineError {
    LineError::new(section.line, format!("unknown section [{}]", shortened(&section.name)))
}

fn unknown_key(entry: &Entry) -> LineError {
    LineError::new(entry.line, format!("unknown key '{}'", shortened(&entry.key)))
}

/// The beginning of a text, for a message.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

fn port(entry: &Entry) -> Result<u16, LineError> {
    let port = entry.value.parse().ok().filter(|port| *port != 0);
    port.ok_or_else(|| LineError::new(entry.line, format!("{}: expected a port, 1 to 65535", entry.key)))
}

fn heartbeat(entry: &Entry) -> Result<Duration, LineError> {
    let ms = entry.value.parse().ok().filter(|ms| HEARTBEAT_MS.contains(ms));
    let (least, most) = (HEARTBEAT_MS.start(), HEARTBEAT_MS.end());
    let reason = || format!("{}: expected milliseconds, {least} to {most}", entry.key);
    ms.map(Duration::from_millis).ok_or_else(|| LineError::new(entry.line, reason()))
}

/// Checks that three heartbeats fit into the time after which a silent peer is lost. With fewer,
/// one delayed heartbeat would end a connection. A value that is not in the file has its default.
fn check_heartbeat(
    sections: &[Section],
    interval: Option<Duration>,
    limit: Option<Duration>,
) -> Result<(), LineError> {
    let (interval, limit) = (interval.unwrap_or(HEARTBEAT_INTERVAL), limit.unwrap_or(SILENCE_LIMIT));
    let mut entries = sections.iter().flat_map(|section| &section.entries);
    let last = entries.rfind(|entry| entry.key.contains("Heartbeat"));
    match last {
        Some(entry) if interval * 3 > limit => {
            let (interval, limit) = (interval.as_millis(), limit.as_millis());
            let reason = format!(
                "{}: the interval of heartbeats ({interval} ms) may be at most a third of the threshold \
                 ({limit} ms)",
                entry.key
            );
            Err(LineError::new(entry.line, reason))
        }
        _ => Ok(()),
    }
}

fn log_level(entry: &Entry) -> Result<&'static str, LineError> {
    parse_log_level(&entry.value)
        .ok_or_else(|| LineError::new(entry.line, "LogLevel: expected DEBUG, INFO, WARN or ERROR"))
}

/// Returns the log level that hirte's name stands for.
pub fn parse_log_level(name: &str) -> Option<&'static str> {
    let levels = ["debug", "info", "warn", "error"];
    levels.into_iter().find(|level| level.eq_ignore_ascii_case(name))
}

/// The names of a list with commas, which may be on several lines.
fn names(entry: &Entry) -> Result<Vec<NodeName>, LineError> {
    let mut names = Vec::new();
    for (at, line) in entry.value.lines().enumerate() {
        for name in line.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let line = entry.line + at;
            let reason = |error| LineError::new(line, format!("{}: {error}", entry.key));
            names.push(node_name(name).map_err(reason)?);
        }
    }
    Ok(names)
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
