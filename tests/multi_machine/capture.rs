//! Captures all traffic between two network namespaces while a charm is deployed and exposed, its
//! hooks run and the machine sends beats. With TLS, which is the default between machines, no
//! credential, charm byte or znode path is in it; the control with plain text contains them.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::harness::{binary, wait_for};
use crate::net::{Net, store_address};
use crate::operator::{Operator, Output, output_of};
use crate::world::DEADLINE;

/// A text that occurs only in the charm.
const CHARM_MARK: &str = "this-text-is-only-in-the-charm";

const STORE_PORT: u16 = 2181;
const TRACKER_PORT: u16 = 28500;

/// A process that is killed at the end.
struct Running(Child);

impl Running {
    /// Ends the process with SIGTERM, so that it writes what it has buffered, and waits for its
    /// end.
    fn terminate(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
        self.0.wait().expect("its end");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

struct Site<'a> {
    net: &'a Net,
    operator: Operator,
}

impl Site<'_> {
    fn juju(&self, args: &[&str]) -> Output {
        output_of(self.net.on_hub(self.operator.command("juju").args(args)).stdin(Stdio::null()))
    }

    #[track_caller]
    fn does(&self, args: &[&str]) -> Output {
        let output = self.juju(args);
        assert_eq!(output.code, 0, "juju {args:?}: {output:?}");
        output
    }

    fn start(&self, name: &str, wrap: impl Fn(&Command) -> Command, command: &Command) -> Running {
        let log = File::create(self.log(name)).expect("a log");
        let mut command = wrap(command);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        Running(command.spawn().expect("it starts"))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.operator.home().join(format!("{name}.log"))
    }

    #[track_caller]
    fn says(&self, name: &str, text: &str) {
        wait_for(&format!("{text:?} of {name}"), DEADLINE, || {
            fs::read_to_string(self.log(name)).is_ok_and(|said| said.contains(text)).then_some(())
        });
    }
}

/// Runs the whole story on a hub with the store and the tracker, and on one machine. Returns the
/// capture, and all secrets of the environment.
fn captured(net: &Net, scheme: &str, more: &[&str]) -> (Vec<u8>, Vec<String>, String) {
    binary("open-port");
    let hub = store_address(0);
    let store = format!("{hub}:{STORE_PORT}");
    let site = Site { net, operator: Operator::with_store(&format!("{scheme}{store}")) };
    let file = site.operator.home().join("capture.pcap");
    let mut tcpdump = Command::new("tcpdump");
    // The kernel keeps up to 32 MiB of packets for a tcpdump that has to wait for a processor.
    tcpdump.args(["-i", "br0", "-U", "-s", "0", "-B", "32768", "-Z", "root", "-w"]).arg(&file);
    tcpdump.env("PATH", std::env::var_os("PATH").expect("a PATH"));
    let capturing = site.start("tcpdump", |command| net.on_hub(command), &tcpdump);
    site.says("tcpdump", "listening on br0");

    let mut up = site.operator.command("portcullis");
    up.args(["--log-level", "info", "up", "--listen", &store]);
    up.args(["--heartbeat", &format!("{hub}:{TRACKER_PORT}")]).args(more);
    let _up = site.start("up", |command| net.on_hub(command), &up);
    site.says("up", "is up");
    site.does(&["add-machine", "--instance-id", "metal-1"]);
    let mut agent = site.operator.command("portcullis");
    agent.args(["--log-level", "info", "machine", "--id", "1", "--units-dir"]);
    agent.arg(site.operator.home().join("units-1"));
    let _agent = site.start("agent", |command| net.on_machine(0, command), &agent);
    site.says("agent", "certificate saved");
    site.says("agent", "a tracker accepts beats");

    let charm = charm(&site.operator);
    site.does(&["deploy", &charm, "web", "--to", "1"]);
    site.does(&["expose", "web"]);
    wait_for("a port that a hook opened", DEADLINE, || {
        let status: Value = serde_json::from_str(&site.does(&["status", "--format", "json"]).stdout).ok()?;
        let unit = &status["services"]["web"]["units"]["web/0"];
        (unit["open-ports"] == json!(["8080/tcp"])).then_some(())
    });
    wait_for("beats of the machine", DEADLINE, || {
        site.does(&["heartbeat", "list"]).stdout.contains("machine-1").then_some(())
    });
    let secrets = secrets(&site);
    let packets = |port: u16| {
        let mut count = Command::new("tcpdump");
        count.args(["-n", "-r"]).arg(&file).arg(format!("port {port}"));
        let listed = count.stderr(Stdio::null()).output().expect("tcpdump").stdout;
        listed.iter().filter(|byte| **byte == b'\n').count()
    };
    wait_for("captured packets of the store and the tracker", DEADLINE, || {
        (packets(STORE_PORT) > 50 && packets(TRACKER_PORT) > 5).then_some(())
    });
    capturing.terminate();
    let log = fs::read_to_string(site.log("tcpdump")).expect("a log");
    assert!(log.contains("\n0 packets dropped by kernel"), "{log}");
    let said = fs::read_to_string(site.log("agent")).expect("a log");
    (fs::read(&file).expect("a capture"), secrets, said)
}

