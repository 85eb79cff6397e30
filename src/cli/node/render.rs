//! The output of `juju node`: tables for people and JSON for programs. Pure.

use serde_json::{Value, json};

use crate::fleet::client::{Change, Job, JobRequest, Node, Unit, UnitState};
use crate::fleet::dbus::values::UnitFileChange;
use crate::runtime::clock::utc;
use crate::status::render::tabular::table;

pub(super) fn nodes(nodes: &[Node]) -> String {
    let row = |node: &Node| {
        let last_seen = node.last_seen_ms.map(utc).unwrap_or_default();
        vec![node.name.clone(), node.status.clone(), node.address.clone().unwrap_or_default(), last_seen]
    };
    let mut text = String::new();
    let rows: Vec<_> = nodes.iter().map(row).collect();
    table(&mut text, &["NODE", "STATUS", "ADDRESS", "LAST-SEEN"], &rows);
    text
}

pub(super) fn nodes_json(nodes: &[Node]) -> String {
    let node = |node: &Node| {
        json!({
            "node": node.name,
            "status": node.status,
            "address": node.address,
            "last-seen": node.last_seen_ms.map(utc),
        })
    };
    line(&nodes.iter().map(node).collect())
}

pub(super) fn units(units: &[Unit]) -> String {
    let row = |unit: &Unit| {
        [&unit.node, &unit.name, &unit.load, &unit.active, &unit.sub, &unit.description]
            .map(Clone::clone)
            .into()
    };
    let mut text = String::new();
    let rows: Vec<Vec<String>> = units.iter().map(row).collect();
    table(&mut text, &["NODE", "SYSTEMD-UNIT", "LOAD", "ACTIVE", "SUB", "DESCRIPTION"], &rows);
    text
}

pub(super) fn units_json(units: &[Unit]) -> String {
    let unit = |unit: &Unit| {
        json!({
            "node": unit.node,
            "systemd-unit": unit.name,
            "load": unit.load,
            "active": unit.active,
            "sub": unit.sub,
            "description": unit.description,
        })
    };
    line(&units.iter().map(unit).collect())
}

/// One entry of a journal: the time, the program and the message.
pub(super) fn journal_entry(entry: &str) -> String {
    let Ok(entry) = serde_json::from_str::<Value>(entry) else { return format!("{entry}\n") };
    let text = |key: &str| entry[key].as_str().map(str::to_owned);
    let at_us = text("__REALTIME_TIMESTAMP").and_then(|text| text.parse::<u64>().ok());
    let at = at_us.map_or_else(|| "-".to_owned(), |us| utc(us / 1_000));
    let program = text("SYSLOG_IDENTIFIER").or_else(|| text("_COMM")).unwrap_or_else(|| "-".to_owned());
    let pid = text("_PID").map_or_else(String::new, |pid| format!("[{pid}]"));
    format!("{at} {program}{pid}: {}\n", message(&entry["MESSAGE"]))
}

