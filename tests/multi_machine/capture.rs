//! Captures all traffic between network namespaces while a host joins, a charm is deployed and
//! exposed, its hooks run, the machine sends beats and nodes are listed. The operator and a second
//! controller are on another machine than the store. With TLS, which is the default between
//! machines, no credential, charm byte or znode path is in the capture; the control with plain text
//! contains all of them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use portcullis::machine::join_token::JoinToken;
use serde_json::{Value, json};

use crate::harness::{binary, wait_for};
use crate::net::{Net, store_address};
use crate::operator::{Operator, Output, output_of};
use crate::world::DEADLINE;

/// A text that occurs only in the charm.
const CHARM_MARK: &str = "this-text-is-only-in-the-charm";

const STORE_PORT: u16 = 2181;
const TRACKER_PORT: u16 = 28500;
const MANAGER_PORT: u16 = 842;

/// The machine of the agent, and that of the operator and a controller.
const AGENT: usize = 0;
const OPERATOR: usize = 1;

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
        let command = &mut self.operator.command("juju");
        output_of(self.net.on_machine(OPERATOR, command.args(args)).stdin(Stdio::null()))
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

/// Runs the whole story on a hub with the store, the tracker and the manager, and on two machines.
/// Returns the capture, all secrets with their names, and the log of the agent.
fn captured(net: &Net, scheme: &str, more: &[&str]) -> (Vec<u8>, Secrets, String) {
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
    up.args(["--fleet", &format!("{hub}:{MANAGER_PORT}")]);
    let _up = site.start("up", |command| net.on_hub(command), &up);
    site.says("up", "is up");
    let mut controller = site.operator.command("portcullis");
    controller.args(["--log-level", "info", "controller", "--provider", "memory"]);
    let _controller = site.start("controller", |command| net.on_machine(OPERATOR, command), &controller);
    site.says("controller", "controller ready");
    let added = site.does(&["add-machine"]).stdout;
    let token = added.trim_end().strip_prefix("portcullis join ").expect("a token");
    let mut join = site.operator.command("portcullis");
    let joined = output_of(net.on_machine(AGENT, join.args(["join", token])).stdin(Stdio::null()));
    assert_eq!(joined.code, 0, "{joined:?}");
    let mut agent = site.operator.command("portcullis");
    agent.args(["--log-level", "info", "machine", "--id", "1", "--units-dir"]);
    agent.arg(site.operator.home().join("units-1"));
    let _agent = site.start("agent", |command| net.on_machine(AGENT, command), &agent);
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
    site.does(&["node", "list"]);
    let mut secrets = secrets(&site);
    let token: JoinToken = token.parse().expect("a token");
    secrets.insert("token", secret_of(&token.credential.expose()));
    let packets = |port: u16| {
        let mut count = Command::new("tcpdump");
        count.args(["-n", "-r"]).arg(&file).arg(format!("port {port}"));
        let listed = count.stderr(Stdio::null()).output().expect("tcpdump").stdout;
        listed.iter().filter(|byte| **byte == b'\n').count()
    };
    wait_for("captured packets of the store, the tracker and the manager", DEADLINE, || {
        (packets(STORE_PORT) > 50 && packets(TRACKER_PORT) > 5 && packets(MANAGER_PORT) > 5).then_some(())
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

/// The secrets of the environment, by the holder of the credentials.
type Secrets = BTreeMap<&'static str, String>;

/// Returns the secret part of credentials.
fn secret_of(credentials: &str) -> String {
    credentials.split_once(':').expect("user and secret").1.to_owned()
}

/// The secrets in files: those of the operator, the controller, the machine and the unit.
fn secrets(site: &Site<'_>) -> Secrets {
    let mut units = fs::read_dir(site.operator.home().join("units-1/units")).expect("units");
    let unit = units.next().expect("a unit").expect("a directory").path();
    let of_file = |path: PathBuf| {
        let value: Value = serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON");
        secret_of(value["auth"].as_str().expect("credentials"))
    };
    let config = |name: &str| of_file(site.operator.config(name));
    BTreeMap::from([
        ("operator", config("local.json")),
        ("controller", config("local-controller.json")),
        ("machine", config("local-machines/machine-0000000001.json")),
        ("unit", of_file(unit.join("credentials.json"))),
    ])
}

fn contains(capture: &[u8], text: &str) -> bool {
    capture.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Texts besides secrets that only plain traffic shows: a znode path, the charm, a beat.
const PLAIN_TEXTS: [&str; 5] =
    ["/machines/machine-0000000001", "/units/unit-", CHARM_MARK, "/hmi/v1/heartbeat/", "authorization"];

/// Texts of calls to a manager, which always uses TLS for operators on the network.
const NODE_TEXTS: [&str; 2] = ["org.containers.hirte", "ListNodes"];

#[test]
fn traffic_between_machines_shows_no_secret_no_charm_and_no_path() {
    let net = Net::new();
    let (capture, secrets, said) = captured(&net, "tls://", &[]);
    for text in PLAIN_TEXTS.into_iter().chain(NODE_TEXTS) {
        assert!(!contains(&capture, text), "the capture contains {text}");
    }
    for (holder, secret) in &secrets {
        assert!(!contains(&capture, secret), "the capture contains the secret of the {holder}");
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
    assert_eq!(Vec::from_iter(secrets.keys()), [&"controller", &"machine", &"operator", &"token", &"unit"]);
    for (holder, secret) in &secrets {
        assert!(contains(&capture, secret), "the capture does not contain the secret of the {holder}");
    }
    assert!(said.contains("tracker=http://"), "{said}");
}
