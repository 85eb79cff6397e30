//! The firewall's section of `juju status`, from the reports in a snapshot. Pure.

use super::explain::{Explained, State};
use super::machine_reports::MachineReports;
use super::observe::{self, Exposure, UnitFacts};
use super::report::{NO_REPORT, NOT_PROVISIONED};
use crate::model::{Cidr, MachineId};
use crate::status::sections::Firewall;
use crate::store::Snapshot;
use crate::store::snapshot::{Presence, Readable, StoredUnit};

/// The ports that are not as requested, and the problems of machines' firewalls.
pub fn of(snapshot: &Snapshot) -> Firewall {
    let view = firewall_view(snapshot);
    let placed = view.units_by_machine();
    let mut section = Firewall::default();
    for (&id, machine) in &snapshot.machines {
        let [controller, own] = machine.firewall_reports.clone();
        let agent = Ok((machine.agent == Presence::Here).then(Vec::new));
        let on = placed.get(&id).map_or(&[][..], Vec::as_slice);
        for explained in MachineReports::read(id, [controller, own, agent]).explain(&view, on) {
            add(&mut section, id, explained);
        }
        for path in &snapshot.missing {
            section.machines.entry(id).or_insert_with(|| format!("{path} is missing from the store"));
        }
    }
    section
}

fn add(section: &mut Firewall, machine: MachineId, explained: Explained) {
    let problem = explained.problem.filter(|problem| problem != NO_REPORT && problem != NOT_PROVISIONED);
    if let Some(problem) = &problem {
        section.machines.entry(machine).or_insert_with(|| problem.clone());
    }
    if let Some(words) = &explained.dry_run {
        section.dry_runs.entry(machine).or_insert_with(|| words.clone());
    }
    for line in explained.lines {
        let differs = !matches!(line.state, State::Open | State::Closed | State::Foreign | State::DryRun);
        let Some(unit) = line.id.filter(|_| differs) else { continue };
        let reason = match &problem {
            Some(problem) if matches!(line.state, State::Opening | State::Closing) => {
                format!("{line}; {problem}")
            }
            _ => line.to_string(),
        };
        section.units.entry(unit).or_default().push(reason);
    }
}

