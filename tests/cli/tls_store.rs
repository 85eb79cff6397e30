//! A store over TLS: the client, the agents and the hook tools verify it with the environment's CA,
//! and each way in which that fails is refused with its reason.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use portcullis::keeper::{Config, Keeper, TlsListen};
use portcullis::net::tls::{IdentityFiles, ServerFiles, ServerTls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::daemon::DEADLINE;
use crate::harness::{binary, wait_for};
use crate::machine::Agent;
use crate::operator::Operator;

fn write(path: PathBuf, contents: &str) -> PathBuf {
    fs::write(&path, contents).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A CA whose certificate is in `NAME.pem`.
fn new_ca(directory: &Path, name: &str) -> (CertifiedIssuer<'static, KeyPair>, String) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let file = write(directory.join(format!("{name}.pem")), &ca.pem());
    (ca, file.to_str().unwrap().to_owned())
}

/// A keeper with a plain listener and a TLS listener, whose certificate is for `localhost`.
fn keeper(directory: &Path, ca: &CertifiedIssuer<'static, KeyPair>) -> Keeper {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, ca).unwrap();
    let identity = IdentityFiles {
        certificates: write(directory.join("server.pem"), &certificate.pem()),
        key: write(directory.join("server.key"), &key.serialize_pem()),
    };
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
    operator.does(&["--ca", &ca_file, "bootstrap"]);

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
