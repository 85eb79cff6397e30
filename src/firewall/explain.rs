//! Explains the state of each port of a machine and which changes are pending, from the requests in
//! the tree and the controller's last report. Pure. The provider is not read, so an explanation is
//! as old as the report.

use std::collections::BTreeMap;
use std::fmt;

use portcullis_provider::rule::{Cidr, Family, PortRange, Rule, RuleSet};
use serde_json::{Value, json};

use super::observe::{Readable, UnitFacts, View};
use super::report::{NO_REPORT, Report};
use super::wanted::PortRequest;
use crate::model::{MachineId, UnitId};

/// The state of one port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Open,
    /// Requested, and not open according to the last report.
    Opening,
    /// No longer requested, and not closed according to the last report.
    Closing,
    Closed,
    HeldBack,
    /// A controller in a dry run would open or close it.
    DryRun,
    Frozen,
    /// Opened by a rule that Portcullis does not own and does not change.
    Foreign,
    /// Not requested by any unit, now or before. It may still be open for other reasons.
    NotAsked,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Opening => "opening",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::HeldBack => "held back",
            Self::DryRun => "dry-run",
            Self::Frozen => "frozen",
            Self::Foreign => "foreign",
            Self::NotAsked => "not asked for",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// `None` for a unit without known ports.
    pub ports: Option<PortRange>,
    pub id: Option<UnitId>,
    pub unit: Option<String>,
    pub state: State,
    pub why: String,
}

/// The explanation of one machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Explained {
    /// Describes the firewall that has the rules, if that is not the controller's provider.
    pub by: Option<String>,
    /// The changes that a dry run would make, as text.
    pub dry_run: Option<String>,
    /// A problem of the machine as a whole.
    pub problem: Option<String>,
    pub lines: Vec<Line>,
}

impl Explained {
    /// Keeps only pending changes, including those that a dry run would make.
    pub fn pending(mut self) -> Option<Self> {
        self.lines.retain(|line| matches!(line.state, State::Opening | State::Closing | State::DryRun));
        (self.problem.is_some() || !self.lines.is_empty()).then_some(self)
    }

    /// Whether a controller still has changes to make.
    pub fn is_pending(&self) -> bool {
        let is_pending = |line: &Line| matches!(line.state, State::Opening | State::Closing);
        self.problem.is_some() || self.lines.iter().any(is_pending)
    }

    /// Marks closes as not pending, because a dry run closes no port.
    fn closes_to_dry_run(&mut self) {
        for line in self.lines.iter_mut().filter(|line| line.state == State::Closing) {
            line.why = format!("would be closed: {}", line.why);
            line.state = State::DryRun;
        }
    }

    /// Keeps only the lines about one range of ports.
    pub fn only_ports(mut self, asked: PortRange) -> Self {
        let meets = |ports: PortRange| {
            ports.proto() == asked.proto() && ports.from() <= asked.to() && asked.from() <= ports.to()
        };
        self.lines.retain(|line| line.ports.is_none_or(meets));
        if self.lines.is_empty() {
            let why = "no unit of this machine has opened it".to_owned();
            self.lines.push(Line { ports: Some(asked), id: None, unit: None, state: State::NotAsked, why });
        }
        self
    }

    pub fn to_json(&self) -> Value {
        let line = |line: &Line| {
            json!({
                "ports": line.ports.map(|ports| ports.to_string()),
                "unit": line.unit,
                "state": line.state.to_string(),
                "why": line.why,
            })
        };
        let ports: Vec<Value> = self.lines.iter().map(line).collect();
        let mut json = json!({"by": self.by, "problem": self.problem, "ports": ports});
        if let Some(changes) = &self.dry_run {
            json["dry-run"] = Value::from(changes.as_str());
        }
        json
    }

