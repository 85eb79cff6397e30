//! Stores that break: garbage in their znodes, and connections that end at every point of a command.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::scenario::Site;
use crate::harness::wire::{Client, Put, op};
use crate::operator::{Operator, fixture_charm};
use crate::proxy::{Proxy, Then};

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

pub(crate) fn garbage_in_a_znode_hides_nothing_else(site: &Site) {
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
    let after = operator.status();
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
}

/// With every chunk held back for a while, the time that status takes counts its round trips.
pub(crate) fn status_asks_in_batches(site: &Site) {
    const DELAY: Duration = Duration::from_millis(20);
    let operator = Operator::bootstrapped(site);
    let charm = fixture_charm("wordpress");
    let took = || {
        let proxy = Proxy::start(site.addr, usize::MAX, Then::Cut, DELAY);
        let start = Instant::now();
        let store = format!("{}{}", proxy.addr(), site.chroot);
        let came = operator.over(&store, |juju| juju(&["status", "--format", "json"]));
        assert_eq!(came.code, 0, "{came:?}");
        start.elapsed()
    };
    operator.does(&["deploy", &charm, "few"]);
    let few = took();
    operator.does(&["add-machine"]);
    for service in ["many", "more", "most"] {
        operator.does(&["deploy", &charm, service, "-n", "100", "--to", "1"]);
    }
    let many = took();
    // Three hundred round trips more would be twelve seconds.
    assert!(many < few + Duration::from_secs(2), "{few:?} for one unit, {many:?} for three hundred");
}

/// A deploy whose way to the store ends after so many answers, and a second one by the straight way. Says whether the
/// first met the fault.
fn deploy_twice(operator: &Operator, site: &Site, answers: usize, then: Then) -> bool {
    let charm = fixture_charm("wordpress");
    let name = format!("{}-{}", if then == Then::Cut { "cut" } else { "silent" }, letters(answers));
    let deploy = ["deploy", &charm, &name, "-n", "2"];
    let proxy = Proxy::start(site.addr, answers, then, Duration::ZERO);
    let start = Instant::now();
    let came = operator.over(&format!("{}{}", proxy.addr(), site.chroot), |juju| juju(&deploy));
    assert!(start.elapsed() < Duration::from_secs(10), "{name} took {:?}", start.elapsed());
    drop(proxy);
    if came.code != 0 {
        came.is_refusal(1, "the store at");
    }
    // The second run does it, or finds that the first had done it although its answer was lost.
    let again = operator.juju(&deploy);
    let exists = format!("error: Service '{name}' already exists\n");
    assert!(again.code == 0 || again.stderr == exists, "{name}: {again:?}");
    if came.code != 0 && again.code != 0 {
        let told =
            came.stderr.contains("before it confirmed") || came.stderr.contains("did not answer in 9 s");
        assert!(told && came.stderr.contains("`juju status` shows"), "{name} was done, and said {came:?}");
    }
    let status = operator.status();
    let units: Vec<&String> =
        status["services"][&name]["units"].as_object().expect("a service").keys().collect();
    assert_eq!(units, [&format!("{name}/0"), &format!("{name}/1")]);
    came.code != 0
}

pub(crate) fn a_store_that_goes_away_is_told_in_time(site: &Site) {
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

/// A number as a word: names may not end in digits alone.
fn letters(number: usize) -> String {
    number.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect()
}
