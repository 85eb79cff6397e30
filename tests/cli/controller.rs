//! `portcullis controller`: its reports in the tree, the takeover by a standby, and refused
//! settings.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use portcullis::model::UnitId;
use portcullis::model::ports::parse_argument;
use portcullis::net::tls::authority::Authority;
use portcullis::net::tls::key::PrivateKey;
use portcullis::runtime::clock::wall_ms;
use portcullis::store::{Address, Credential, UnitPorts, ZkTree};
use serde_json::{Value, json};

use crate::credentials::hook_variable;
use crate::faults::as_operator;
use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Put, Take, op};
use crate::harness::{golden, wait_for};
use crate::operator::{Operator, Output, Transcript, fixture_charm, output_of};

on_both_stores![
    a_controller_with_invalid_settings_does_not_start,
    a_controller_with_the_key_of_another_authority_issues_nothing,
    a_standby_controller_takes_over,
    services_deleted_by_another_client_keep_their_ports,
    deleted_containers_close_nothing,
];

/// Longer than the session timeout of a killed leader.
const DEADLINE: Duration = Duration::from_secs(60);

/// A running controller, killed if the test ends before it does.
pub(crate) struct Controller {
    child: Child,
    log: PathBuf,
}

impl Controller {
    pub(crate) fn start(operator: &Operator, name: &str) -> Self {
        let log = operator.home().join(name);
        let child = operator
            .command("portcullis")
            .args(["--log-level", "info", "controller", "--provider", "memory", "--resync", "3600"])
            .args(["--metrics", "127.0.0.1:0"])
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("portcullis starts");
        Self { child, log }
    }

    fn has_logged(&self, text: &str) -> bool {
        fs::read_to_string(&self.log).expect("a log").lines().any(|line| line.ends_with(text))
    }

    #[track_caller]
    fn wait_for_log(&self, text: &str) {
        wait_for(text, DEADLINE, || self.has_logged(text).then_some(()));
    }

    fn ask(&self, path: &str) -> (u16, String) {
        ask_metrics(&self.log, path)
    }

    /// Returns whether the controller has closed this many rules.
    fn has_closed(&self, rules: u32) -> bool {
        let line = format!("portcullis_firewall_changes_total{{what=\"close\"}} {rules}");
        self.ask("/metrics").1.lines().any(|found| found == line)
    }

    pub(crate) fn stop(mut self, signal: &str) -> Option<i32> {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        wait_for("end of the controller", DEADLINE, || self.child.try_wait().expect("wait")).code()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // The process has ended already, unless the test failed.
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// Returns status and body of a path of the metrics endpoint that the log of a process names.
pub(crate) fn ask_metrics(log: &Path, path: &str) -> (u16, String) {
    let addr = wait_for("metrics", DEADLINE, || {
        let printed = fs::read_to_string(log).expect("a log");
        let line = printed.lines().find_map(|line| line.strip_prefix("metrics on http://"))?;
        line.strip_suffix("/metrics").map(str::to_owned)
    });
    let mut connection = TcpStream::connect(addr).expect("a connection");
    connection.set_read_timeout(Some(DEADLINE)).expect("a limit");
    write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("asked");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head[9..12].parse().expect("a status"), body.to_owned())
}

/// Two issuers with different keys would replace each other's certificates for ever.
fn a_controller_with_the_key_of_another_authority_issues_nothing(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let file = operator.config("local-authority.json");
    let ours = fs::read(&file).unwrap();
    let other = Authority::create("local", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
    let text = json!({"certificate": other.certificate(), "key": other.key().expose()}).to_string();
    fs::write(&file, text).unwrap();
    let reason = format!("{} holds the key of another authority than the environment's", file.display());
    let controller = Controller::start(&operator, "controller.log");
    controller.wait_for_log(&format!("certificates are not issued reason={reason}"));
    let added = operator.does(&["add-machine"]);
    let host = Operator::at(site);
    let token = added.stdout.trim_end().strip_prefix("portcullis join ").expect("a token");
    let joined = output_of(host.command("portcullis").args(["join", token]));
    assert!(joined.code == 0 && joined.stderr.contains("No certificate yet"), "{joined:?}");
    operator.is_refused(&["machine", "renew", "0"], 1, &reason);
    assert_eq!(controller.stop("-TERM"), Some(0), "its other roles run");
    golden::refusals("other_authority");
    // Positive control.
    fs::write(&file, ours).unwrap();
    operator.does(&["machine", "renew", "0"]);
}

/// Opens a port as the unit's own hook would.
pub(crate) fn open_port(operator: &Operator, site: &Site, unit: (&str, u32), port: &str) {
    let printed = operator.does(&["hook-env", unit.0]).stdout;
    let file = hook_variable(operator, &printed, "JUJU_CREDENTIALS");
    let held: Value = serde_json::from_str(&fs::read_to_string(file).expect("credentials")).expect("JSON");
    let credential = Credential::parse(held["auth"].as_str().expect("auth")).expect("a credential");
    let address: Address = site.connect_string().parse().expect("an address");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let tree = ZkTree::connect(&address, Some(&credential)).await.expect("a connection");
        let port = parse_argument(port).expect("a port");
        UnitPorts::new(&tree, UnitId::new(unit.1)).open(port).await.expect("opened");
    });
}