    /// Human-readable text: the problem, then one line per port.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        if let Some(by) = &self.by {
            text.push_str(&format!("firewall: {}\n", escape_control(by)));
        }
        if let Some(problem) = &self.problem {
            text.push_str(&format!("problem: {}\n", escape_control(problem)));
        }
        let cells = |line: &Line| {
            let ports = line.ports.map_or_else(|| "-".to_owned(), |ports| ports.to_string());
            (ports, line.state.to_string(), line.unit.clone().unwrap_or_else(|| "-".to_owned()))
        };
        let rows: Vec<_> = self.lines.iter().map(|line| (cells(line), escape_control(&line.why))).collect();
        let width = |cell: fn(&(String, String, String)) -> &String| {
            rows.iter().map(|(cells, _)| cell(cells).chars().count()).max().unwrap_or(0)
        };
        let (ports, state, unit) = (width(|c| &c.0), width(|c| &c.1), width(|c| &c.2));
        for ((p, s, u), why) in &rows {
            text.push_str(&format!("{p:<ports$}  {s:<state$}  {u:<unit$}  {why}\n"));
        }
        text
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ports) = self.ports {
            write!(f, "{ports} ")?;
        }
        write!(f, "{}: {}", self.state, self.why)
    }
}

/// Escapes text from znodes and providers, which must not control a terminal.
pub fn escape_control(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// `on` are the units on this machine; `report` is the report on it, if there is one.
pub fn explain(
    view: &View,
    machine: MachineId,
    on: &[UnitId],
    report: Option<&Readable<Report>>,
) -> Explained {
    let mut explained = Explained::default();
    let nothing = Report::default();
    let report = match report {
        None => {
            explained.problem = Some(NO_REPORT.to_owned());
            &nothing
        }
        Some(Err(problem)) => {
            explained.problem = Some(problem.clone());
            &nothing
        }
        Some(Ok(report)) => {
            explained.problem = report.problem.clone();
            explained.by = report.by.clone();
            explained.dry_run = report.dry_run.clone();
            report
        }
    };
    for &id in on {
        if let Some(unit) = view.units.get(id) {
            explain_unit(view, (id, unit), report, &mut explained.lines);
        }
    }
    explain_removed_units(view, machine, report, &mut explained.lines);
    let foreign = |text: &String| Line {
        ports: text.split(' ').next().and_then(|ports| crate::model::ports::parse_argument(ports).ok()),
        id: None,
        unit: None,
        state: State::Foreign,
        why: format!("foreign rule: {text}"),
    };
    explained.lines.extend(report.foreign.iter().map(foreign));
    if explained.dry_run.is_some() {
        explained.closes_to_dry_run();
    }
    explained
}

/// Explains all ports that a unit on this machine requests or had.
fn explain_unit(view: &View, (id, unit): (UnitId, &UnitFacts), report: &Report, lines: &mut Vec<Line>) {
    let had = report.granted.get(&id).cloned().unwrap_or_default();
    let name = name(id, unit);
    let mut add_line = |ports: Option<PortRange>, state, why: String| {
        lines.push(Line { ports, id: Some(id), unit: Some(name.clone()), state, why });
    };
    let request = match (view.request(unit), report.frozen.get(&id)) {
        // Only the controller reads whether the ports node is missing: in this view the unit merely
        // requests no ports.
        (PortRequest::Exposed { ports, .. }, Some(reason)) if ports.is_empty() && !had.is_empty() => {
            PortRequest::Frozen { reason: reason.clone() }
        }
        (request, _) => request,
    };
    match request {
        PortRequest::Exposed { ports, sources } => {
            for &range in &ports {
                explain_requested(id, &from_each(&[range], &sources), &had, report, &mut add_line);
            }
            for (range, sources) in by_ports(&had.minus(&from_each(&ports, &sources))) {
                add_line(Some(range), State::Closing, format!("no longer wanted from {sources}"));
            }
        }
        PortRequest::Frozen { reason } => {
            for (range, sources) in by_ports(&had) {
                add_line(Some(range), State::Frozen, format!("kept open to {sources}: {reason}"));
            }
            if had.is_empty() {
                add_line(None, State::Frozen, reason);
            }
        }
        PortRequest::NotExposed => {
            for (range, _) in by_ports(&had) {
                add_line(Some(range), State::Closing, not_exposed(unit));
            }
            for &range in unit.ports.iter().flatten() {
                if intersection(&had, &from_each(&[range], &sources(&had))).is_empty() {
                    add_line(Some(range), State::Closed, not_exposed(unit));
                }
            }
        }
    }
}

/// Explains the ports that an exposed unit requests: granted, held back, or not processed yet.
fn explain_requested(
    id: UnitId,
    wanted: &RuleSet,
    had: &RuleSet,
    report: &Report,
    add_line: &mut impl FnMut(Option<PortRange>, State, String),
) {
    let granted = intersection(wanted, had);
    let waiting = intersection(&granted, &report.pending.iter().copied().collect());
    let (state, verb) = match report.dry_run {
        Some(_) => (State::DryRun, "would be opened to"),
        None => (State::Opening, "to be opened to"),
    };
    for (ports, sources) in by_ports(&waiting) {
        add_line(Some(ports), state, format!("{verb} {sources}"));
    }
    for (ports, sources) in by_ports(&granted.minus(&waiting)) {
        add_line(Some(ports), State::Open, format!("asked for and exposed, open to {sources}"));
    }
    let of_unit = report.denied.iter().filter(|(unit, _, _)| *unit == id);
    let denied: Vec<_> = of_unit
        .filter(|(_, ports, _)| !intersection(wanted, &from_each(&[*ports], &sources(wanted))).is_empty())
        .collect();
    for (_, ports, reason) in &denied {
        add_line(Some(*ports), State::HeldBack, reason.clone());
    }
    let denied_ranges: Vec<PortRange> = denied.iter().map(|(_, ports, _)| *ports).collect();
    let mut missing = wanted.minus(had).minus(&from_each(&denied_ranges, &sources(wanted)));
    if report.no_ipv6 {
        let v6: RuleSet = missing.rules().filter(|rule| rule.source.family() == Family::V6).collect();
        missing = missing.minus(&v6);
        if wanted.rules().all(|rule| rule.source.family() == Family::V6) {
            for (ports, sources) in by_ports(&v6) {
                let why = format!("exposed to {sources} alone, and IPv6 does not reach the machine");
                add_line(Some(ports), State::HeldBack, why);
            }
        }
    }
    for (ports, sources) in by_ports(&missing) {
        if report.more_denied > 0 {
            let why = format!("among {} more that policy holds back", report.more_denied);
            add_line(Some(ports), State::HeldBack, why);
            continue;
        }
        add_line(
            Some(ports),
            State::Opening,
            format!("asked for and exposed to {sources}, not yet seen by a controller"),
        );
    }
}

fn intersection(a: &RuleSet, b: &RuleSet) -> RuleSet {
    a.minus(&a.minus(b))
}

fn sources(rules: &RuleSet) -> Vec<Cidr> {
    rules.rules().map(|rule| rule.source).collect()
}

fn from_each(ranges: &[PortRange], sources: &[Cidr]) -> RuleSet {
    sources.iter().flat_map(|source| ranges.iter().map(|range| Rule::new(*range, *source))).collect()
}

/// Explains the rules of units that were removed or moved to another machine.
fn explain_removed_units(view: &View, machine: MachineId, report: &Report, lines: &mut Vec<Line>) {
    for (id, had) in &report.granted {
        let facts = view.units.get(*id);
        if facts.is_some_and(|unit| unit.machine() == Some(machine)) {
            continue;
        }
        // A unit whose machine cannot be read keeps its rules.
        let lost = facts.and_then(|unit| unit.record.as_ref().err());
        let lost = lost.or_else(|| report.frozen.get(id).filter(|_| facts.is_none()));
        for (ports, _) in by_ports(had) {
            let (state, why) = match lost {
                Some(reason) => (State::Frozen, reason.clone()),
                None => (State::Closing, "the unit is gone from this machine".to_owned()),
            };
            let known =
                facts.and_then(|facts| facts.record.as_ref().ok()).map(|(name, _, _)| name.to_string());
            let unit = known.or_else(|| report.names.get(id).cloned()).unwrap_or_else(|| id.key());
            lines.push(Line { ports: Some(ports), id: Some(*id), unit: Some(unit), state, why });
        }
    }
}

fn name(id: UnitId, unit: &UnitFacts) -> String {
    unit.record.as_ref().map_or_else(|_| id.key(), |(name, _, _)| name.to_string())
}

fn not_exposed(unit: &UnitFacts) -> String {
    match &unit.record {
        Ok((name, _, _)) => format!("service '{}' is not exposed", name.service()),
        Err(reason) => reason.clone(),
    }
}

/// Groups rules by ports, with all their sources as text.
fn by_ports(rules: &RuleSet) -> BTreeMap<PortRange, String> {
    let mut ports: BTreeMap<PortRange, String> = BTreeMap::new();
    for rule in rules.rules() {
        let sources = ports.entry(rule.ports).or_default();
        if !sources.is_empty() {
            sources.push_str(", ");
        }
        sources.push_str(&rule.source.to_string());
    }
    ports
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
