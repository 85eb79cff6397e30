//! Which agents may register, over TLS and without it, and how long a silent one keeps its name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use portcullis::fleet::dbus::accept::TcpPolicy;
use portcullis::fleet::dbus::connect::{Security, connect};
use portcullis::fleet::dbus::errors;
use portcullis::fleet::manager::Timing;
use portcullis::net::tls::{ClientAuth, ClientFiles, ClientTls, IdentityFiles, ServerFiles, ServerTls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::AsyncReadExt as _;

use crate::agent::{Agent, NotRegistered};
use crate::world::{Client, MANAGER, World, patient};

type Ca = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Ca {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn write(path: PathBuf, text: &str) -> PathBuf {
    std::fs::write(&path, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, mode).unwrap();
    path
}

/// Writes a certificate with these names.
fn identity(dir: &Path, ca: &Ca, file: &str, names: &[&str], last_year: i32) -> IdentityFiles {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, ca).unwrap();
    IdentityFiles {
        certificates: write(dir.join(format!("{file}.pem")), &certificate.pem()),
        key: write(dir.join(format!("{file}.key")), &key.serialize_pem()),
    }
}

struct Tls {
    dir: tempfile::TempDir,
    ca: Ca,
    policy: TcpPolicy,
}

impl Tls {
    fn new() -> Self {
        let (dir, ca) = (tempfile::tempdir().unwrap(), authority());
        let root = write(dir.path().join("ca.pem"), &ca.pem());
        let own = identity(dir.path(), &ca, "manager", &["127.0.0.1", "controller"], 2100);
        let files = ServerFiles { identity: own, client_ca: Some((root, ClientAuth::Required)) };
        let policy = TcpPolicy { tls: Some(ServerTls::load(files).unwrap()), allow_plain: false };
        Self { dir, ca, policy }
    }

    /// A client with a certificate of the accepted authority.
    fn with_names(&self, names: &[&str]) -> Security {
        self.client(Some(identity(self.dir.path(), &self.ca, names[0], names, 2100)))
    }

    fn client(&self, identity: Option<IdentityFiles>) -> Security {
        let ca = Some(self.dir.path().join("ca.pem"));
        let files = ClientFiles { ca, identity, machine: None };
        Security::Tls { tls: ClientTls::load(files).unwrap(), server_name: None }
    }
}

fn error_name(refused: Result<Agent, NotRegistered>) -> String {
    match refused.map(|_| ()).expect_err("a refusal") {
        NotRegistered::Refused(error) => error.name,
        NotRegistered::Connect(error) => format!("connect: {error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_proves_its_own_names_only() {
    let tls = Tls::new();
    let world = World::with(&["n1", "n2"], patient(), tls.policy.clone(), None).await;
    let n1 = tls.with_names(&["n1"]);
    let agent = Agent::register_with(&world.tcp, "n1", &n1).await.unwrap();
    let refused = Agent::register_with(&world.tcp, "n2", &n1).await;
    assert_eq!(error_name(refused), errors::REGISTRATION_REFUSED);
    let refused = Agent::register_with(&world.tcp, "n3", &tls.with_names(&["n3"])).await;
    assert_eq!(error_name(refused), errors::REGISTRATION_REFUSED);
    let refused = Agent::register_with(&world.tcp, "a_b", &tls.with_names(&["n1"])).await;
    assert_eq!(error_name(refused), errors::INVALID_ARGS);
    // An operator is served the public API, and is no agent.
    let operator = tls.with_names(&["operator"]);
    let peer = connect(&world.tcp, &operator).await.unwrap();
    let client = Client::new(peer.connection, peer.messages);
    client.job("n1", "StartUnit", "a.service", "fail").await.unwrap();
    let refused = Agent::register_with(&world.tcp, "n2", &operator).await;
    assert_eq!(error_name(refused), errors::UNKNOWN_OBJECT);
    // An agent is not served the public API.
    let peer = connect(&world.tcp, &tls.with_names(&["n2"])).await.unwrap();
    let node = Client::new(peer.connection, peer.messages);
    assert_eq!(node.call(MANAGER, "ListNodes", &()).await.unwrap_err().name, errors::ACCESS_DENIED);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_expired_and_missing_certificates_are_refused() {
    let tls = Tls::new();
    let world = World::with(&["n1"], patient(), tls.policy.clone(), None).await;
    let (dir, other) = (tempfile::tempdir().unwrap(), authority());
    let wrong = identity(dir.path(), &other, "wrong", &["n1"], 2100);
    let expired = identity(dir.path(), &tls.ca, "expired", &["n1"], 2020);
    for (what, presented) in [("wrong", Some(wrong)), ("expired", Some(expired)), ("none", None)] {
        let refused = Agent::register_with(&world.tcp, "n1", &tls.client(presented)).await;
        assert!(refused.is_err(), "{what}");
    }
    // A client that trusts another authority refuses the manager.
    let ca = write(dir.path().join("ca.pem"), &other.pem());
    let identity = identity(dir.path(), &tls.ca, "n1", &["n1"], 2100);
    let files = ClientFiles { ca: Some(ca), identity: Some(identity), machine: None };
    let distrusts = Security::Tls { tls: ClientTls::load(files).unwrap(), server_name: None };
    assert!(Agent::register_with(&world.tcp, "n1", &distrusts).await.is_err());
    let _agent = Agent::register_with(&world.tcp, "n1", &tls.with_names(&["n1"])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_agent_is_refused_until_the_first_is_silent_for_too_long() {
    let limit = Duration::from_millis(1_500);
    let timing = Timing { heartbeat_interval: Duration::from_millis(200), silence_limit: limit };
    let policy = TcpPolicy { tls: None, allow_plain: false };
    let world = World::with(&["n1"], timing, policy, None).await;
    let mut client = world.client().await;
    // This one registers and then sends nothing more, as a stopped process does.
    let peer = connect(&world.tcp, &Security::Plain).await.unwrap();
    let manager = portcullis::fleet::dbus::internal::ManagerProxy::new(&peer.connection).await.unwrap();
    manager.register("n1").await.unwrap();
    assert_eq!(error_name(Agent::register(&world.tcp, "n1").await), errors::NAME_IN_USE);
    client.until_status("n1", "offline").await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    client.until_status("n1", "online").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_never_finish_a_handshake_are_closed_and_delay_no_other() {
    let tls = Tls::new();
    let world = World::with(&["n1"], patient(), tls.policy.clone(), None).await;
    let portcullis::fleet::address::ManagerAddress::Tcp { host, port } = &world.tcp else { panic!() };
    let mut silent = Vec::new();
    for first in [&b""[..], &[0], &[0x16, 3, 1], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = tokio::net::TcpStream::connect((host.as_str(), *port)).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, first).await.unwrap();
        silent.push(stream);
    }
    let registers_never = connect(&world.tcp, &tls.with_names(&["n1"])).await.unwrap();
    let _agent = Agent::register_with(&world.tcp, "n1", &tls.with_names(&["n1"])).await.unwrap();
    for mut stream in silent {
        let mut rest = Vec::new();
        // A reset is an end, too.
        let _ = crate::world::soon("end of a silent connection", stream.read_to_end(&mut rest)).await;
    }
    crate::world::soon("end of an agent that does not register", registers_never.connection.closed()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_added_and_removed_without_disturbing_others() {
    let world = World::start(&["n1", "n2"]).await;
    let n1 = Agent::register(&world.tcp, "n1").await.unwrap();
    let n2 = Agent::register(&world.tcp, "n2").await.unwrap();
    let mut client = world.client().await;
    let rules = ["n1", "n3"].map(|name| (name.parse().unwrap(), Default::default()));
    world.manager.set_nodes(rules.into_iter().collect());
    let changed = client.signal("PropertiesChanged").await;
    assert!(changed.header().path().is_some());
    crate::world::soon("end of the removed node", n2.connection.closed()).await;
    assert!(!n1.connection.is_closed());
    assert_eq!(client.property::<Vec<String>>(MANAGER, "Manager", "Nodes").await, ["n1", "n3"]);
    client.job("n1", "StartUnit", "a.service", "fail").await.unwrap();
    let _n3 = Agent::register(&world.tcp, "n3").await.unwrap();
}