/// Converts the snapshot to the firewall's view.
fn firewall_view(snapshot: &Snapshot) -> observe::View {
    let exposure = |exposed: &Option<Readable<Vec<Cidr>>>| exposed.clone().map_or(Exposure::No, Exposure::To);
    let facts = |unit: &StoredUnit| {
        let record = unit.record.as_ref().map_err(String::clone);
        let record = record.map(|record| (record.name.clone(), record.service, record.machine));
        UnitFacts { record, ports: unit.ports.clone(), listed_on: None }
    };
    observe::View {
        services: snapshot.services.iter().map(|(id, seen)| (*id, exposure(&seen.exposed))).collect(),
        units: snapshot.units.iter().map(|(id, unit)| (*id, facts(unit))).collect(),
        ..observe::View::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::report::Report;
    use crate::model::{PortRange, Protocol, ServiceId, UnitId};
    use crate::status::render::{tabular, yaml};
    use crate::status::sections::{Machines, Services};
    use crate::status::{Scope, View};
    use crate::store::records;
    use crate::store::snapshot::{StoredMachine, StoredService};
    use serde_json::Map;

    /// One exposed service with a unit on each of two machines, each of which requests port 80.
    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::default();
        let record = records::Service {
            name: "web".parse().unwrap(),
            charm: "local:web-1".parse().unwrap(),
            rest: Map::new(),
        };
        let service = StoredService { record: Ok(record), exposed: Some(Ok(Vec::new())) };
        snapshot.services.insert(ServiceId::new(0), service);
        for n in 0..2 {
            let record = records::Unit {
                name: format!("web/{n}").parse().unwrap(),
                service: ServiceId::new(0),
                machine: Some(MachineId::new(n)),
                rest: Map::new(),
            };
            let ports = Ok(vec![PortRange::single(80, Protocol::Tcp).unwrap()]);
            snapshot
                .units
                .insert(UnitId::new(n), StoredUnit { record: Ok(record), ports, state: None, agent: false });
            let record = records::Machine {
                instance_id: Some(format!("i-{n}").parse().unwrap()),
                name: None,
                addresses: Vec::new(),
                adopted: false,
                rest: Map::new(),
            };
            let firewall_reports = [Ok(Some(report(n, &["0.0.0.0/0", "::/0"]).to_bytes())), Ok(None)];
            snapshot.machines.insert(
                MachineId::new(n),
                StoredMachine {
                    record: Ok(record),
                    agent: Presence::Never,
                    host: None,
                    firewall_reports,
                    problem: None,
                },
            );
        }
        snapshot
    }

    fn report(unit: u32, sources: &[&str]) -> Report {
        let ports = PortRange::single(80, Protocol::Tcp).unwrap();
        let rule = |source: &&str| portcullis_provider::rule::Rule::new(ports, source.parse().unwrap());
        let granted = sources.iter().map(rule).collect();
        Report { granted: [(UnitId::new(unit), granted)].into(), ..Report::default() }
    }

    #[test]
    fn a_dry_run_is_shown_once_under_its_machine() {
        let pending = report(0, &["0.0.0.0/0"]).granted[&UnitId::new(0)].rules().collect();
        let gone = report(9, &["0.0.0.0/0"]).granted;
        let mut report_of_both = report(0, &["0.0.0.0/0", "::/0"]);
        report_of_both.granted.extend(gone);
        let words = "would open 80/tcp from 0.0.0.0/0; would close 80/tcp from 0.0.0.0/0";
        let dry = Report { pending, dry_run: Some(words.to_owned()), ..report_of_both };
        let mut snapshot = snapshot();
        snapshot.machines.get_mut(&MachineId::new(0)).unwrap().firewall_reports[0] = Ok(Some(dry.to_bytes()));
        let idle = Report { dry_run: Some(String::new()), ..report(1, &["0.0.0.0/0", "::/0"]) };
        snapshot.machines.get_mut(&MachineId::new(1)).unwrap().firewall_reports[0] =
            Ok(Some(idle.to_bytes()));
        let section = of(&snapshot);
        let dry_runs = [(MachineId::new(0), words.to_owned()), (MachineId::new(1), String::new())].into();
        assert_eq!(section, Firewall { dry_runs, ..Firewall::default() }, "no problem, nothing pending");
        let view = View::new(&[&Machines(&snapshot), &Services(&snapshot), &section], &Scope::default());
        let yaml = yaml::render(&view.document());
        assert!(yaml.contains(&format!("    firewall: dry-run\n    firewall-info: {words}\n")), "{yaml}");
        assert_eq!((yaml.matches("firewall: dry-run").count(), yaml.matches("would").count()), (2, 2));
        assert!(!yaml.contains("firewall: pending") && !yaml.contains("problem"), "{yaml}");
        let table = tabular::render(&view);
        assert!(table.contains(&format!("machine 0  dry-run: {words}")), "{table}");
    }

    #[test]
    fn a_problem_of_one_machine_is_shown_and_hides_no_other() {
        assert_eq!(of(&snapshot()), Firewall::default());
        let waiting = || Report {
            pending: report(0, &["0.0.0.0/0"]).granted[&UnitId::new(0)].rules().collect(),
            ..report(0, &["0.0.0.0/0", "::/0"])
        };
        let trouble = |problem: &str| Report { problem: Some(problem.to_owned()), ..waiting() };
        for problem in [
            "the provider cannot be used: no credentials",
            "the provider is unavailable: cannot reach EC2 at http://127.0.0.1:1",
            "instance i-0 is gone",
            "the provider has no group for its rules",
            "closing 12 of 12 rules waits for a second read",
        ] {
            let mut snapshot = snapshot();
            snapshot.machines.get_mut(&MachineId::new(0)).unwrap().firewall_reports[0] =
                Ok(Some(trouble(problem).to_bytes()));
            let section = of(&snapshot);
            assert_eq!(section.machines, [(MachineId::new(0), problem.to_owned())].into());
            let reason = format!("80/tcp opening: to be opened to 0.0.0.0/0; {problem}");
            assert_eq!(section.units, [(UnitId::new(0), vec![reason])].into());
        }
        let mut garbled = snapshot();
        garbled.machines.get_mut(&MachineId::new(0)).unwrap().firewall_reports[0] = Ok(Some(b"{".to_vec()));
        let section = of(&garbled);
        assert!(
            section.machines[&MachineId::new(0)].starts_with("/controller/firewall/machine-0000000000: ")
        );
        assert_eq!(section.units.keys().collect::<Vec<_>>(), [&UnitId::new(0)]);
        let mut garbage = snapshot();
        garbage.units.get_mut(&UnitId::new(0)).unwrap().ports =
            Err("/units/unit-0000000000/ports: no".to_owned());
        let section = of(&garbage);
        let frozen = "80/tcp frozen: kept open to 0.0.0.0/0, ::/0: /units/unit-0000000000/ports: no";
        assert_eq!(section.units, [(UnitId::new(0), vec![frozen.to_owned()])].into());
        let mut unseen = snapshot();
        unseen.machines.get_mut(&MachineId::new(0)).unwrap().firewall_reports[0] = Ok(None);
        let section = of(&unseen);
        assert!(
            section.machines.is_empty()
                && section.units[&UnitId::new(0)][0].ends_with("not yet seen by a controller")
        );
    }
}