/// Returns the controller's report on machine 0.
fn report(operator: &Operator, site: &Site) -> Option<Value> {
    let (data, _) =
        as_operator(operator, site).get(&site.path("/controller/firewall/machine-0000000000")).ok()?;
    serde_json::from_slice(&data).ok()
}

#[track_caller]
fn is_granted(operator: &Operator, site: &Site, wanted: &Value) {
    wait_for(&format!("report that grants {wanted}"), DEADLINE, || {
        report(operator, site).filter(|report| report["granted"]["unit-0000000000"] == *wanted)
    });
}

fn world(ports: &[&str]) -> Value {
    json!({"0.0.0.0/0": ports, "::/0": ports})
}

fn a_standby_controller_takes_over(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine", "--instance-id", "i-0abc"]);
    operator.does(&["deploy", &fixture_charm("wordpress"), "--to", "0"]);
    operator.does(&["expose", "wordpress"]);
    open_port(&operator, site, ("wordpress/0", 0), "80");
    let mut shown = Transcript::of(&operator);
    without_a_controller_ports_are_pending(&operator, &mut shown);
    let mut first = Controller::start(&operator, "first.log");
    first.wait_for_log("controller ready");
    first.wait_for_log("leading");
    is_granted(&operator, site, &world(&["80/tcp"]));
    assert_eq!(wordpress_unit(&operator).get("firewall"), None, "no pending changes");

    open_port(&operator, site, ("wordpress/0", 0), "22");
    wait_for("report that holds ssh back", DEADLINE, || {
        let held = json!({"unit-0000000000": {"policy forbids the port": ["22/tcp"]}});
        report(&operator, site).filter(|report| report["held"] == held)
    });
    is_granted(&operator, site, &world(&["80/tcp"]));

    forbidden_ports_are_explained(&operator);
    changes_are_logged(&operator);
    golden::refusals("firewall");
    for command in [
        ["plan", "--format", "text"],
        ["explain", "0", "22"],
        ["explain", "0", "443"],
        ["log", "--machine", "0"],
    ] {
        shown.juju(&[&["firewall"], &command[..]].concat());
    }
    for command in [["explain", "0"], ["log", "--format=json"]] {
        shown.juju(&[&["firewall"], &command[..]].concat());
    }
    shown.is("firewall.txt");
    leader_answers_monitoring(&first);
    let second = Controller::start(&operator, "second.log");
    second.wait_for_log("controller ready");
    assert_eq!(second.ask("/readyz"), (200, "standing by\n".to_owned()));
    operator.does(&["expose", "wordpress", "--to", "192.0.2.0/24"]);
    is_granted(&operator, site, &json!({"192.0.2.0/24": ["80/tcp"]}));
    assert!(!second.has_logged("leading"), "two lead at once");

    first.child.kill().expect("killed");
    first.child.wait().expect("gone");
    operator.does(&["unexpose", "wordpress"]);
    second.wait_for_log("leading");
    wait_for("report that grants nothing", DEADLINE, || {
        report(&operator, site).filter(|report| report["granted"] == json!({}))
    });
    assert_eq!(second.stop("-TERM"), Some(0));
}

