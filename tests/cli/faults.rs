//! Store failures: corrupt znodes, and connections that end at every point of a command.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Put, op};
use crate::harness::{HANG, golden};
use crate::operator::{Operator, fixture_charm};
use crate::proxy::{Proxy, Then};

on_both_stores![
    a_corrupt_znode_hides_nothing_else,
    status_reads_in_batches,
    a_lost_store_is_reported_in_time,
    repeating_a_command_after_a_lost_response_is_safe,
];

/// A client with the operator's rights.
pub(crate) fn as_operator(operator: &Operator, site: &Site) -> Client {
    let file = std::fs::read_to_string(operator.config("local.json")).expect("credentials");
    let held: Value = serde_json::from_str(&file).expect("JSON");
    let mut client = Client::connect(site.addr);
    let auth = Put::new().int(0).bytes("digest").bytes(held["auth"].as_str().expect("auth"));
    client.send_as(-4, op::AUTH, &auth).expect("sent");
    assert_eq!(client.receive().expect("an answer").err, 0);
    client
}

fn a_corrupt_znode_hides_nothing_else(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["deploy", &fixture_charm("wordpress"), "-n", "3"]);
    operator.does(&["deploy", &fixture_charm("mysql")]);
    operator.does(&["expose", "wordpress"]);
    let before = operator.status();
    let mut client = as_operator(&operator, site);
    let broken = [
        "/units/unit-0000000000",
        "/units/unit-0000000001/ports",
        "/services/service-0000000001",
        "/machines/machine-0000000002",
    ];
    for path in broken {
        client.set_if_version(&site.path(path), b"{garbage", -1).expect("written");
    }
    let output = operator.juju(&["status", "--format", "json"]);
    assert_eq!(output.code, 1, "{output:?}");
    golden::record(&output.line, &output.stdout, &output.stderr, output.code);
    let lines: Vec<&str> = output.stderr.lines().collect();
    assert!(matches!(lines[..], [line] if line.starts_with("error: ")), "{output:?}");
    for path in broken {
        assert!(output.stderr.contains(&format!("{path}: ")), "{path} is not in {output:?}");
    }
    let elsewhere = operator.does(&["status", "elsewhere"]);
    assert_eq!(elsewhere.stderr, "", "problems outside the scope are not reported");
    let after: Value = serde_json::from_str(&output.stdout).expect("JSON");
    let unit = |name: &str| after["services"]["wordpress"]["units"][name].clone();
    let names =
        |error: &Value, path: &str| error.as_str().is_some_and(|text| text.starts_with(&format!("{path}: ")));
    assert!(names(&unit("wordpress/0")["error"], broken[0]), "{after}");
    assert!(names(&unit("wordpress/1")["error"], broken[1]), "{after}");
    assert_eq!(unit("wordpress/1")["machine"], 1, "{after}");
    assert!(names(&after["services"]["mysql"]["error"], broken[2]), "{after}");
    assert!(names(&after["machines"]["2"]["error"], broken[3]), "{after}");
    assert_eq!(unit("wordpress/2")["agent-state"], "pending");
    assert_eq!(after["machines"]["0"], before["machines"]["0"]);
    let mysql = &after["services"]["mysql"]["units"]["mysql/0"];
    assert_eq!(*mysql, before["services"]["mysql"]["units"]["mysql/0"]);

    client.set_if_version(&site.path("/initialized"), b"[]", -1).expect("written");
    operator.is_refused(&["status"], 1, "/initialized: not a JSON object");
    golden::refusals("garbage");
}

/// The proxy delays every chunk, so that requests that are sent together are one chunk: the number
/// of chunks is the number of round trips.
fn status_reads_in_batches(site: &Site) {
    const DELAY: Duration = Duration::from_millis(20);
    let operator = Operator::bootstrapped(site);
    let charm = fixture_charm("wordpress");
    let round_trips = || {
        let proxy = Proxy::start(site.addr, usize::MAX, Then::Cut, DELAY);
        let store = format!("{}{}", proxy.addr(), site.chroot);
        let output = operator.over(&store, |juju| juju(&["status", "--format", "json"]));
        assert_eq!(output.code, 0, "{output:?}");
        proxy.chunks_sent()
    };
    operator.does(&["deploy", &charm, "few"]);
    let few = round_trips();
    operator.does(&["add-machine"]);
    for service in ["many", "more", "most"] {
        operator.does(&["deploy", &charm, service, "-n", "100", "--to", "1"]);
    }
    let many = round_trips();
    assert!(many < few + 50, "{few} round trips for one unit, {many} for three hundred");
}

