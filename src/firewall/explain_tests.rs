//! Tests of explanations.

use super::*;
use crate::firewall::observe::Exposure;
use crate::model::ServiceId;
use crate::model::ports::parse_argument;

const M: MachineId = MachineId::new(0);

fn range(text: &str) -> PortRange {
    parse_argument(text).unwrap()
}

fn rules(texts: &[&str]) -> RuleSet {
    texts.iter().map(|text| Rule::new(range(text), Cidr::WORLD_V4)).collect()
}

fn unit(name: &str, service: u32, machine: u32, ports: &[&str]) -> UnitFacts {
    UnitFacts {
        record: Ok((name.parse().unwrap(), ServiceId::new(service), Some(MachineId::new(machine)))),
        ports: Ok(ports.iter().map(|text| range(text)).collect()),
        listed_on: None,
    }
}

/// Service 0 is exposed and service 1 is not; the last unit is on another machine.
fn view() -> View {
    let mut frozen = unit("web/1", 0, 0, &[]);
    frozen.ports = Err("/units/unit-0000000002/ports: garbage".to_owned());
    View {
        services: [(ServiceId::new(0), Exposure::To(Ok(vec![]))), (ServiceId::new(1), Exposure::No)].into(),
        units: [
            (UnitId::new(0), unit("web/0", 0, 0, &["80", "443", "20-24", "9000"])),
            (UnitId::new(1), unit("db/0", 1, 0, &["3306", "3307"])),
            (UnitId::new(2), frozen),
            (UnitId::new(3), unit("web/2", 0, 1, &["80"])),
        ]
        .into_iter()
        .collect(),
        ..View::default()
    }
}

fn report() -> Report {
    Report {
        granted: [
            (UnitId::new(0), rules(&["80", "443", "20-21", "23-24", "8080"])),
            (UnitId::new(1), rules(&["3306"])),
            (UnitId::new(2), rules(&["53/udp"])),
            (UnitId::new(3), rules(&["81"])),
            (UnitId::new(9), rules(&["82"])),
        ]
        .into(),
        pending: rules(&["443"]).rules().collect(),
        denied: vec![(UnitId::new(0), range("22"), "policy forbids the port".to_owned())],
        problem: Some("calls for machine 0 are throttled".to_owned()),
        foreign: vec!["25/tcp from 10.0.0.0/8".to_owned()],
        no_ipv6: true,
        ..Report::default()
    }
}

fn explained(view: &View, report: Option<&Readable<Report>>) -> Explained {
    explain(view, M, &view.units_by_machine()[&M], report)
}

#[test]
fn every_port_has_a_state_and_a_reason() {
    let text = explained(&view(), Some(&Ok(report()))).to_text();
    let expected = "\
problem: calls for machine 0 are throttled
80/tcp     open       web/0            asked for and exposed, open to 0.0.0.0/0
443/tcp    opening    web/0            to be opened to 0.0.0.0/0
20-21/tcp  open       web/0            asked for and exposed, open to 0.0.0.0/0
23-24/tcp  open       web/0            asked for and exposed, open to 0.0.0.0/0
22/tcp     held back  web/0            policy forbids the port
9000/tcp   opening    web/0            asked for and exposed to 0.0.0.0/0, not yet seen by a controller
8080/tcp   closing    web/0            no longer wanted from 0.0.0.0/0
3306/tcp   closing    db/0             service 'db' is not exposed
3307/tcp   closed     db/0             service 'db' is not exposed
53/udp     frozen     web/1            kept open to 0.0.0.0/0: /units/unit-0000000002/ports: garbage
81/tcp     closing    web/2            the unit is gone from this machine
82/tcp     closing    unit-0000000009  the unit is gone from this machine
25/tcp     foreign    -                foreign rule: 25/tcp from 10.0.0.0/8
";
    assert_eq!(text, expected);
}

#[test]
fn pending_lines_are_the_changes_still_to_make() {
    let pending = explained(&view(), Some(&Ok(report()))).pending().unwrap();
    let ports: Vec<String> =
        pending.lines.iter().filter_map(|line| line.ports).map(|p| p.to_string()).collect();
    assert_eq!(ports, ["443/tcp", "9000/tcp", "8080/tcp", "3306/tcp", "81/tcp", "82/tcp"]);
    let quiet =
        View { units: [(UnitId::new(0), unit("web/0", 0, 0, &["80"]))].into_iter().collect(), ..view() };
    let granted = [(UnitId::new(0), rules(&["80"]))].into();
    let done = Report { granted, no_ipv6: true, ..Report::default() };
    assert_eq!(explained(&quiet, Some(&Ok(done))).pending(), None);
}

#[test]
fn ports_for_ipv6_sources_alone_stay_closed_without_ipv6() {
    let exposed = Exposure::To(Ok(vec!["2001:db8::/32".parse().unwrap()]));
    let view = View {
        services: [(ServiceId::new(0), exposed)].into(),
        units: [(UnitId::new(0), unit("web/0", 0, 0, &["80"]))].into_iter().collect(),
        ..View::default()
    };
    let without = Report { no_ipv6: true, ..Report::default() };
    for (report, state, part) in [
        (without, State::HeldBack, "2001:db8::/32 alone, and IPv6 does not reach"),
        (Report::default(), State::Opening, "not yet seen"),
        (Report { more_denied: 7, ..Report::default() }, State::HeldBack, "among 7 more"),
    ] {
        let line = explained(&view, Some(&Ok(report))).lines.remove(0);
        assert!(line.state == state && line.why.contains(part), "{line}");
    }
}

#[test]
fn an_explanation_can_be_limited_to_one_port() {
    let unrequested = explained(&view(), Some(&Ok(report()))).only_ports(range("7")).to_text();
    assert!(
        unrequested.contains("7/tcp  not asked for  -  no unit of this machine has opened it\n"),
        "{unrequested}"
    );
    let about = explained(&view(), Some(&Ok(report()))).only_ports(range("22"));
    let states: Vec<State> = about.lines.iter().map(|line| line.state).collect();
    assert_eq!(states, [State::HeldBack]);
    let json = about.to_json();
    assert_eq!(json["ports"][0]["why"], "policy forbids the port");
}

#[test]
fn without_a_report_no_port_is_shown_as_open() {
    for report in [None, Some(Err("/controller/firewall/machine-0000000000: garbage".to_owned()))] {
        let explained = explained(&view(), report.as_ref());
        assert!(explained.problem.is_some());
        assert!(explained.lines.iter().all(|line| line.state != State::Open));
    }
}