/// Starts a controller and waits until a port of each of three services is open.
fn with_three_exposed_services(site: &Site) -> (Operator, Controller) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine", "--instance-id", "i-0abc"]);
    for (name, number, port) in [("wordpress", 0, "80"), ("mysql", 1, "3306"), ("hello", 2, "8080")] {
        operator.does(&["deploy", &fixture_charm(name), "--to", "0"]);
        operator.does(&["expose", name]);
        open_port(&operator, site, (&format!("{name}/0"), number), port);
    }
    let controller = Controller::start(&operator, "controller.log");
    is_granted(&operator, site, &world(&["80/tcp"]));
    wait_for("all ports", DEADLINE, || {
        let report = report(&operator, site)?;
        (report["granted"].as_object()?.len() == 3 && report.get("pending").is_none()).then_some(())
    });
    (operator, controller)
}

/// Another client deletes all services, then all units, each with the znode that contains them. The
/// rules are too few for the limit on mass closes.
fn deleted_containers_close_nothing(site: &Site) {
    let (operator, controller) = with_three_exposed_services(site);
    let mut client = as_operator(&operator, site);
    for container in ["/services", "/units"] {
        delete_all(&mut client, &site.path(container));
        wait_for("three frozen units", DEADLINE, || {
            let report = report(&operator, site)?;
            let mut reasons = report["frozen"].as_object()?.values().filter_map(Value::as_str);
            // The container is missing, too, if the controller read everything.
            let is_missing = |why: &str| why.contains(container) && why.contains("is missing from the store");
            (reasons.clone().count() == 3 && reasons.all(is_missing)).then_some(())
        });
        all_ports_are_open(&operator, &controller, container);
    }
    assert_eq!(controller.stop("-TERM"), Some(0));

    // A new process has only what is in the store.
    let controller = Controller::start(&operator, "second.log");
    wait_for("a leader that has compared everything", DEADLINE, || {
        (controller.ask("/readyz") == (200, "leading\n".to_owned())).then_some(())
    });
    let why = "/services, /units is missing from the store: no port is closed until it is back";
    wait_for("the reason in the report", DEADLINE, || {
        report(&operator, site)?["problem"].as_str()?.contains(why).then_some(())
    });
    all_ports_are_open(&operator, &controller, why);
    assert_eq!(controller.stop("-TERM"), Some(0));
}

/// Checks that nothing was closed, and that `explain` gives the reason.
fn all_ports_are_open(operator: &Operator, controller: &Controller, why: &str) {
    assert!(controller.has_closed(0), "{}", controller.ask("/metrics").1);
    let explained = operator.does(&["firewall", "explain", "0"]).stdout;
    let is_frozen =
        |port: &str| explained.lines().any(|line| line.starts_with(port) && line.contains("frozen"));
    let ports = ["80/tcp", "3306/tcp", "8080/tcp"];
    assert!(explained.contains(why) && ports.iter().all(|port| is_frozen(port)), "{explained}");
}

fn delete_all(client: &mut Client, path: &str) {
    let reply = client.call(op::GET_CHILDREN, &Put::new().bytes(path).bool(false));
    assert_eq!(reply.err, 0, "{path}");
    let mut body = Take(&reply.body);
    for _ in 0..body.int() {
        delete_all(client, &format!("{path}/{}", body.string()));
    }
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(path).int(-1)).err, 0, "{path}");
}