fn charm(operator: &Operator) -> String {
    let charm = operator.charm("web", "name: web\nsummary: A charm\ndescription: For a test.\n");
    let hooks = Path::new(&charm).join("hooks");
    fs::create_dir(&hooks).expect("a directory");
    fs::write(hooks.join("start"), format!("#!/bin/sh\n# {CHARM_MARK}\nopen-port 8080\n")).expect("a hook");
    fs::set_permissions(hooks.join("start"), fs::Permissions::from_mode(0o755)).expect("permissions");
    charm
}

/// The secrets of the operator, the controller, the machine and the unit.
fn secrets(site: &Site<'_>) -> Vec<String> {
    let mut files: Vec<PathBuf> =
        ["local.json", "local-controller.json", "local-machines/machine-0000000001.json"]
            .map(|name| site.operator.config(name))
            .to_vec();
    let units = site.operator.home().join("units-1/units");
    files.extend(
        fs::read_dir(units).expect("units").map(|unit| unit.unwrap().path().join("credentials.json")),
    );
    let of_file = |path: &PathBuf| {
        let value: Value = serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON");
        let auth = value["auth"].as_str().expect("credentials").to_owned();
        auth.split_once(':').expect("user and secret").1.to_owned()
    };
    files.iter().map(of_file).collect()
}

fn contains(capture: &[u8], text: &str) -> bool {
    capture.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Texts besides secrets that only plain traffic shows: a znode path, the charm, a beat.
const PLAIN_TEXTS: [&str; 5] =
    ["/machines/machine-0000000001", "/units/unit-", CHARM_MARK, "/hmi/v1/heartbeat/", "authorization"];

#[test]
fn traffic_between_machines_shows_no_secret_no_charm_and_no_path() {
    let net = Net::new();
    let (capture, secrets, said) = captured(&net, "tls://", &[]);
    assert_eq!(secrets.len(), 4, "operator, controller, machine and unit");
    for text in secrets.iter().map(String::as_str).chain(PLAIN_TEXTS) {
        assert!(!contains(&capture, text), "the capture contains {text}");
    }
    assert!(said.contains("tracker=https://"), "{said}");
}

/// The control: the same search finds all of it without TLS.
#[test]
fn plain_traffic_shows_secrets_charms_and_paths() {
    let net = Net::new();
    let (capture, secrets, said) = captured(&net, "", &["--allow-plain-tcp"]);
    for text in PLAIN_TEXTS {
        assert!(contains(&capture, text), "the capture does not contain {text}");
    }
    // The controller is on the hub, and its connection is not in the capture.
    let shown = secrets.iter().filter(|secret| contains(&capture, secret)).count();
    assert!(shown >= 2, "the machine's and the unit's secrets are readable, found {shown}");
    assert!(said.contains("tracker=http://"), "{said}");
}
