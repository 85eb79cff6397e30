//! A view as a document with sorted keys; empty entries are left out. `render` formats it.

use super::{Machine, MachineState, Service, Unit, View};
use crate::model::MachineId;
use crate::runtime::clock::utc;
use crate::status::render::{Doc, Key};
use crate::status::sections::Health;
use crate::store::fleet::NodeRecord;

impl View {
    /// The document that YAML and JSON show, keys sorted.
    pub fn document(&self) -> Doc {
        let machine = |(id, machine): (&MachineId, &Machine)| {
            let health = self.health.get(id).and_then(|health| health.as_ref().ok());
            let errors: Vec<String> = self.machine_errors(*id).cloned().collect();
            (Key::Int(id.number().into()), machine.document(&errors, health))
        };
        let machines = self.machines.iter().map(machine).collect();
        let services = self
            .services
            .iter()
            .map(|(name, service)| (Key::Text(name.clone()), service.document()))
            .collect();
        let mut sections = vec![("machines".into(), Doc::Map(machines))];
        if !self.nodes.is_empty() {
            let nodes = self.nodes.iter().map(|(name, node)| (Key::Text(name.clone()), node_document(node)));
            sections.push(("nodes".into(), Doc::Map(nodes.collect())));
        }
        sections.push(("services".into(), Doc::Map(services)));
        Doc::Map(sections)
    }
}

fn optional(text: Option<&String>) -> Doc {
    text.map_or(Doc::Null, |text| Doc::Text(text.clone()))
}

/// A node of the fleet. Names of failed systemd units are followed by the number of others.
fn node_document(node: &NodeRecord) -> Doc {
    let mut entries = vec![("address".into(), optional(node.address.as_ref()))];
    if node.failed > 0 {
        let mut failed: Vec<Doc> = node.failed_units.iter().cloned().map(Doc::Text).collect();
        match node.failed.saturating_sub(failed.len()) {
            0 => {}
            more => failed.push(Doc::Text(format!("{more} more"))),
        }
        entries.push(("failed-systemd-units".into(), Doc::List(failed)));
    }
    if let Some(last_seen) = node.last_seen_ms {
        entries.push(("last-seen".into(), Doc::Text(utc(last_seen))));
    }
    entries.push(("status".into(), Doc::Text(node.status().to_owned())));
    Doc::Map(entries)
}

impl Machine {
    fn document(&self, errors: &[String], health: Option<&Health>) -> Doc {
        let mut entries = match &self.state {
            MachineState::Pending => vec![("instance-id".into(), Doc::Text("pending".to_owned()))],
            MachineState::Plain { agent_state, dns_name, hostname } => {
                let mut entries = vec![
                    ("agent-state".into(), Doc::Text((*agent_state).to_owned())),
                    ("dns-name".into(), optional(dns_name.as_ref())),
                ];
                entries.extend(hostname.iter().map(|name| ("hostname".into(), Doc::Text(name.clone()))));
                entries
            }
            MachineState::Unreadable(_) => Vec::new(),
            MachineState::Provisioned { agent_state, dns_name, instance_id, instance_state } => vec![
                ("agent-state".into(), Doc::Text((*agent_state).to_owned())),
                ("dns-name".into(), optional(dns_name.as_ref())),
                ("instance-id".into(), Doc::Text(instance_id.clone())),
                ("instance-state".into(), Doc::Text(instance_state.clone())),
            ],
        };
        entries.extend(self.name.iter().map(|name| ("name".into(), Doc::Text(name.clone()))));
        entries.extend(self.problem.iter().map(|problem| ("problem".into(), Doc::Text(problem.clone()))));
        if let Some(words) = &self.dry_run {
            entries.push(("firewall".into(), Doc::Text("dry-run".to_owned())));
            if !words.is_empty() {
                entries.push(("firewall-info".into(), Doc::Text(words.clone())));
            }
        }
        if !errors.is_empty() {
            entries.push(("error".into(), Doc::Text(errors.join("; "))));
        }
        if let Some(health) = health {
            let beats =
                [("flag", &health.flag), ("health", &health.health), ("last-beat", &health.last_beat)];
            entries.extend(beats.map(|(key, text)| (Key::from(key), Doc::Text(text.clone()))));
        }
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        Doc::Map(entries)
    }
}

impl Service {
    fn document(&self) -> Doc {
        let mut entries = Vec::new();
        if let Some(charm) = &self.charm {
            entries.push(("charm".into(), Doc::Text(charm.clone())));
        }
        if let Some(problem) = &self.error {
            entries.push(("error".into(), Doc::Text(problem.clone())));
        }
        if self.exposed {
            entries.push(("exposed".into(), Doc::Bool(true)));
        }
        if !self.exposed_to.is_empty() {
            let sources = self.exposed_to.iter().map(|source| Doc::Text(source.to_string())).collect();
            entries.push(("exposed-to".into(), Doc::List(sources)));
        }
        entries.push(("relations".into(), Doc::Map(Vec::new())));
        let units =
            self.units.iter().map(|(name, unit)| (Key::Text(name.clone()), unit.document())).collect();
        entries.push(("units".into(), Doc::Map(units)));
        Doc::Map(entries)
    }
}

impl Unit {
    fn document(&self) -> Doc {
        let mut entries = Vec::new();
        if let Some(state) = &self.agent_state {
            entries.push(("agent-state".into(), Doc::Text(state.clone())));
        }
        if !self.errors.is_empty() {
            entries.push(("error".into(), Doc::Text(self.errors.join("; "))));
        }
        if !self.firewall.is_empty() {
            let reasons = self.firewall.iter().cloned().map(Doc::Text).collect();
            entries.push(("firewall".into(), Doc::Text("pending".to_owned())));
            entries.push(("firewall-info".into(), Doc::List(reasons)));
        }
        if let Some((failure, output)) = &self.failure {
            entries.push(("hook-error".into(), Doc::Text(failure.clone())));
            if !output.is_empty() {
                let lines = output.iter().map(|line| Doc::Text(line.clone())).collect();
                entries.push(("hook-output".into(), Doc::List(lines)));
            }
        }
        entries.push(("machine".into(), self.machine.map_or(Doc::Null, |id| Doc::Int(id.number().into()))));
        if let Some(ports) = &self.open_ports {
            let ports = ports.iter().map(|port| Doc::Text(port.to_string())).collect();
            entries.push(("open-ports".into(), Doc::List(ports)));
        }
        entries.push(("public-address".into(), optional(self.public_address.as_ref())));
        Doc::Map(entries)
    }
}