/// Another client deletes services in the order of `deleteall` of ZooKeeper's shell: all exposed
/// flags come before the first service.
fn services_deleted_by_another_client_keep_their_ports(site: &Site) {
    let (operator, controller) = with_three_exposed_services(site);
    let mut client = as_operator(&operator, site);
    let services = [0, 1].map(|number| site.path(&format!("/services/service-000000000{number}")));
    let below =
        services.iter().flat_map(|service| ["exposed", "credentials"].map(|n| format!("{service}/{n}")));
    for path in below.chain(services.iter().cloned()) {
        assert_eq!(client.call(op::DELETE, &Put::new().bytes(&path).int(-1)).err, 0, "{path}");
    }
    for unit in ["unit-0000000000", "unit-0000000001"] {
        wait_for("a frozen unit", DEADLINE, || {
            let why = report(&operator, site)?["frozen"][unit].as_str()?.to_owned();
            why.ends_with("is missing from the store").then_some(())
        });
    }
    // Units that are frozen on one machine keep each other's ports.
    let kept = report(&operator, site).expect("a report")["granted"]["unit-0000000000"]["0.0.0.0/0"].clone();
    assert!(kept.as_array().is_some_and(|ports| ports.contains(&json!("80/tcp"))), "{kept}");
    assert!(controller.has_closed(0), "{}", controller.ask("/metrics").1);
    let explained = operator.does(&["firewall", "explain", "0", "80"]).stdout;
    assert!(explained.contains("frozen") && explained.contains("is missing from the store"), "{explained}");
    // The control: a service that a command unexposes.
    operator.does(&["unexpose", "hello"]);
    wait_for("a closed port", DEADLINE, || {
        report(&operator, site)?["granted"].get("unit-0000000002").is_none().then_some(())
    });
    // A closed rule is counted after the report.
    wait_for("two closed rules", DEADLINE, || controller.has_closed(2).then_some(()));
    assert_eq!(controller.stop("-TERM"), Some(0));
}

fn wordpress_unit(operator: &Operator) -> Value {
    operator.status()["services"]["wordpress"]["units"]["wordpress/0"].clone()
}

fn without_a_controller_ports_are_pending(operator: &Operator, shown: &mut Transcript<'_>) {
    shown.juju(&["firewall", "plan"]);
    shown.juju(&["firewall", "plan", "--format", "json"]);
    shown.juju(&["firewall", "explain", "0"]);
    let unseen = operator.juju(&["firewall", "plan"]);
    assert_eq!(unseen.code, 2, "{unseen:?}");
    assert!(unseen.stdout.contains("no controller has reported on this machine yet"), "{unseen:?}");
    let unseen = wordpress_unit(operator);
    assert_eq!(unseen["firewall"], "pending", "{unseen}");
    let why = "80/tcp opening: asked for and exposed to 0.0.0.0/0, ::/0, not yet seen by a controller";
    assert_eq!(unseen["firewall-info"], json!([why]));
}

fn forbidden_ports_are_explained(operator: &Operator) {
    let held = wordpress_unit(operator);
    assert_eq!(held["firewall-info"], json!(["22/tcp held back: policy forbids the port"]), "{held}");
    let plan = operator.does(&["firewall", "plan", "--format", "json"]);
    assert_eq!(plan.stdout, "{\"machines\":{}}\n");
    assert_eq!(
        operator.does(&["firewall", "explain", "0"]).stdout,
        "80/tcp  open       wordpress/0  asked for and exposed, open to 0.0.0.0/0, ::/0\n\
         22/tcp  held back  wordpress/0  policy forbids the port\n"
    );
    let ssh = operator.does(&["firewall", "explain", "0", "22"]).stdout;
    assert_eq!(ssh, "22/tcp  held back  wordpress/0  policy forbids the port\n");
    operator.is_refused(&["firewall", "explain", "7"], 1, "Machine 7 was not found");
    operator.is_refused(&["firewall", "explain", "0", "eighty"], 2, "Invalid port, must be an integer");
}

