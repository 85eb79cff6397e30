//! Views of snapshots. The golden files are in `fixtures/status/`; `BLESS=1` writes them again, and
//! the difference is reviewed like code.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::render::{dot, json as as_json, svg, tabular, yaml};
use super::sections::{Firewall, Health, Heartbeat, Machines, Nodes, Services};
use super::view::MachineState;
use super::{Scope, View};
use crate::model::{MachineId, PortRange, Protocol, ServiceId, UnitId};
use crate::store::failed_stops::FailedStop;
use crate::store::fleet::{NodeRecord, NodeRecords};
use crate::store::snapshot::{Presence, StoredMachine, StoredService, StoredUnit};
use crate::store::{Snapshot, records};

fn rest(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}

fn service(name: &str, exposed: bool) -> StoredService {
    let record = records::Service {
        name: name.parse().unwrap(),
        charm: format!("local:{name}-1").parse().unwrap(),
        rest: Map::new(),
    };
    StoredService { record: Ok(record), exposed: exposed.then(|| Ok(Vec::new())) }
}

fn unit(
    name: &str,
    service: u32,
    machine: Option<u32>,
    state: Option<&str>,
    ports: &[(u16, u16)],
) -> StoredUnit {
    let record = records::Unit {
        name: name.parse().unwrap(),
        service: ServiceId::new(service),
        machine: machine.map(MachineId::new),
        rest: Map::new(),
    };
    let ports = ports.iter().map(|&(from, to)| PortRange::new(from, to, Protocol::Tcp).unwrap()).collect();
    let state = state.map(|label| {
        let failure = label.strip_suffix("-error").map(|hook| {
            let output = ["cannot reach the mirror".to_owned(), "giving: up".to_owned()];
            (format!("{hook} hook: exit code 1"), output.to_vec())
        });
        Ok(records::UnitState { label: label.to_owned(), failure })
    });
    StoredUnit { record: Ok(record), ports: Ok(ports), agent: state.is_some(), state }
}

fn machine(instance: Option<&str>, address: Option<&str>, here: bool) -> StoredMachine {
    let record = records::Machine {
        instance_id: instance.map(|id| id.parse().unwrap()),
        name: None,
        addresses: address.into_iter().map(str::to_owned).collect(),
        adopted: false,
        rest: rest(if instance.is_some() { json!({"instance-state": "running"}) } else { json!({}) }),
    };
    let agent = if here { Presence::Here } else { Presence::Never };
    let firewall_reports = [Ok(None), Ok(None)];
    StoredMachine { record: Ok(record), agent, host: None, firewall_reports, problem: None }
}

/// A plain machine: its agent reports the host.
fn plain(name: Option<&str>, address: Option<&str>, agent: Presence) -> StoredMachine {
    let mut stored = StoredMachine { agent, ..machine(None, address, false) };
    stored.record.as_mut().unwrap().name = name.map(|name| name.parse().unwrap());
    let addresses = ["192.0.2.7", "2001:db8::7"].map(|text| text.parse().unwrap());
    stored.host = (agent != Presence::Never).then(|| Ok(records::Host::new("host7", addresses)));
    stored
}

/// The input of all sections.
#[derive(Default)]
struct Input {
    snapshot: Snapshot,
    firewall: Firewall,
    heartbeat: Heartbeat,
    nodes: Nodes,
}

impl From<Snapshot> for Input {
    fn from(snapshot: Snapshot) -> Self {
        Self { snapshot, ..Self::default() }
    }
}

fn by_number<I: Ord, S>(make: impl Fn(u32) -> I, seen: impl IntoIterator<Item = S>) -> BTreeMap<I, S> {
    (0..).map(make).zip(seen).collect()
}

