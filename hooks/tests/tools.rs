//! The real hook tools against real stores.

// Tests panic on failure.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/harness/mod.rs"]
mod harness;

use harness::HANG;
use harness::scenario::{Site, on_both_stores};
use portcullis::model::{ServiceName, UnitId};
use portcullis::store::records::Placement;
use portcullis::store::tree::{Tree, Write};
use portcullis::store::{Address, Bootstrap, Credential, Deploy, Environment, ZkTree, paths};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

const OPEN: &str = env!("CARGO_BIN_EXE_open-port");
const CLOSE: &str = env!("CARGO_BIN_EXE_close-port");
const LIST: &str = env!("CARGO_BIN_EXE_opened-ports");

/// The hook environment of one unit.
struct Hook {
    dir: tempfile::TempDir,
    store: String,
    unit: &'static str,
    id: UnitId,
    secret: String,
}

fn operator() -> Credential {
    Credential::parse("operator:boss").unwrap()
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

async fn connect(address: &str) -> ZkTree {
    let address: Address = address.parse().unwrap();
    ZkTree::connect(&address, Some(&operator())).await.unwrap()
}

impl Hook {
    /// Creates an environment with one unit of `web`.
    fn new(site: &Site) -> Self {
        let store = site.connect_string();
        let credential = block_on(async {
            let wanted = Bootstrap {
                environment: "local".parse().unwrap(),
                placement: Placement::Local,
                operator: operator().identity(),
                controller: Credential::parse("controller:x").unwrap().identity(),
            };
            let environment = Environment::bootstrap(connect(&store).await, &wanted).await.unwrap();
            let service: ServiceName = "web".parse().unwrap();
            let charm = "local:web-1".parse().unwrap();
            let deploy = Deploy { service, charm, metadata: serde_json::Map::new(), units: 1, to: None };
            environment.deploy(&deploy).await.unwrap();
            let credential = environment.unit_credential(&"web/0".parse().unwrap()).await.unwrap();
            environment.into_tree().close().await;
            credential
        });
        let hook = Self {
            dir: tempfile::tempdir().unwrap(),
            store,
            unit: "web/0",
            id: UnitId::from_key(credential.user()).unwrap(),
            secret: credential.expose().split_once(':').unwrap().1.to_owned(),
        };
        hook.write_credentials(&credential.expose(), 0o600);
        hook
    }

    /// Returns a hook environment whose store is at `address`.
    fn at(address: &str) -> Self {
        let hook = Self {
            dir: tempfile::tempdir().unwrap(),
            store: address.to_owned(),
            unit: "web/0",
            id: UnitId::new(0),
            secret: "s3cret".to_owned(),
        };
        hook.write_credentials("unit-0000000000:s3cret", 0o600);
        hook
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("credentials.json")
    }

    fn write_credentials(&self, auth: &str, mode: u32) {
        std::fs::write(self.file(), format!(r#"{{"unit": "{}", "auth": "{auth}"}}"#, self.unit)).unwrap();
        std::fs::set_permissions(self.file(), std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("JUJU_UNIT_NAME", self.unit)
            .env("JUJU_ZOOKEEPER", &self.store)
            .env("JUJU_ENV", "local")
            .env("JUJU_CREDENTIALS", self.file())
            .stdin(Stdio::null());
        command
    }

    /// Returns exit code, stdout and stderr, and checks that they do not contain the secret.
    fn call(&self, program: &str, args: &[&str]) -> (i32, String, String) {
        self.outcome(&self.command(program, args).output().unwrap())
    }

    fn outcome(&self, output: &Output) -> (i32, String, String) {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(!format!("{stdout}{stderr}").contains(&self.secret), "the secret is in {stdout}{stderr}");
        (output.status.code().unwrap(), stdout, stderr)
    }

    #[track_caller]
    fn silently(&self, program: &str, args: &[&str]) {
        assert_eq!(self.call(program, args), (0, String::new(), String::new()), "{args:?}");
    }

    #[track_caller]
    fn refused(&self, program: &str, args: &[&str], code: i32, text: &str) {
        assert_eq!(self.call(program, args), (code, String::new(), format!("error: {text}\n")), "{args:?}");
    }

    fn listed(&self, args: &[&str]) -> String {
        let (code, stdout, stderr) = self.call(LIST, args);
        assert_eq!((code, stderr.as_str()), (0, ""));
        stdout
    }

    /// Returns the data of the ports node.
    fn stored(&self) -> String {
        let node =
            block_on(async { connect(&self.store).await.get(&paths::unit_ports(self.id)).await.unwrap() });
        String::from_utf8(node.data).unwrap()
    }

    fn store_raw(&self, data: &[u8]) {
        block_on(async {
            let tree = connect(&self.store).await;
            let path = paths::unit_ports(self.id);
            let version = tree.get(&path).await.unwrap().version;
            tree.write(vec![Write::SetIfVersion { path, data: data.to_vec(), version }]).await.unwrap();
        });
    }
}

fn ports_are_opened_listed_and_closed(site: &Site) {
    let hook = Hook::new(site);
    assert_eq!(hook.listed(&[]), "");
    assert_eq!(hook.listed(&["--format", "json"]), "[]\n");
    assert_eq!(hook.listed(&["--format=yaml"]), "[]\n");
    for port in ["8000-8080", "53/udp", "53/TCP", "80/tcp", "80"] {
        hook.silently(OPEN, &[port]);
    }
    assert_eq!(hook.listed(&[]), "8000-8080/tcp\n53/udp\n53/tcp\n80/tcp\n");
    hook.silently(CLOSE, &["53/tcp"]);
    hook.silently(CLOSE, &["9999"]);
    assert_eq!(hook.listed(&["--format", "json"]), "[\"8000-8080/tcp\",\"53/udp\",\"80/tcp\"]\n");
    assert_eq!(hook.listed(&["--format", "yaml"]), "- 8000-8080/tcp\n- 53/udp\n- 80/tcp\n");
    assert_eq!(
        hook.stored(),
        concat!(
            r#"{"open":[{"port":8000,"to":8080,"proto":"tcp"},{"port":53,"proto":"udp"},"#,
            r#"{"port":80,"proto":"tcp"}]}"#
        )
    );
}

fn closing_a_port_that_was_never_opened_stores_an_empty_list(site: &Site) {
    let hook = Hook::new(site);
    hook.silently(CLOSE, &["80"]);
    assert_eq!(hook.stored(), r#"{"open":[]}"#);
}

fn usage_errors_change_nothing(site: &Site) {
    let hook = Hook::new(site);
    for (argument, text) in [
        ("53/udp/", "Invalid format for port/protocol, got '53/udp/'"),
        ("eighty", "Invalid port, must be an integer, got 'eighty'"),
        ("0", "Invalid port, must be from 1 to 65535, got 0"),
        ("65536", "Invalid port, must be from 1 to 65535, got 65536"),
        ("80/sctp", "Invalid protocol, must be 'tcp' or 'udp', got 'sctp'"),
        ("90-80", "Invalid port range, got '90-80'"),
    ] {
        hook.refused(OPEN, &[argument], 2, text);
        hook.refused(CLOSE, &[argument], 2, text);
    }
    hook.refused(OPEN, &[], 2, "open-port takes one argument, PORT[-PORT][/PROTOCOL]; see open-port --help");
    hook.refused(
        LIST,
        &["--format", "xml"],
        2,
        "Invalid format, must be 'smart', 'json' or 'yaml', got \"xml\"",
    );
    assert_eq!(hook.stored(), "");
}

fn ports_written_by_the_first_juju_are_read_and_kept(site: &Site) {
    let hook = Hook::new(site);
    hook.store_raw(b"open:\n- {port: 80, proto: tcp}\n- {port: 53, proto: udp}\nextra: {a: [1]}\n");
    assert_eq!(hook.listed(&[]), "80/tcp\n53/udp\n");
    hook.silently(CLOSE, &["80"]);
    assert_eq!(hook.stored(), r#"{"open":[{"port":53,"proto":"udp"}],"extra":{"a":[1]}}"#);
}

fn invalid_data_in_the_node_is_reported_and_kept(site: &Site) {
    let hook = Hook::new(site);
    hook.store_raw(b"\xff\x00");
    let text = "/units/unit-0000000000/ports: neither JSON nor YAML: not UTF-8 at byte 0";
    hook.refused(OPEN, &["80"], 1, text);
    hook.refused(CLOSE, &["80"], 1, text);
    hook.refused(LIST, &[], 1, text);
}

fn wrong_secret_or_readable_file_is_refused(site: &Site) {
    let hook = Hook::new(site);
    let right = format!("{}:{}", hook.id.key(), hook.secret);
    hook.write_credentials(&right, 0o644);
    let file = hook.file().display().to_string();
    let careless =
        format!("the credentials in {file} can be read by others: the mode is 644, and must be 600");
    hook.refused(OPEN, &["80"], 1, &careless);
    hook.write_credentials("unit-0000000000:guess", 0o600);
    let text = "/units/unit-0000000000/ports: the store does not allow this with these credentials";
    hook.refused(OPEN, &["80"], 1, text);
    hook.refused(LIST, &[], 1, text);
    assert_eq!(hook.stored(), "");
    hook.write_credentials(&right, 0o600);
    hook.silently(OPEN, &["80"]);
}

fn concurrent_hooks_all_succeed(site: &Site) {
    let hook = Hook::new(site);
    let ports: Vec<String> = (8000..8012).map(|port| port.to_string()).collect();
    let running: Vec<_> = ports
        .iter()
        .map(|port| {
            hook.command(OPEN, &[port]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in running {
        assert_eq!(hook.outcome(&child.wait_with_output().unwrap()), (0, String::new(), String::new()));
    }
    let mut listed: Vec<String> = hook.listed(&[]).lines().map(str::to_owned).collect();
    listed.sort_unstable();
    assert_eq!(listed, ports.iter().map(|port| format!("{port}/tcp")).collect::<Vec<_>>());
}

on_both_stores![
    ports_are_opened_listed_and_closed,
    closing_a_port_that_was_never_opened_stores_an_empty_list,
    usage_errors_change_nothing,
    ports_written_by_the_first_juju_are_read_and_kept,
    invalid_data_in_the_node_is_reported_and_kept,
    wrong_secret_or_readable_file_is_refused,
    concurrent_hooks_all_succeed,
];

#[test]
fn help_and_version_need_no_store() {
    for (program, name) in [(OPEN, "open-port"), (CLOSE, "close-port"), (LIST, "opened-ports")] {
        let output = Command::new(program).arg("--help").env_clear().output().unwrap();
        assert!(output.status.success());
        assert!(String::from_utf8(output.stdout).unwrap().contains(&format!("Usage: {name}")));
        let output = Command::new(program).arg("--version").env_clear().output().unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            format!("{name} {}\n", env!("CARGO_PKG_VERSION"))
        );
    }
}

/// A hook that hangs would block its unit.
#[track_caller]
fn fails_without_hanging(hook: &Hook, text: &str) {
    let start = Instant::now();
    hook.refused(OPEN, &["80"], 1, text);
    assert!(start.elapsed() < HANG, "took {:?}", start.elapsed());
}

#[test]
fn unreachable_store_is_reported() {
    let address = format!("127.0.0.1:{}", harness::ports::free());
    let text = format!("cannot reach the store at {address}");
    fails_without_hanging(&Hook::at(&address), &text);
}

#[test]
fn store_that_never_answers_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let text = format!("cannot reach the store at {address}");
    fails_without_hanging(&Hook::at(&address), &text);
}