/// A message is an array of bytes if it is not UTF-8, and null if it is too large for JSON.
fn message(message: &Value) -> String {
    let text = match message {
        Value::String(text) => text.clone(),
        Value::Array(bytes) => {
            let bytes: Vec<u8> = bytes.iter().filter_map(|byte| byte.as_u64()?.try_into().ok()).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        }
        _ => "(a message that is too large)".to_owned(),
    };
    // Escape sequences of a service do not reach the operator's terminal.
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// The position of an entry in its journal.
pub(super) fn cursor(entry: &str) -> Option<String> {
    let entry: Value = serde_json::from_str(entry).ok()?;
    entry["__CURSOR"].as_str().map(str::to_owned)
}

/// The states of units of one node.
pub(super) fn states(states: &[(&str, UnitState)]) -> String {
    let row = |(unit, state): &(&str, UnitState)| {
        let UnitState { load, active, sub, file, result } = state.clone();
        vec![(*unit).to_owned(), load, active, sub, file, result.unwrap_or_default()]
    };
    let mut text = String::new();
    let rows: Vec<_> = states.iter().map(row).collect();
    table(&mut text, &["SYSTEMD-UNIT", "LOAD", "ACTIVE", "SUB", "UNIT-FILE", "RESULT"], &rows);
    text
}

pub(super) fn states_json(node: &str, states: &[(&str, UnitState)]) -> String {
    line(&states.iter().map(|(unit, state)| state_json(node, unit, state)).collect())
}

fn state_json(node: &str, unit: &str, state: &UnitState) -> Value {
    let file = Some(&state.file).filter(|file| !file.is_empty());
    json!({
        "node": node,
        "systemd-unit": unit,
        "load": state.load,
        "active": state.active,
        "sub": state.sub,
        "unit-file": file,
        "result": state.result,
    })
}

pub(super) fn job_json(request: JobRequest<'_>, job: &Job) -> String {
    line(&json!({
        "job": job.id,
        "type": request.kind.as_str().to_ascii_lowercase(),
        "node": request.node,
        "systemd-unit": request.unit,
        "result": job.result,
    }))
}

/// Links that systemd created or removed.
pub(super) fn file_changes(changes: &[UnitFileChange]) -> String {
    let row = |(kind, link, target): &UnitFileChange| vec![kind.clone(), link.clone(), target.clone()];
    let mut text = String::new();
    let rows: Vec<_> = changes.iter().map(row).collect();
    if !rows.is_empty() {
        table(&mut text, &["CHANGE", "LINK", "TARGET"], &rows);
    }
    text
}

pub(super) fn file_changes_json(node: &str, changes: &[UnitFileChange]) -> String {
    let change = |(kind, link, target): &UnitFileChange| {
        let target = Some(target).filter(|target| !target.is_empty());
        json!({"change": kind, "link": link, "target": target})
    };
    line(&json!({"node": node, "changes": changes.iter().map(change).collect::<Value>()}))
}

/// The outcome of a command for one unit: the error, with its D-Bus name if it has one.
pub(super) fn outcome_json(node: &str, unit: &str, error: Option<(String, Option<String>)>) -> Value {
    let (error, name) = error.map_or((None, None), |(error, name)| (Some(error), name));
    json!({"node": node, "systemd-unit": unit, "error": error, "error-name": name})
}

/// One line of JSON.
pub(super) fn line(value: &Value) -> String {
    format!("{value}\n")
}

/// A change as one line of text.
pub(super) fn change(change: &Change, now_ms: u64) -> String {
    let time = utc(now_ms);
    let text = match change {
        Change::Unit { node, unit, state } => {
            let UnitState { load, active, sub, file, result } = state;
            let details = [("load", Some(load)), ("unit-file", Some(file)), ("result", result.as_ref())];
            let details = details.into_iter().filter_map(|(name, value)| {
                value.filter(|value| !value.is_empty()).map(|value| format!("  {name}={value}"))
            });
            format!("{time}  {node}  {unit}  {active}  {sub}{}", details.collect::<String>())
        }
        Change::Removed { node, unit, is_node_lost: true } => format!("{time}  {node}  {unit}  lost"),
        Change::Removed { node, unit, is_node_lost: false } => format!("{time}  {node}  {unit}  unloaded"),
        Change::Node { node, status } => format!("{time}  {node}  {status}"),
    };
    let printable = text.chars().map(|c| if c.is_control() { '?' } else { c });
    printable.chain(['\n']).collect()
}

/// A change as one line of JSON.
pub(super) fn change_json(change: &Change, now_ms: u64) -> String {
    let mut document = match change {
        Change::Unit { node, unit, state } => state_json(node, unit, state),
        Change::Removed { node, unit, .. } => json!({"node": node, "systemd-unit": unit}),
        Change::Node { node, status } => json!({"node": node, "status": status}),
    };
    let event = match change {
        Change::Unit { .. } => "unit",
        Change::Removed { is_node_lost: true, .. } => "unit-lost",
        Change::Removed { is_node_lost: false, .. } => "unit-unloaded",
        Change::Node { .. } => "node",
    };
    document["event"] = event.into();
    document["time"] = utc(now_ms).into();
    line(&document)
}

#[cfg(test)]
#[path = "render_tests.rs"]
mod tests;