/// One of everything: exposed or not, ports in order of opening, a pending machine, a unit without
/// a machine, a lost agent, and ten machines to show their order.
fn whole() -> Snapshot {
    let mut machines = vec![
        machine(Some("i-1"), Some("ec2-1.example.com"), true),
        machine(None, None, false),
        machine(Some("i-2"), Some("mysql-1.example.com"), true),
        machine(Some("i-3"), None, false),
    ];
    machines.extend((4..11).map(|_| machine(None, None, false)));
    let mut down = unit("wordpress/2", 1, Some(3), Some("started"), &[]);
    down.agent = false;
    Snapshot {
        services: by_number(
            ServiceId::new,
            [service("mysql", true), service("wordpress", false), service("idle", true)],
        ),
        units: by_number(
            UnitId::new,
            [
                unit("mysql/1", 0, Some(2), Some("started"), &[(8000, 8080), (80, 80)]),
                unit("mysql/2", 0, Some(0), Some("install-error"), &[]),
                unit("wordpress/0", 1, Some(10), None, &[(80, 80)]),
                unit("wordpress/10", 1, None, None, &[]),
                down,
                unit("wordpress/3", 1, Some(99), None, &[]),
            ],
        ),
        machines: by_number(MachineId::new, machines),
        ..Snapshot::default()
    }
}

/// The same with an unreadable znode of every kind.
fn corrupt() -> Input {
    let mut input = Input::from(whole());
    let snapshot = &mut input.snapshot;
    let broken = |path: &str| format!("{path}: not JSON: expected value at line 1 column 1");
    snapshot.services.get_mut(&ServiceId::new(1)).unwrap().record =
        Err(broken("/services/service-0000000001"));
    snapshot.service_names.insert(ServiceId::new(1), "wordpress".to_owned());
    snapshot.units.get_mut(&UnitId::new(0)).unwrap().ports = Err(broken("/units/unit-0000000000/ports"));
    snapshot.units.get_mut(&UnitId::new(1)).unwrap().record = Err(broken("/units/unit-0000000001"));
    snapshot.unit_names.insert(UnitId::new(1), "mysql/2".to_owned());
    snapshot.units.get_mut(&UnitId::new(5)).unwrap().record = Err(broken("/units/unit-0000000005"));
    snapshot.machines.get_mut(&MachineId::new(3)).unwrap().record =
        Err(broken("/machines/machine-0000000003"));
    let health = Health {
        health: "ok".to_owned(),
        flag: "OK".to_owned(),
        last_beat: "2026-02-03T04:05:06Z".to_owned(),
    };
    input.heartbeat.0.insert(MachineId::new(0), Ok(health));
    for machine in [2, 3] {
        let beats = "/controller/heartbeat/components/0007: no JSON".to_owned();
        input.heartbeat.0.insert(MachineId::new(machine), Err(beats));
    }
    input
}

fn view(input: impl Into<Input>, scopes: &[&str]) -> View {
    let Input { snapshot, firewall, heartbeat, nodes } = input.into();
    let scope = Scope::new(scopes.iter().copied());
    View::new(&[&Machines(&snapshot), &Services(&snapshot), &firewall, &heartbeat, &nodes], &scope)
}

fn golden(name: &str, shown: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/status").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, shown).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(shown, wanted, "{name} differs; BLESS=1 writes it anew");
}

#[test]
fn everything_in_every_format() {
    let view = view(whole(), &[]);
    golden("whole.yaml", &yaml::render(&view.document()));
    golden("whole.json", &as_json::render(&view.document()));
    golden("whole.txt", &tabular::render(&view));
    golden("whole.dot", &dot::render(&view));
    golden("whole.svg", &svg::render(&view));
}

#[test]
fn nodes_are_shown_with_their_failed_systemd_units() {
    let online = NodeRecord {
        machine: Some(2),
        online: true,
        address: Some("192.0.2.1".to_owned()),
        failed: 3,
        failed_units: vec!["a.service".to_owned(), "b.mount".to_owned()],
        last_seen_ms: None,
    };
    let lost =
        NodeRecord { machine: Some(0), last_seen_ms: Some(1_794_814_812_000), ..NodeRecord::default() };
    let nodes = NodeRecords::from([("web1".to_owned(), online), ("0".to_owned(), lost)]);
    let input = |nodes| Input { snapshot: whole(), nodes: Nodes(nodes), ..Input::default() };
    let shown = view(input(Ok(nodes.clone())), &[]);
    let text = yaml::render(&shown.document());
    let section = text.split_once("\nnodes:\n").unwrap().1.split_once("\nservices:").unwrap().0;
    assert_eq!(
        format!("nodes:\n{section}"),
        "\
nodes:
  '0':
    address: null
    last-seen: '2026-11-16T07:40:12Z'
    status: offline
  web1:
    address: 192.0.2.1
    failed-systemd-units:
    - a.service
    - b.mount
    - 1 more
    status: online"
    );
    let table = tabular::render(&shown);
    let table = table.split("\n\n").find(|table| table.starts_with("NODE")).unwrap();
    assert_eq!(
        table.trim_end(),
        "\
NODE  STATUS   FAILED-SYSTEMD-UNITS  ADDRESS    LAST-SEEN
0     offline  0                     -          2026-11-16T07:40:12Z
web1  online   3                     192.0.2.1  -"
    );
    // A scope shows the nodes of the machines that it shows.
    let cut = view(input(Ok(nodes)), &["mysql/1"]);
    assert_eq!(cut.nodes.keys().collect::<Vec<_>>(), ["web1"]);
    let problem = "/controller/fleet/nodes: not a list of nodes".to_owned();
    let broken = view(input(Err(problem.clone())), &[]);
    assert_eq!(broken.errors().into_iter().collect::<Vec<_>>(), [problem.as_str()]);
    assert!(tabular::render(&broken).contains(&problem));
}