fn changes_are_logged(operator: &Operator) {
    let log = operator.does(&["firewall", "log", "--machine", "0", "--format", "json"]).stdout;
    let log: Value = serde_json::from_str(&log).expect("JSON");
    assert_eq!(log.as_array().expect("entries").len(), 1, "held back is no change: {log}");
    let opened = json!([{"what": "open 80/tcp to 0.0.0.0/0, ::/0", "units": ["wordpress/0"]}]);
    assert_eq!((&log[0]["items"], &log[0]["machine"]), (&opened, &json!(0)));
    assert_eq!(operator.does(&["firewall", "log", "--unit", "other/0"]).stdout, "");
    assert_eq!(operator.does(&["firewall", "log", "--limit", "0"]).stdout, "");
    operator.is_refused(&["firewall", "log", "--machine", "7"], 1, "Machine 7 was not found");
    operator.is_refused(&["firewall", "log", "--unit", "x"], 2, "Invalid unit name");
}

fn leader_answers_monitoring(first: &Controller) {
    assert_eq!(first.ask("/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(first.ask("/readyz"), (200, "leading\n".to_owned()));
    assert_eq!(first.ask("/else").0, 404);
    let (status, counts) = first.ask("/metrics");
    assert_eq!(status, 200);
    for line in [
        "changes_total{what=\"open\"} 2",
        "machines 1",
        "machines_pending 0",
        "leading 1",
        "change_seconds_count 1",
    ] {
        let line = format!("portcullis_firewall_{line}");
        assert!(counts.lines().any(|found| found == line), "{line} is not in\n{counts}");
    }
}

fn refused(operator: &Operator, args: &[&str]) -> Output {
    output_of(operator.command("portcullis").args(["controller", "--provider", "memory"]).args(args))
}

fn a_controller_with_invalid_settings_does_not_start(site: &Site) {
    let operator = Operator::at(site);
    refused(&operator, &[]).is_refusal(1, "is not bootstrapped in the store at");
    operator.does(&["bootstrap"]);
    refused(&operator, &["--policy", "none.yaml"]).is_refusal(1, "policy file none.yaml does not exist");
    fs::write(operator.home().join("broken.yaml"), "forbidden-prots: [22]\n").unwrap();
    refused(&operator, &["--policy", "broken.yaml"]).is_refusal(1, "cannot use the policy in broken.yaml");
    refused(&operator, &["--resync", "0"]).is_refusal(2, "0 is not in 1..=86400");
    refused(&operator, &["--ec2-image", "ami-1"]).is_refusal(2, "--ec2-image requires an EC2 provider");
    let of_ec2 = |args: &[&str]| {
        let mut command = operator.command("portcullis");
        // No region, and no metadata service that could name one.
        command.env_remove("AWS_REGION").env("AWS_EC2_METADATA_DISABLED", "true");
        output_of(command.args(["controller", "--provider", "ec2"]).args(args))
    };
    of_ec2(&["--ec2-image", "ami-1"])
        .is_refusal(2, "EC2 needs both an image and an instance type, or neither");
    of_ec2(&["--ec2-settings", "none.yaml"]).is_refusal(1, "EC2 settings file none.yaml does not exist");
    fs::write(operator.home().join("broken.yaml"), "imgae: ami-1\n").unwrap();
    of_ec2(&["--ec2-settings", "broken.yaml"]).is_refusal(1, "cannot use the settings in broken.yaml");
    let unusable =
        if cfg!(feature = "ec2") { "no region for EC2" } else { "this build does not support EC2" };
    of_ec2(&[]).fails_with(1, unusable);
    fs::remove_file(operator.config("local-controller.json")).unwrap();
    refused(&operator, &[]).is_refusal(1, "local-controller.json does not exist");
    golden::refusals("controller");
    assert!(
        as_operator(&operator, site).get(&site.path("/controller/epoch")).is_err(),
        "it touched the tree"
    );
}
