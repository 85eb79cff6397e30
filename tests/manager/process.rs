//! `portcullis manager` as a process without a bus: its file, its exit codes, SIGHUP and SIGTERM,
//! and its endpoints.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::dbus::connect::{Security, connect};
use portcullis::fleet::dbus::errors;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};

use crate::agent::Agent;
use crate::registration::{Tls, error_name, write};
use crate::world::{Client, MANAGER, soon};

fn command(config: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    command.args(["manager", "--bus", "none", "--listen", "127.0.0.1:0", "--config"]).arg(config);
    command.args(arguments).env_clear().env("RUST_LOG", "info").stdin(Stdio::null()).kill_on_drop(true);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A running manager.
struct Process {
    child: Child,
    address: ManagerAddress,
    log: Lines<BufReader<ChildStderr>>,
    config: PathBuf,
    _dir: tempfile::TempDir,
}

impl Process {
    /// Starts a manager and waits until it accepts agents.
    async fn start(config: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path().join("manager.ini"), config);
        let mut child = command(&path, arguments).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = soon("the address", lines.next_line()).await.unwrap().expect("a line");
        let address = line.strip_prefix("listening on ").expect("an address").parse().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, address, log, config: path, _dir: dir }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Replaces the file, sends SIGHUP, and waits for a line of the log with this text.
    async fn reload(&mut self, config: &str, logged: &str) -> String {
        write(self.config.clone(), config);
        self.signal(Signal::HUP);
        self.logged(logged).await
    }

    /// Returns the next line of the log that contains a text.
    async fn logged(&mut self, text: &str) -> String {
        loop {
            let line = soon(text, self.log.next_line()).await.unwrap();
            let line = line.unwrap_or_else(|| panic!("no line with {text:?}"));
            if line.contains(text) {
                return line;
            }
        }
    }

    async fn stop(mut self) {
        self.signal(Signal::TERM);
        assert!(soon("end of the manager", self.child.wait()).await.unwrap().success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_file_is_an_error_of_usage_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.pem");
    let certificate = format!("[node n1]\nCertificate={}\n", absent.display());
    for (text, expected) in [
        ("[hirte]\n\nManagerPort=0\n", "line 3: ManagerPort: expected a port"),
        ("[hirte]\nAllowedNodeNames=n1,\n  n_2\n", "line 3: AllowedNodeNames: "),
        ("[hirte]\nColour=red\n", "line 2: unknown key 'Colour'"),
        ("[hirte]\nHeartbeatInterval=6000\n", "line 2: HeartbeatInterval: "),
        ("nonsense\n", "line 1: "),
        (certificate.as_str(), "line 2: Certificate: "),
    ] {
        let path = write(dir.path().join("manager.ini"), text);
        let output = soon("the end", command(&path, &[]).output()).await.unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        let is_named = errors.contains(expected) && errors.contains("manager.ini: ");
        assert!(output.status.code() == Some(2) && is_named, "{text:?}: {} {errors}", output.status);
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "");
    }
    let missing = soon("the end", command(&absent, &[]).output()).await.unwrap();
    assert_eq!(missing.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reads_the_file_again_and_disturbs_no_node() {
    let mut manager = Process::start("[hirte]\nAllowedNodeNames=n1\n", &[]).await;
    // The process handles SIGHUP before it prints its address.
    manager.reload("[hirte]\nAllowedNodeNames=n1,n2\n", "configuration read again").await;
    let n1 = Agent::register(&manager.address, "n1").await.unwrap();
    let _n2 = Agent::register(&manager.address, "n2").await.unwrap();
    manager.reload("[hirte]\nAllowedNodeNames=n2,\n  n_3\n", "cannot be used").await;
    manager.reload("[hirte]\nAllowedNodeNames=n1,n3\nManagerPort=1842\n", "restart").await;
    manager.logged("configuration read again").await;
    let _n3 = Agent::register(&manager.address, "n3").await.unwrap();
    assert_eq!(error_name(Agent::register(&manager.address, "n2").await), errors::REGISTRATION_REFUSED);
    assert!(!n1.connection.is_closed());
    assert_eq!(error_name(Agent::register(&manager.address, "n1").await), errors::NAME_IN_USE);
    manager.stop().await;
    soon("end of the agent's connection", n1.connection.closed()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_and_the_unix_socket_are_served() {
    let socket = tempfile::tempdir().unwrap();
    let path = socket.path().join("manager");
    let options = ["--metrics", "127.0.0.1:0", "--socket", path.to_str().unwrap()];
    let mut manager = Process::start("[hirte]\nAllowedNodeNames=n1,n2\n", &options).await;
    let line = manager.logged("metrics on http://").await;
    let _agent = Agent::register(&manager.address, "n1").await.unwrap();
    let operator = connect(&ManagerAddress::Unix(path.clone()), &Security::Plain).await.unwrap();
    let operator = Client::new(operator.connection, operator.messages);
    operator.call(MANAGER, "ListNodes", &()).await.unwrap();
    let address = line.trim_start_matches("metrics on http://").trim_end_matches("/metrics");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut shown = String::new();
    soon("metrics", stream.read_to_string(&mut shown)).await.unwrap();
    assert!(shown.starts_with("HTTP/1.1 200 "), "{shown}");
    let online = shown.lines().find(|line| line.contains("nodes_online") && !line.starts_with('#'));
    assert!(online.is_some_and(|line| line.ends_with(" 1")), "{shown}");
    manager.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_has_to_present_the_certificate_of_its_section() {
    let tls = Tls::new();
    let (first, second) = (tls.identity("first", &["n1"]), tls.identity("second", &["n1"]));
    let config = |file: &Path| format!("[hirte]\n[node n1]\nCertificate={}\n", file.display());
    let file = |name: &str| tls.dir.path().join(name).display().to_string();
    let files = (file("manager.pem"), file("manager.key"), file("ca.pem"));
    let options = ["--tls-cert", &files.0, "--tls-key", &files.1, "--client-ca", &files.2];
    let mut manager = Process::start(&config(&first.certificates), &options).await;
    let pinned = (config(&first.certificates), config(&second.certificates));
    let (one, other) = (tls.client(Some(first)), tls.client(Some(second)));
    let register = async |security| Agent::register_with(&manager.address, "n1", security).await;
    assert_eq!(error_name(register(&other).await), errors::REGISTRATION_REFUSED);
    // A connection without TLS proves nothing.
    assert_eq!(error_name(register(&Security::Plain).await), errors::REGISTRATION_REFUSED);
    let agent = register(&one).await.unwrap();
    // The certificate that the agent presented is no longer that of the node.
    manager.reload(&pinned.1, "configuration read again").await;
    soon("end of the agent's connection", agent.connection.closed()).await;
    let register = async |security| Agent::register_with(&manager.address, "n1", security).await;
    assert_eq!(error_name(register(&one).await), errors::REGISTRATION_REFUSED);
    let agent = register(&other).await.unwrap();
    // The same file again disturbs no node.
    manager.reload(&pinned.1, "configuration read again").await;
    assert!(!agent.connection.is_closed());
    manager.stop().await;
}