#[test]
fn pictures_escape_special_characters_of_names() {
    let mut snapshot = whole();
    let nasty = "/x: \"<&\\\u{1b}".to_owned();
    snapshot.units.get_mut(&UnitId::new(1)).unwrap().record = Err(nasty);
    snapshot.unit_names.insert(UnitId::new(1), "a\"b<c>&\\/2".to_owned());
    let view = view(snapshot, &[]);
    let picture = svg::render(&view);
    assert!(picture.contains("a&quot;b&lt;c&gt;&amp;\\/2"), "{picture}");
    assert!(!picture.chars().any(|c| c.is_control() && c != '\n'));
    let graph = dot::render(&view);
    assert!(graph.contains("\"unit a\\\"b<c>&\\\\/2\""), "{graph}");
}

#[test]
fn an_unreadable_state_is_shown_as_an_error() {
    let mut snapshot = whole();
    let problem = "/units/unit-0000000000/state: \"state\" is missing".to_owned();
    snapshot.units.get_mut(&UnitId::new(0)).unwrap().state = Some(Err(problem.clone()));
    let unit = &view(snapshot, &[]).services["mysql"].units["mysql/1"];
    assert_eq!((&unit.agent_state, &unit.errors), (&None, &vec![problem]));
}

#[test]
fn unreadable_records_are_shown_and_hide_no_others() {
    let view = view(corrupt(), &[]);
    golden("corrupt.yaml", &yaml::render(&view.document()));
    golden("corrupt.txt", &tabular::render(&view));
}

/// The same with problems of firewalls.
fn pending() -> Input {
    let mut input = Input::from(whole());
    let reasons = ["80/tcp opening: to be opened to 0.0.0.0/0", "22/tcp held back: policy forbids the port"];
    input.firewall.units.insert(UnitId::new(0), reasons.map(str::to_owned).to_vec());
    input.firewall.machines.insert(MachineId::new(2), "calls for machine 2 are throttled".to_owned());
    input.firewall.machines.insert(MachineId::new(3), "instance i-3 is gone".to_owned());
    input
}

#[test]
fn pending_firewall_changes_are_shown_at_their_units_and_machines() {
    let view = view(pending(), &[]);
    golden("pending.yaml", &yaml::render(&view.document()));
    golden("pending.txt", &tabular::render(&view));
    assert!(view.errors().is_empty(), "waiting is no error");
}

#[test]
fn unreadable_records_are_listed_once_and_within_scope() {
    let errors: Vec<String> =
        view(corrupt(), &["mysql/*"]).errors().into_iter().map(|text| text[..23].to_owned()).collect();
    assert_eq!(errors, ["/controller/heartbeat/c", "/units/unit-0000000000/", "/units/unit-0000000001:"]);
    assert_eq!(view(corrupt(), &[]).errors().len(), 7);
    assert_eq!(view(corrupt(), &["idle"]).errors().len(), 0);
    assert!(view(whole(), &[]).errors().is_empty());
}

