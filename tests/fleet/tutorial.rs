//! Runs the session of the tutorial with three machines: its commands are read from the page, and
//! each runs on the machine in its prompt. The machines run systemd, and are connected by a network
//! of their own.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::harness::{HANG, binary, wait_for};
use crate::machine::{Machine, Network};
use crate::page::{Page, root};

const PAGE: &str = "docs/tutorials/three-machines.md";
const NAMES: [&str; 3] = ["m0", "m1", "m2"];

/// How many commands the session may have.
const MAX_COMMANDS: usize = 8;

struct Session {
    machines: Vec<Machine>,
    network: Arc<Network>,
    /// The command to join that the last `juju add-machine` printed.
    join_command: Option<String>,
    /// Processes of the machines, which end with them.
    started: Vec<Child>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("status:\n{}", self.juju("status"));
            for machine in &self.machines {
                let output = machine.command("journalctl").args(["--no-pager", "-n", "30"]).output();
                let shown = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
                eprintln!("journal of {}:\n{}", machine.address(), shown.unwrap_or_default());
            }
        }
        self.machines.clear();
        for process in &mut self.started {
            // It may have ended with its machine already.
            let _ = (process.kill(), process.wait());
        }
    }
}

/// Returns the machine and the command of each line with a prompt.
fn commands(page: &Page) -> Vec<(String, String)> {
    let sessions = page.blocks.iter().filter(|block| block.language == "console");
    let lines = sessions.flat_map(|block| block.text.lines());
    let prompts = lines.filter_map(|line| line.strip_prefix("root@")?.split_once("# "));
    prompts.map(|(machine, command)| (machine.to_owned(), command.to_owned())).collect()
}

/// Replaces the token on the page with the one in this command.
fn with_token(line: &str, join_command: Option<&str>) -> String {
    let Some((before, _)) = line.split_once("pj1.") else { return line.to_owned() };
    let token = join_command.and_then(|command| command.split_once("pj1.")).expect("a token was printed").1;
    format!("{before}pj1.{token}")
}

impl Session {
    fn new() -> Self {
        let network = Arc::new(Network::new());
        let machines = Machine::boot_all(&network, &NAMES);
        // The agents find the hook tools beside their own program.
        binary("open-port");
        let charm = format!("/proc/{}/root/root/fixtures/charms", machines[0].systemd());
        fs::create_dir_all(&charm).unwrap();
        let copied =
            Command::new("cp").arg("-r").arg(root().join("fixtures/charms/hello")).arg(charm).status();
        assert!(copied.unwrap().success());
        Self { machines, network, join_command: None, started: Vec::new() }
    }

    fn machine(&self, name: &str) -> &Machine {
        &self.machines[NAMES.iter().position(|known| *known == name).expect("a known machine")]
    }

    fn shell(&self, machine: &str, line: &str) -> Command {
        let mut command = self.machine(machine).command("sh");
        command.args(["-c", &format!("cd && {line}")]).env("HOME", "/root");
        command
    }

    /// Runs one command of the page.
    fn run(&mut self, machine: &str, line: &str) {
        let line = with_token(line, self.join_command.as_deref());
        if let Some(line) = line.strip_suffix('&') {
            return self.start(machine, line);
        }
        let output = self.shell(machine, &line).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{machine}: {line}: {errors}");
        let printed = String::from_utf8(output.stdout).unwrap();
        if let Some(command) = printed.lines().find(|line| line.starts_with("portcullis join ")) {
            self.join_command = Some(command.to_owned());
        }
    }