/// Deploys through a proxy that fails after some responses, then again directly. Returns whether
/// the first command failed.
fn deploy_twice(operator: &Operator, site: &Site, answers: usize, then: Then) -> bool {
    let charm = fixture_charm("wordpress");
    let name = format!("{}-{}", if then == Then::Cut { "cut" } else { "silent" }, letters(answers));
    let deploy = ["deploy", &charm, &name, "-n", "2"];
    let proxy = Proxy::start(site.addr, answers, then, Duration::ZERO);
    let start = Instant::now();
    let output = operator.over(&format!("{}{}", proxy.addr(), site.chroot), |juju| juju(&deploy));
    assert!(start.elapsed() < HANG, "{name} took {:?}", start.elapsed());
    drop(proxy);
    if output.code != 0 {
        output.fails_with(1, "the store at");
    }
    if output.code == 0 {
        return false;
    }
    // The second run completes the operation, also if only the response to the first was lost. A
    // third run is a new operation.
    operator.does(&deploy);
    operator.juju(&deploy).fails_with(1, &format!("Service '{name}' already exists"));
    let status = operator.status();
    let units: Vec<&String> =
        status["services"][&name]["units"].as_object().expect("a service").keys().collect();
    assert_eq!(units, [&format!("{name}/0"), &format!("{name}/1")]);
    true
}

fn a_lost_store_is_reported_in_time(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let operator = &operator;
    let failed = std::thread::scope(|scope| {
        let cases = (0..10).flat_map(|answers| [(answers, Then::Cut), (answers, Then::Silence)]);
        let running: Vec<_> = cases
            .map(|(answers, then)| scope.spawn(move || deploy_twice(operator, site, answers, then)))
            .collect();
        running
            .into_iter()
            .map(|case| case.join().expect("a case that holds"))
            .filter(|failed| *failed)
            .count()
    });
    assert!(failed >= 6, "only {failed} of the commands met the fault");
}

/// Runs a command through a proxy that cuts connections after some responses, then again directly.
/// `holds` checks the result of a single execution. Returns whether the first run failed.
fn run_twice(
    operator: &Operator,
    site: &Site,
    answers: usize,
    command: &[&str],
    holds: impl Fn(&Value),
) -> bool {
    let proxy = Proxy::start(site.addr, answers, Then::Cut, Duration::ZERO);
    let output = operator.over(&format!("{}{}", proxy.addr(), site.chroot), |juju| juju(command));
    drop(proxy);
    if output.code != 0 {
        output.fails_with(1, "the store at");
        operator.does(command);
    }
    holds(&operator.status());
    output.code != 0
}

fn every_kind_twice(operator: &Operator, site: &Site, answers: usize) -> usize {
    let name = format!("often-{}", letters(answers));
    // A separate machine, since concurrent commands place units on any free one.
    let added = operator.does(&["add-machine"]).stderr;
    let home = added.split_whitespace().nth(1).unwrap();
    operator.does(&["deploy", &fixture_charm("wordpress"), &name, "-n", "2", "--to", home]);
    let units = |status: &Value| status["services"][&name]["units"].as_object().map(|units| units.len());
    let first = format!("{name}/0");
    let instance = format!("i-{name}");
    let machines = |status: &Value| -> Vec<String> {
        let all = status["machines"].as_object().expect("machines").iter();
        all.filter(|(_, machine)| machine["instance-id"] == *instance).map(|(id, _)| id.clone()).collect()
    };
    let mut failed = 0;
    let mut twice = |command: &[&str], holds: &dyn Fn(&Value)| {
        failed += usize::from(run_twice(operator, site, answers, command, holds));
    };
    twice(&["add-unit", &name, "-n", "2", "--to", home], &|status| {
        assert_eq!(units(status), Some(4), "{name}");
    });
    twice(&["remove-unit", &first], &|status| assert_eq!(units(status), Some(3), "{name}"));
    twice(&["add-machine", "--instance-id", &instance], &|status| {
        assert_eq!(machines(status).len(), 1, "{name}");
    });
    let machine = machines(&operator.status()).remove(0);
    twice(&["terminate-machine", &machine], &|status| assert_eq!(machines(status).len(), 0, "{name}"));
    twice(&["destroy-service", &name], &|status| assert_eq!(units(status), None, "{name}"));
    failed
}

fn repeating_a_command_after_a_lost_response_is_safe(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let operator = &operator;
    let failed: usize = std::thread::scope(|scope| {
        let running: Vec<_> =
            (0..12).map(|answers| scope.spawn(move || every_kind_twice(operator, site, answers))).collect();
        running.into_iter().map(|case| case.join().expect("a case that holds")).sum()
    });
    assert!(failed >= 20, "only {failed} of the commands met the fault");
}

/// Spells a number in letters, since names must not end in digits alone.
fn letters(number: usize) -> String {
    number.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect()
}