#[test]
fn limits_on_sources_are_shown_and_unreadable_ones_are_errors() {
    let mut snapshot = whole();
    let mysql = ServiceId::new(0);
    let sources = ["192.0.2.0/24", "2001:db8::/32"].map(|text| text.parse().unwrap()).to_vec();
    snapshot.services.get_mut(&mysql).unwrap().exposed = Some(Ok(sources));
    let limited = yaml::render(&view(snapshot.clone(), &["mysql"]).document());
    let shown =
        "    exposed: true\n    exposed-to:\n    - 192.0.2.0/24\n    - 2001:db8::/32\n    relations: {}\n";
    assert!(limited.contains(shown), "{limited}");
    assert!(tabular::render(&view(snapshot.clone(), &["mysql"])).contains("192.0.2.0/24,2001:db8::/32"));
    let problem = "/services/service-0000000000/exposed: not a JSON object".to_owned();
    snapshot.services.get_mut(&mysql).unwrap().exposed = Some(Err(problem.clone()));
    let broken = view(snapshot, &["mysql"]);
    assert_eq!(broken.services["mysql"].error, Some(problem));
    assert!(broken.services["mysql"].exposed);
}

#[test]
fn plain_machines_are_shown_from_the_presence_of_their_agents() {
    let snapshot = Snapshot {
        machines: by_number(
            MachineId::new,
            [
                plain(None, None, Presence::Never),
                plain(None, None, Presence::Here),
                plain(Some("web.rack1"), Some("web.example.com"), Presence::Here),
                plain(None, Some("192.0.2.9"), Presence::Never),
                plain(Some("db"), None, Presence::Gone),
            ],
        ),
        services: by_number(ServiceId::new, [service("mysql", true)]),
        units: by_number(UnitId::new, [unit("mysql/0", 0, Some(1), Some("started"), &[(80, 80)])]),
        ..Snapshot::default()
    };
    let shown = view(snapshot.clone(), &[]);
    golden("plain.yaml", &yaml::render(&shown.document()));
    golden("plain.json", &as_json::render(&shown.document()));
    golden("plain.txt", &tabular::render(&shown));
    golden("plain.dot", &dot::render(&shown));
    golden("plain.svg", &svg::render(&shown));

    let mut unreadable = snapshot;
    let problem = "/machines/machine-0000000001/host: not JSON".to_owned();
    unreadable.machines.get_mut(&MachineId::new(1)).unwrap().host = Some(Err(problem.clone()));
    let machine = &view(unreadable, &[]).machines[&MachineId::new(1)];
    assert_eq!(machine.problem, Some(problem));
    assert_eq!(machine.state, MachineState::Plain { agent_state: "running", dns_name: None, hostname: None });
}

#[test]
fn an_empty_environment_is_two_empty_maps() {
    let view = view(Snapshot::default(), &[]);
    assert_eq!(yaml::render(&view.document()), "machines: {}\nservices: {}\n");
    assert_eq!(as_json::render(&view.document()), "{\"machines\":{},\"services\":{}}\n");
}

#[test]
fn scopes_select_services_units_and_their_machines() {
    for (scopes, units, machines) in [
        (&["mysql"][..], &["mysql/1", "mysql/2"][..], &[0, 2][..]),
        (&["mysql/*"], &["mysql/1", "mysql/2"], &[0, 2]),
        (&["*/1"], &["mysql/1"], &[2]),
        (&["my*", "wordpress/0"], &["mysql/1", "mysql/2", "wordpress/0"], &[0, 2, 10]),
        (&["[iw]*"], &["wordpress/0", "wordpress/10", "wordpress/2", "wordpress/3"], &[3, 10]),
        (&["nothing"], &[], &[]),
        (&["wordpress/77"], &[], &[]),
    ] {
        let view = view(whole(), scopes);
        let shown: Vec<&String> = view.services.values().flat_map(|service| service.units.keys()).collect();
        assert_eq!(shown, units, "{scopes:?}");
        let shown: Vec<u32> = view.machines.keys().map(|id| id.number()).collect();
        assert_eq!(shown, machines, "{scopes:?}");
    }
    assert!(view(whole(), &["idle"]).services["idle"].units.is_empty());
    assert_eq!(yaml::render(&view(whole(), &["x"]).document()), "machines: {}\nservices: {}\n");
}

#[test]
fn a_unit_of_a_missing_service_is_shown() {
    let mut snapshot = whole();
    snapshot.services.remove(&ServiceId::new(0));
    let view = view(snapshot, &["mysql"]);
    let mysql = &view.services["mysql"];
    assert_eq!(
        mysql.error.as_deref(),
        Some("unit mysql/1 is of service-0000000000, which is not in the store")
    );
    assert_eq!(mysql.units.len(), 2);
    assert_eq!(mysql.units["mysql/1"].open_ports, None);
}

