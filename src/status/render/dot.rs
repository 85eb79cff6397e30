//! A view as a graph in the language of Graphviz: services, their units, and the machines that
//! these are on. Pure.

use std::fmt::Write as _;

use super::svg::unit_lines;
use crate::status::view::{Machine, MachineState, View};

pub fn render(view: &View) -> String {
    let mut out = String::from("digraph status {\n  rankdir=LR;\n  node [fontname=\"sans-serif\"];\n");
    // Writing to a String cannot fail.
    for (id, machine) in &view.machines {
        let label = format!("machine {id}\n{}", machine_line(machine));
        let _ =
            writeln!(out, "  {} [shape=box3d, label={}];", quoted(&format!("machine {id}")), quoted(&label));
    }
    for (name, service) in &view.services {
        let node = quoted(&format!("service {name}"));
        let label = if service.exposed { format!("{name}\nexposed") } else { name.clone() };
        let style = if service.exposed { ", penwidth=3" } else { "" };
        let _ = writeln!(out, "  {node} [shape=ellipse, label={}{style}];", quoted(&label));
        for (name, unit) in &service.units {
            let unit_node = quoted(&format!("unit {name}"));
            let label = quoted(&unit_lines(name, unit).join("\n"));
            let _ = writeln!(out, "  {unit_node} [shape=box, label={label}];\n  {node} -> {unit_node};");
            if let Some(machine) = unit.machine {
                let _ = writeln!(out, "  {unit_node} -> {};", quoted(&format!("machine {machine}")));
            }
        }
    }
    out.push_str("}\n");
    out
}

pub(super) fn machine_line(machine: &Machine) -> String {
    match &machine.state {
        MachineState::Pending => "pending".to_owned(),
        MachineState::Plain { agent_state, dns_name: Some(address), .. } => {
            format!("{address} ({agent_state})")
        }
        MachineState::Plain { agent_state, dns_name: None, .. } => (*agent_state).to_owned(),
        MachineState::Unreadable(_) => "unreadable".to_owned(),
        MachineState::Provisioned { agent_state, dns_name, instance_id, .. } => {
            format!("{} ({agent_state})", dns_name.as_ref().unwrap_or(instance_id))
        }
    }
}

/// Returns a quoted identifier or label.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
