//! A store over TLS: the client, the agents and the hook tools verify it with the environment's CA,
//! and each way in which that fails is refused with its reason.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use portcullis::keeper::{Config, Keeper, TlsListen};
use portcullis::net::tls::authority::{Authority, Names, ROLE_LIFETIME, Validity};
use portcullis::net::tls::key::PrivateKey;
use portcullis::net::tls::{IdentityFiles, ServerFiles, ServerTls};
use portcullis::runtime::clock::wall_ms;

use crate::daemon::DEADLINE;
use crate::harness::{binary, ports, wait_for};
use crate::machine::Agent;
use crate::operator::{Operator, output_of};

const DAY: u64 = 86_400_000;

fn write(path: PathBuf, contents: &str) -> PathBuf {
    fs::write(&path, contents).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A CA whose certificate is in `NAME.pem`.
fn new_ca(directory: &Path, name: &str) -> (Authority, String) {
    let ca = Authority::create(name, &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
    let file = write(directory.join(format!("{name}.pem")), ca.certificate());
    (ca, file.to_str().unwrap().to_owned())
}

/// Writes a certificate for `localhost` that was issued at this time.
fn issue(directory: &Path, ca: &Authority, issued_ms: u64) -> IdentityFiles {
    let key = PrivateKey::generate().unwrap();
    let validity = Validity::starting(issued_ms, ROLE_LIFETIME);
    let chain = ca.issue_for(&key, &Names::of(["localhost"]), validity).unwrap();
    IdentityFiles {
        certificates: write(directory.join("server.pem"), &chain),
        key: write(directory.join("server.key"), key.expose()),
    }
}

/// A keeper with a plain listener and a TLS listener, whose certificate is for `localhost`.
fn keeper(directory: &Path, ca: &Authority) -> Keeper {
    let identity = issue(directory, ca, wall_ms());
    let config = ServerTls::load(ServerFiles { identity, client_ca: None }).unwrap();
    let listen: SocketAddr = ([127, 0, 0, 1], 0).into();
    let data = directory.join("keeper");
    fs::create_dir(&data).unwrap();
    let tls = Some(TlsListen { listen, config });
    Keeper::start(Config { tls, ..Config::new(data, listen) }).unwrap()
}

#[test]
fn store_is_used_over_tls_by_client_agent_and_hooks() {
    let directory = tempfile::tempdir().unwrap();
    let (ca, ca_file) = new_ca(directory.path(), "ca");
    let (_, other_file) = new_ca(directory.path(), "other");
    let keeper = keeper(directory.path(), &ca);
    let (plain, tls) = (keeper.local_addr().port(), keeper.tls_addr().unwrap().port());
    let operator = Operator::with_store(&format!("tls://localhost:{tls}"));

    // Refusals before the environment exists; the control is the last command.
    operator.juju(&["bootstrap"]).fails_with(1, "no CA certificate to verify the store");
    operator
        .juju(&["--ca", &other_file, "bootstrap"])
        .fails_with(1, "failed: the server's certificate was issued by another CA");
    let address = |address: String, reason: &str| {
        operator.over(&address, |juju| juju(&["--ca", &ca_file, "bootstrap"]).fails_with(1, reason));
    };
    address(format!("tls://127.0.0.1:{tls}"), "the server's certificate is not valid for '127.0.0.1'");
    address(format!("tls://localhost:{plain}"), "the server does not use TLS on this port");
    address(format!("localhost:{tls}"), "requires TLS");
    // Clocks that are a day off, and an expired certificate: the listener reads the files again.
    for (issued_ms, reason) in [
        (wall_ms() + DAY, "the server's certificate is not valid yet, or the clock of this machine is wrong"),
        (
            wall_ms() - 366 * DAY,
            "the server's certificate has expired, or the clock of this machine is wrong",
        ),
    ] {
        issue(directory.path(), &ca, issued_ms);
        operator.juju(&["--ca", &ca_file, "bootstrap"]).fails_with(1, reason);
    }
    issue(directory.path(), &ca, wall_ms());
    operator.does(&["--ca", &ca_file, "bootstrap"]);
    client_agent_and_hooks_use(&operator);
}

/// Deploys a charm on a machine whose agent and hooks use the operator's store.
fn client_agent_and_hooks_use(operator: &Operator) {
    // The CA is saved with the credentials: no later command names it.
    operator.does(&["add-machine", "--instance-id", "metal"]);
    binary("open-port");
    let charm = operator.charm("web", "name: web\nsummary: A charm\ndescription: For a test.\n");
    let hooks = Path::new(&charm).join("hooks");
    fs::create_dir(&hooks).unwrap();
    fs::write(hooks.join("start"), "#!/bin/sh\nopen-port 8080\n").unwrap();
    fs::set_permissions(hooks.join("start"), fs::Permissions::from_mode(0o755)).unwrap();
    operator.does(&["deploy", &charm, "web", "--to", "0"]);
    operator.does(&["expose", "web"]);
    let log = operator.home().join("agent.log");
    let child = operator
        .command("portcullis")
        .args(["machine", "--id", "0", "--units-dir"])
        .arg(operator.home().join("units"))
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    // Killed at the end.
    let agent = Agent { child, log };
    wait_for("a port that a hook opened over TLS", DEADLINE, || {
        let unit = operator.status()["services"]["web"]["units"]["web/0"].clone();
        assert_eq!(unit.get("hook-error"), None, "{}", fs::read_to_string(&agent.log).unwrap());
        (unit["open-ports"] == serde_json::json!(["8080/tcp"])).then_some(())
    });
}

/// A store whose certificate is issued by the environment's authority; killed at the end.
struct OwnStore(Child);

impl Drop for OwnStore {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

impl OwnStore {
    fn start(operator: &Operator, role: &[&str], port: u16) -> Self {
        let mut command = operator.command("portcullis");
        command.args(role);
        Self::start_with(command, port)
    }

    fn start_with(mut command: Command, port: u16) -> Self {
        command.args(["--listen", &format!("0.0.0.0:{port}")]);
        let mut child = command.env_remove("JUJU_ZOOKEEPER").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let is_plain = command.get_args().any(|arg| arg == "--allow-plain-tcp");
        let with_tls = if is_plain { "" } else { " with TLS" };
        assert_eq!(line, format!("listening{with_tls} on 0.0.0.0:{port}\n"));
        Self(child)
    }
}

/// Machine numbers begin again after `destroy-environment`, and so must the authority.
#[test]
fn a_new_environment_in_the_same_store_has_another_authority() {
    let operator = Operator::with_store("");
    let port = ports::free();
    let address = format!("tls://127.0.0.1:{port}");
    let juju = |args: &[&str]| output_of(operator.command("juju").env_remove("JUJU_ZOOKEEPER").args(args));
    let bootstrap = || juju(&["--zookeeper", &address, "bootstrap"]);
    let file = operator.config("local-authority.json");
    let keeper = ["keeper", "--data-dir", "keeper"];

    let store = OwnStore::start(&operator, &keeper, port);
    assert_eq!(bootstrap().code, 0);
    let first = fs::read(&file).unwrap();
    let destroyed = juju(&["destroy-environment", "--yes", "--leave-instances"]);
    assert!(destroyed.code == 0 && destroyed.stderr.contains("restart the store at"), "{destroyed:?}");
    assert!(!file.exists() && !operator.config("local-identity").exists());
    // The running store still has a certificate of the old authority.
    bootstrap().fails_with(1, "no CA certificate to verify the store");
    drop(store);
    let store = OwnStore::start(&operator, &keeper, port);
    let again = bootstrap();
    assert_eq!(again.code, 0, "{again:?}");
    assert_ne!(fs::read(&file).unwrap(), first);
    assert_eq!(juju(&["status"]).code, 0);
    assert_eq!(juju(&["destroy-environment", "--yes", "--leave-instances"]).code, 0);
    drop(store);

    // The same with all roles in one process, which creates its environment itself.
    let up = ["up", "--firewall", "none"];
    fs::remove_file(operator.config("local.json")).unwrap();
    fs::remove_file(operator.config("local-controller.json")).unwrap();
    let running = OwnStore::start(&operator, &up, port);
    let first = fs::read(&file).unwrap();
    assert_eq!(juju(&["destroy-environment", "--yes"]).code, 0);
    drop(running);
    let _running = OwnStore::start(&operator, &up, port);
    assert_ne!(fs::read(&file).unwrap(), first);
    let shown = juju(&["status"]);
    assert_eq!(shown.code, 0, "{shown:?}");
}

/// The listeners of a store and a tracker, both with TLS or both without it, log a client with the
/// other protocol and the remedy at the default level.
#[test]
fn clients_with_the_wrong_protocol_are_logged_with_the_remedy() {
    const HELLO: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    for (with_tls, sent, reason) in [
        (
            true,
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            "the client does not use TLS: begin the address of this listener with tls:// or https://",
        ),
        (
            false,
            HELLO,
            "the client uses TLS and this listener does not: name it without tls:// or https://, or choose \
             its TLS port",
        ),
    ] {
        let operator = Operator::with_store("");
        let ports = [ports::free(), ports::free()];
        let heartbeat = format!("0.0.0.0:{}", ports[1]);
        let log = operator.home().join("log");
        let mut command = operator.command("portcullis");
        command.args(["up", "--firewall", "none", "--heartbeat", &heartbeat]);
        command.args(if with_tls { &[][..] } else { &["--allow-plain-tcp"] });
        command.stderr(fs::File::create(&log).unwrap());
        let _running = OwnStore::start_with(command, ports[0]);
        for (number, port) in ports.into_iter().enumerate() {
            wait_for(&format!("{reason:?} of {port}"), DEADLINE, || {
                let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
                stream.write_all(sent).unwrap();
                // Until the listener closes the connection.
                let _ = stream.read_to_end(&mut Vec::new());
                let printed = fs::read_to_string(&log).unwrap();
                (printed.lines().filter(|line| line.contains(reason)).count() > number).then_some(())
            });
        }
    }
}

/// Debian's ZooKeeper with a `secureClientPort` only; killed at the end.
struct SecureZooKeeper(Child);

impl Drop for SecureZooKeeper {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

impl SecureZooKeeper {
    fn start(directory: &Path, port: u16, ca: &Authority, ca_file: &str) -> Self {
        let IdentityFiles { certificates, key } = issue(directory, ca, wall_ms());
        let both = fs::read_to_string(key).unwrap() + &fs::read_to_string(certificates).unwrap();
        let both = write(directory.join("both.pem"), &both);
        let data = directory.join("data");
        fs::create_dir_all(&data).unwrap();
        let config = format!(
            "tickTime=2000\ndataDir={}\nsecureClientPort={port}\nsecureClientPortAddress=127.0.0.1\n\
             admin.enableServer=false\n\
             serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
             ssl.keyStore.location={}\nssl.keyStore.type=PEM\n\
             ssl.trustStore.location={ca_file}\nssl.trustStore.type=PEM\nssl.clientAuth=none\n",
            data.display(),
            both.display()
        );
        let config = write(directory.join("zoo.cfg"), &config);
        let netty = ["common", "buffer", "transport", "codec", "handler", "resolver"];
        let jars = netty.map(|part| format!("/usr/share/java/netty-{part}.jar")).join(":");
        let mut java = Command::new("java");
        java.args(["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]);
        java.arg(format!("/usr/share/java/zookeeper.jar:{jars}"));
        java.arg("org.apache.zookeeper.server.ZooKeeperServerMain").arg(config);
        let log = fs::File::create(directory.join("zookeeper.log")).unwrap();
        Self(java.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }
}

#[test]
fn zookeeper_with_a_secure_client_port_is_used_over_tls() {
    let directory = tempfile::tempdir().unwrap();
    let (ca, ca_file) = new_ca(directory.path(), "ca");
    let (_, other_file) = new_ca(directory.path(), "other");
    let port = ports::free();
    let _zookeeper = SecureZooKeeper::start(directory.path(), port, &ca, &ca_file);
    wait_for("ZooKeeper", DEADLINE.max(Duration::from_secs(60)), || {
        std::net::TcpStream::connect(("127.0.0.1", port)).ok()
    });
    let operator = Operator::with_store(&format!("tls://localhost:{port}"));
    wait_for("bootstrap", DEADLINE, || {
        (operator.juju(&["--ca", &ca_file, "bootstrap"]).code == 0).then_some(())
    });
    operator
        .juju(&["--ca", &other_file, "status"])
        .fails_with(1, "failed: the server's certificate was issued by another CA");
    operator.over(&format!("localhost:{port}"), |juju| juju(&["status"]).fails_with(1, "requires TLS"));
    client_agent_and_hooks_use(&operator);
}