#[test]
fn a_lost_agent_is_shown_differently_from_one_that_never_started() {
    for (agent, health, state) in [
        (Presence::Never, None, "not-started"),
        (Presence::Here, None, "running"),
        (Presence::Gone, None, "down"),
        (Presence::Here, Some("dead"), "down"),
        (Presence::Gone, Some("ok"), "running"),
        (Presence::Gone, Some("stopped"), "down"),
    ] {
        let id = MachineId::new(0);
        let seen = StoredMachine { agent, ..machine(Some("i-1"), None, true) };
        let health_of = |health: &str| {
            let text = |text: &str| text.to_owned();
            (id, Ok(Health { health: text(health), flag: text("OK"), last_beat: text("never") }))
        };
        let mut input = Input::from(Snapshot { machines: [(id, seen)].into(), ..Snapshot::default() });
        input.heartbeat.0.extend(health.map(health_of));
        let view = view(input, &[]);
        let MachineState::Provisioned { agent_state, .. } = view.machines[&id].state else { panic!() };
        assert_eq!(agent_state, state, "{agent:?}, {health:?}");
    }
}

#[test]
fn a_machine_whose_agent_runs_is_not_shown_as_stopped() {
    for (agent, health, shown) in [
        (Presence::Here, "stopped", "unknown"),
        (Presence::Gone, "stopped", "stopped"),
        (Presence::Here, "ok", "ok"),
        (Presence::Here, "dead", "dead"),
    ] {
        let id = MachineId::new(0);
        let seen = StoredMachine { agent, ..machine(Some("i-1"), None, true) };
        let health =
            Health { health: health.to_owned(), flag: "OK".to_owned(), last_beat: "never".to_owned() };
        let mut input = Input::from(Snapshot { machines: [(id, seen)].into(), ..Snapshot::default() });
        input.heartbeat.0.insert(id, Ok(health.clone()));
        assert_eq!(view(input, &[]).health[&id].as_ref().unwrap().health, shown, "{agent:?}, {health:?}");
    }
}

#[test]
fn a_unit_with_a_failed_stop_hook_is_shown_without_its_service() {
    let said = |name: &str| {
        let failure = Some(("stop hook: exit code 1".to_owned(), vec!["no".to_owned()]));
        let state = records::UnitState { label: "stop-error".to_owned(), failure };
        Ok(FailedStop { name: name.parse().unwrap(), state })
    };
    let mut snapshot = whole();
    // Machine 0 has an agent, machine 1 never had one.
    for (id, machine, said) in
        [(90, 0, said("mysql/7")), (91, 1, said("gone/0")), (92, 0, Err("garbage".to_owned()))]
    {
        snapshot.failed_stops.insert(UnitId::new(id), (MachineId::new(machine), said));
    }
    let view = view(snapshot, &[]);
    let mysql = &view.services["mysql"].units["mysql/7"];
    assert_eq!((mysql.agent_state.as_deref(), mysql.machine), (Some("stop-error"), Some(MachineId::new(0))));
    assert_eq!(mysql.failure.as_ref().unwrap().0, "stop hook: exit code 1");
    assert_eq!(mysql.open_ports.is_some(), view.services["mysql"].exposed);
    assert_eq!(view.services["gone"].units["gone/0"].agent_state.as_deref(), Some("down"));
    assert_eq!(view.services["gone"].error, None);
    assert_eq!(view.errors().into_iter().collect::<Vec<_>>(), ["garbage"]);
}

#[test]
fn a_machines_own_problem_is_shown_while_its_agent_runs() {
    for (agent, shown) in [(Presence::Here, Some("full; no room")), (Presence::Gone, Some("full"))] {
        let id = MachineId::new(0);
        let seen =
            StoredMachine { agent, problem: Some("no room".to_owned()), ..machine(Some("i-1"), None, true) };
        let mut input = Input::from(Snapshot { machines: [(id, seen)].into(), ..Snapshot::default() });
        input.firewall.machines.insert(id, "full".to_owned());
        assert_eq!(view(input, &[]).machines[&id].problem.as_deref(), shown, "{agent:?}");
    }
}
