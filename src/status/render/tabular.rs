//! A view as three tables: machines, services, units. Columns are as wide as their contents; empty
//! cells are dashes. Units are sorted by number, so that 10 comes after 9. Pure.

use crate::runtime::clock::utc;
use crate::status::view::{Machine, MachineState, Service, Unit, View};
use crate::store::fleet::NodeRecord;

pub fn render(view: &View) -> String {
    let mut out = String::new();
    let mut head = vec!["MACHINE", "STATE", "INSTANCE", "INSTANCE-STATE", "ADDRESS"];
    if has_names(view) {
        head.push("NAME");
    }
    if !view.health.is_empty() {
        head.extend(["HEALTH", "FLAG", "LAST-BEAT"]);
    }
    table(&mut out, &head, &machine_rows(view));
    out.push('\n');
    table(&mut out, &["SERVICE", "CHARM", "EXPOSED", "UNITS"], &service_rows(view));
    out.push('\n');
    table(&mut out, &["UNIT", "STATE", "MACHINE", "OPEN-PORTS", "ADDRESS"], &unit_rows(view));
    if !view.nodes.is_empty() {
        out.push('\n');
        table(
            &mut out,
            &["NODE", "STATUS", "FAILED-SYSTEMD-UNITS", "ADDRESS", "LAST-SEEN"],
            &node_rows(view),
        );
    }
    for (title, rows) in [("FIREWALL", firewall_rows(view)), ("ERROR", error_rows(view))] {
        if !rows.is_empty() {
            out.push('\n');
            table(&mut out, &["OF", title], &rows);
        }
    }
    out
}

/// Whether there is a column for the names of machines.
fn has_names(view: &View) -> bool {
    view.machines.values().any(|machine| machine.name.is_some())
}

fn machine_rows(view: &View) -> Vec<Vec<String>> {
    let row = |(id, machine): (_, &Machine)| match &machine.state {
        MachineState::Pending => vec![format!("{id}"), String::new(), "pending".to_owned()],
        MachineState::Plain { agent_state, dns_name, .. } => vec![
            format!("{id}"),
            (*agent_state).to_owned(),
            String::new(),
            String::new(),
            dns_name.clone().unwrap_or_default(),
        ],
        MachineState::Unreadable(_) => vec![format!("{id}"), "error".to_owned()],
        MachineState::Provisioned { agent_state, dns_name, instance_id, instance_state } => vec![
            format!("{id}"),
            (*agent_state).to_owned(),
            instance_id.clone(),
            instance_state.clone(),
            dns_name.clone().unwrap_or_default(),
        ],
    };
    let health = |id| match view.health.get(id) {
        Some(Ok(health)) => vec![health.health.clone(), health.flag.clone(), health.last_beat.clone()],
        Some(Err(_)) => vec!["error".to_owned()],
        None => Vec::new(),
    };
    let has_names = has_names(view);
    let whole = |(id, machine): (_, &Machine)| {
        let mut row = row((id, machine));
        row.resize(5, String::new());
        if has_names {
            row.push(machine.name.clone().unwrap_or_default());
        }
        row.extend(health(id));
        row
    };
    view.machines.iter().map(whole).collect()
}

fn service_rows(view: &View) -> Vec<Vec<String>> {
    let row = |(name, service): (&String, &Service)| {
        vec![
            name.clone(),
            service.charm.clone().unwrap_or_default(),
            exposed(service),
            service.units.len().to_string(),
        ]
    };
    view.services.iter().map(row).collect()
}

fn exposed(service: &Service) -> String {
    match (service.exposed, &service.exposed_to[..]) {
        (false, _) => "no".to_owned(),
        (true, []) => "yes".to_owned(),
        (true, sources) => sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

fn unit_rows(view: &View) -> Vec<Vec<String>> {
    let row = |(name, unit): (&String, &Unit)| {
        let ports: Vec<String> = unit.open_ports.iter().flatten().map(ToString::to_string).collect();
        vec![
            name.clone(),
            unit.agent_state.clone().unwrap_or_else(|| "error".to_owned()),
            unit.machine.map(|id| id.to_string()).unwrap_or_default(),
            ports.join(","),
            unit.public_address.clone().unwrap_or_default(),
        ]
    };
    let number = |name: &str| name.rsplit('/').next().and_then(|n| n.parse::<u32>().ok());
    view.services
        .values()
        .flat_map(|service| {
            let mut units: Vec<_> = service.units.iter().collect();
            units.sort_by_key(|(name, _)| number(name));
            units.into_iter().map(row)
        })
        .collect()
}

fn node_rows(view: &View) -> Vec<Vec<String>> {
    let row = |(name, node): (&String, &NodeRecord)| {
        let last_seen = node.last_seen_ms.map(utc).unwrap_or_default();
        let address = node.address.clone().unwrap_or_default();
        vec![name.clone(), node.status().to_owned(), node.failed.to_string(), address, last_seen]
    };
    view.nodes.iter().map(row).collect()
}

fn firewall_rows(view: &View) -> Vec<Vec<String>> {
    let machines = view.machines.iter().filter_map(|(id, machine)| {
        machine.problem.as_ref().map(|problem| vec![format!("machine {id}"), problem.clone()])
    });
    let dry_runs = view.machines.iter().filter_map(|(id, machine)| {
        let words = machine.dry_run.as_ref()?;
        let said = if words.is_empty() { "dry-run".to_owned() } else { format!("dry-run: {words}") };
        Some(vec![format!("machine {id}"), said])
    });
    let machines = machines.chain(dry_runs);
    let units = view.services.values().flat_map(|service| &service.units);
    let units =
        units.flat_map(|(name, unit)| unit.firewall.iter().map(|reason| vec![name.clone(), reason.clone()]));
    machines.chain(units).collect()
}

fn error_rows(view: &View) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> =
        view.nodes_error.iter().map(|problem| vec!["nodes".to_owned(), problem.clone()]).collect();
    for id in view.machines.keys() {
        let problems = view.machine_errors(*id);
        rows.extend(problems.map(|problem| vec![format!("machine {id}"), problem.clone()]));
    }
    for (name, service) in &view.services {
        rows.extend(service.error.iter().map(|problem| vec![name.clone(), problem.clone()]));
        for (unit, seen) in &service.units {
            rows.extend(seen.failure.iter().map(|(failure, _)| vec![unit.clone(), failure.clone()]));
            rows.extend(seen.errors.iter().map(|problem| vec![unit.clone(), problem.clone()]));
        }
    }
    rows
}

/// Adds a table. Rows may be shorter than the head; every empty cell becomes a dash.
pub fn table(out: &mut String, head: &[&str], rows: &[Vec<String>]) {
    let cell = |row: &[String], column: usize| match row.get(column).map(String::as_str) {
        None | Some("") => "-".to_owned(),
        Some(text) => text.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
    };
    let filled = rows.iter().map(|row| (0..head.len()).map(|column| cell(row, column)).collect());
    let mut lines: Vec<Vec<String>> = vec![head.iter().map(|&title| title.to_owned()).collect()];
    lines.extend(filled);
    let widths: Vec<usize> = (0..head.len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    for line in &lines {
        let padded: Vec<String> =
            line.iter().zip(&widths).map(|(text, &width)| format!("{text:<width$}")).collect();
        out.push_str(padded.join("  ").trim_end());
        out.push('\n');
    }
}