    /// Starts the environment, and waits until it is up.
    fn start(&mut self, machine: &str, line: &str) {
        let path = self.machine(machine).file("up.log");
        let log = File::create(&path).unwrap();
        let mut command = self.shell(machine, &format!("exec {line}"));
        command.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null());
        self.started.push(command.spawn().unwrap());
        wait_for("a running environment", HANG, || {
            let shown = fs::read_to_string(&path).unwrap();
            assert!(!shown.contains("error:"), "{machine}: {line}: {shown}");
            shown.contains("is up;").then_some(())
        });
    }

    fn juju(&self, arguments: &str) -> String {
        let output = self.shell("m0", &format!("juju {arguments}")).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.juju("status --format json")).unwrap_or_default()
    }

    /// Requests the page of a unit from outside the machines. Returns `None` if no connection is
    /// made.
    fn fetch(&self, machine: &str, port: &str) -> Option<String> {
        let address = self.machine(machine).address();
        let script = format!(
            "import urllib.request; \
             print(urllib.request.urlopen('http://{address}:{port}/', timeout=2).read().decode())"
        );
        let output = self.network.command("python3").args(["-c", &script]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// Waits until a unit has started on a machine, and returns the port that its server has
    /// chosen. The status shows the port only after `juju expose`.
    fn port_of(&self, machine: &str, unit: &str) -> String {
        wait_for("a unit that has started", HANG, || {
            let status = self.status();
            let is_started = status["services"]["hello"]["units"][unit]["agent-state"] == "started";
            let find = ["find", "/var/lib/portcullis-units", "-name", "port", "-exec", "cat", "{}", ";"];
            let port = is_started.then(|| self.machine(machine).run(&find))?.trim().to_owned();
            (!port.is_empty()).then_some(port)
        })
    }
}

#[test]
fn three_machines_join_and_a_service_is_exposed_on_two() {
    let page = Page::read(PAGE);
    let commands = commands(&page);
    assert!((1..=MAX_COMMANDS).contains(&commands.len()), "{commands:?}");
    let mut session = Session::new();
    let (last, before) = commands.split_last().unwrap();
    for (machine, line) in before {
        session.run(machine, line);
    }
    let ports = [("m1", session.port_of("m1", "hello/0")), ("m2", session.port_of("m2", "hello/1"))];
    for (machine, port) in &ports {
        let local = session.machine(machine).try_run(&[
            "python3",
            "-c",
            &format!("import socket; socket.create_connection(('127.0.0.1', {port}), 5)"),
        ]);
        assert!(local.status.success(), "no listener on {machine}: {local:?}");
        assert_eq!(session.fetch(machine, port), None, "open on {machine} before `juju expose`");
    }
    session.run(&last.0, &last.1);
    for ((machine, port), unit) in ports.iter().zip(["hello/0", "hello/1"]) {
        let shown = wait_for("an open port", HANG, || session.fetch(machine, port));
        assert!(shown.contains(&format!("from {unit}.")), "{shown}");
    }

    let status = session.status();
    for (number, machine) in [("1", "m1"), ("2", "m2")] {
        let shown = &status["machines"][number];
        assert_eq!(shown["agent-state"], json!("running"), "{shown}");
        assert_eq!(shown["dns-name"], json!(session.machine(machine).address()), "{shown}");
    }
    let is_listed =
        |list: &str| ["machine-0", "machine-1", "machine-2"].iter().all(|name| list.contains(name));
    wait_for("beats of all machines", HANG, || is_listed(&session.juju("heartbeat list")).then_some(()));
    for machine in ["m1", "m2"] {
        let file = session.machine(machine).run(&["sh", "-c", "cat /etc/portcullis/local-machines/*.json"]);
        let file: Value = serde_json::from_str(&file).unwrap();
        assert!(file["zookeeper"].as_str().unwrap().starts_with("tls://"), "{}", file["zookeeper"]);
    }

    // The environment's manager controls systemd of all machines, and reads their journals.
    wait_for("all nodes", HANG, || {
        let listed = session.juju("node list");
        (listed.matches("online").count() == 3).then_some(())
    });
    session.juju("node stop m2 portcullis-machine@2.service");
    wait_for("the end of an agent", HANG, || session.juju("node list").contains("offline").then_some(()));
    session.machine("m2").run(&["systemctl", "start", "portcullis-machine@2.service"]);
    session.machine("m0").run(&["systemd-run", "--quiet", "--unit=greeting", "echo", "hello journal"]);
    wait_for("an entry of the journal", HANG, || {
        session.juju("node logs 0 greeting.service").contains("echo").then_some(())
    });
    let entries = session.juju("node logs 0 greeting.service -n 100 --json");
    assert!(entries.lines().any(|line| line.contains("\"hello journal\"")), "{entries}");

    // After a reboot the machine's service runs again, and joins as before.
    session.machines[1].reboot();
    let is_running = |session: &Session| {
        let listed = session.juju("node list --json");
        let rows: Value = serde_json::from_str(&listed).ok()?;
        let row = rows.as_array()?.iter().find(|row| row["node"] == "m1")?.clone();
        (row["status"] == "online").then_some(())
    };
    wait_for("the node after its reboot", HANG, || is_running(&session));
    wait_for("the firewall after the reboot", HANG, || {
        let tables = session.machine("m1").try_run(&["nft", "list", "tables"]);
        String::from_utf8_lossy(&tables.stdout).contains("portcullis").then_some(())
    });
}
