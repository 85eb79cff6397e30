//! Which agents may register, over TLS and without it, and how long a silent one keeps its name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::dbus::accept::TcpPolicy;
use portcullis::fleet::dbus::connect::{Security, connect};
use portcullis::fleet::dbus::errors;
use portcullis::fleet::manager::{NodeRule, Timing};
use portcullis::model::MachineId;
use portcullis::net::tls::{ClientAuth, ClientFiles, ClientTls, IdentityFiles, ServerFiles, ServerTls};
use portcullis::runtime::clock::wall_ms;
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

pub(crate) fn write(path: PathBuf, text: &str) -> PathBuf {
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

/// An authority, and a manager's policy with a certificate of it.
pub(crate) struct Tls {
    pub(crate) dir: tempfile::TempDir,
    ca: Ca,
    policy: TcpPolicy,
}

impl Tls {
    pub(crate) fn new() -> Self {
        let (dir, ca) = (tempfile::tempdir().unwrap(), authority());
        let root = write(dir.path().join("ca.pem"), &ca.pem());
        let own = identity(dir.path(), &ca, "manager", &["127.0.0.1", "controller"], 2100);
        let files = ServerFiles { identity: own, client_ca: Some((root, ClientAuth::Required)) };
        let policy = TcpPolicy { tls: Some(ServerTls::load(files).unwrap()), allow_plain: false };
        Self { dir, ca, policy }
    }

    /// A client with a certificate of the accepted authority.
    fn with_names(&self, names: &[&str]) -> Security {
        self.client(Some(self.identity(names[0], names)))
    }

    pub(crate) fn identity(&self, file: &str, names: &[&str]) -> IdentityFiles {
        identity(self.dir.path(), &self.ca, file, names, 2100)
    }

    pub(crate) fn client(&self, identity: Option<IdentityFiles>) -> Security {
        let ca = Some(self.dir.path().join("ca.pem"));
        let files = ClientFiles { ca, identity, ..ClientFiles::default() };
        Security::Tls { tls: ClientTls::load(files).unwrap(), server_name: None }
    }
}

pub(crate) fn error_name(refused: Result<Agent, NotRegistered>) -> String {
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

/// The lines of clients that a manager's certificate or protocol does not satisfy; the last
/// connection is the control.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_handshakes_with_a_manager_name_the_remedy() {
    let (tls, other) = (Tls::new(), Tls::new());
    let world = World::with(&["n1"], patient(), tls.policy.clone(), None).await;
    let without_tls = World::start(&["n1"]).await;
    let line = async |address: &ManagerAddress, client: Security| {
        let connected = connect(address, &client).await.map(drop);
        connected.map_err(|error| error.to_string().replace(&address.to_string(), "MANAGER"))
    };
    let named = |name: &str| match tls.with_names(&["n1"]) {
        Security::Tls { tls, .. } => Security::Tls { tls, server_name: Some(name.to_owned()) },
        Security::Plain => Security::Plain,
    };
    for (address, client, problem) in [
        (
            &world.tcp,
            other.with_names(&["n1"]),
            "the server's certificate was issued by another CA: `juju machine renew N` gives machine N the \
             CA of its environment, and --ca-file names another one",
        ),
        (
            &world.tcp,
            named("elsewhere"),
            "the server's certificate is not valid for 'elsewhere': use a name or an address that is in it",
        ),
        (
            &without_tls.tcp,
            tls.with_names(&["n1"]),
            "the server does not use TLS on this port: choose its TLS port, or connect without TLS, as \
             http:// does",
        ),
    ] {
        let expected = format!("the TLS handshake with the manager at MANAGER failed: {problem}");
        assert_eq!(line(address, client).await, Err(expected));
    }
    assert_eq!(line(&world.tcp, named("controller")).await, Ok(()));
}

/// Addresses of machines are in their certificates, and an address may be the name of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_proves_its_node_with_its_number_only() {
    let tls = Tls::new();
    let world = World::with(&[], patient(), tls.policy.clone(), None).await;
    let of_machine = |number| NodeRule::of_machine(MachineId::new(number));
    let rules = [("web1", of_machine(1)), ("web2", of_machine(2)), ("other", NodeRule::default())];
    world.manager.set_nodes(rules.map(|(name, rule)| (name.parse().unwrap(), rule)).into());
    let second = tls.with_names(&["machine-2", "web2", "web1", "other"]);
    let refused = Agent::register_with(&world.tcp, "web1", &second).await;
    assert_eq!(error_name(refused), errors::REGISTRATION_REFUSED);
    let _second = Agent::register_with(&world.tcp, "web2", &second).await.unwrap();
    let _other = Agent::register_with(&world.tcp, "other", &second).await.unwrap();
    let _first = Agent::register_with(&world.tcp, "web1", &tls.with_names(&["machine-1"])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_removed_operators_are_closed() {
    let tls = Tls::new();
    let world = World::with(&["n1"], patient(), tls.policy.clone(), None).await;
    let operators = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
    world.manager.set_operators(operators(&["alice", "bob"]));
    let connected = async |names: &[&str]| {
        let peer = connect(&world.tcp, &tls.with_names(names)).await.unwrap();
        let client = Client::new(peer.connection, peer.messages);
        client.call(MANAGER, "ListNodes", &()).await.unwrap();
        client
    };
    let (mut alice, bob) = (connected(&["operator-alice"]).await, connected(&["operator-bob"]).await);
    let first = connected(&["operator", "operator-alice"]).await;
    world.manager.set_operators(operators(&["bob"]));
    assert!(alice.call(MANAGER, "ListNodes", &()).await.is_err());
    alice.closed().await;
    for client in [bob, first] {
        client.call(MANAGER, "ListNodes", &()).await.unwrap();
    }
}

/// Returns the error with which a policy refuses a client.
async fn reason_of_refusal(policy: &TcpPolicy, connects: impl AsyncFnOnce(String)) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepted = async {
        let (stream, from) = listener.accept().await.unwrap();
        policy.accept(stream, from).await
    };
    // With TLS 1.3 the client's part may succeed.
    let ((), refused) = tokio::join!(connects(address), accepted);
    format!("{:?}", refused.map(|_| ()).expect_err("a refusal"))
}

/// Presents a certificate, whatever its validity is.
async fn present(identity: &IdentityFiles, address: &str) {
    let script = "import socket, ssl, sys\n\
        host, port = sys.argv[1].split(':')\n\
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)\n\
        context.check_hostname = False\n\
        context.verify_mode = ssl.CERT_NONE\n\
        context.load_cert_chain(sys.argv[2], sys.argv[3])\n\
        context.wrap_socket(socket.create_connection((host, port))).recv(1)\n";
    let mut python = tokio::process::Command::new("python3");
    python.args(["-c", script, address]).args([&identity.certificates, &identity.key]);
    // Its end is an error or not, depending on the version of TLS.
    crate::world::soon("end of a client", python.output()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_expired_and_missing_certificates_are_refused() {
    let tls = Tls::new();
    let world = World::with(&["n1"], patient(), tls.policy.clone(), None).await;
    let (dir, other) = (tempfile::tempdir().unwrap(), authority());
    let wrong = identity(dir.path(), &other, "wrong", &["n1"], 2100);
    let expired = identity(dir.path(), &tls.ca, "expired", &["n1"], 2020);
    let presented = |identity: &IdentityFiles| Some(identity.clone());
    for (reason, identity) in [
        ("BadSignature", presented(&wrong)),
        // Clients of this project do not present an expired certificate.
        ("NoCertificatesPresented", presented(&expired)),
        ("NoCertificatesPresented", None),
    ] {
        let client = tls.client(identity);
        let refused = Agent::register_with(&world.tcp, "n1", &client).await;
        assert!(refused.is_err(), "{reason}");
        let connects = async |address: String| drop(connect(&address.parse().unwrap(), &client).await);
        let found = reason_of_refusal(&tls.policy, connects).await;
        assert!(found.contains(reason), "{reason}: {found}");
    }
    let found = reason_of_refusal(&tls.policy, async |address| present(&expired, &address).await).await;
    assert!(found.contains("Expired"), "{found}");
    // A client that trusts another authority refuses the manager.
    let ca = write(dir.path().join("ca.pem"), &other.pem());
    let identity = identity(dir.path(), &tls.ca, "n1", &["n1"], 2100);
    let files = ClientFiles { ca: Some(ca), identity: Some(identity), ..ClientFiles::default() };
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
    let ManagerAddress::Tcp { host, port } = &world.tcp else { panic!() };
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_was_last_seen_with_its_last_message() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let path = crate::world::node_path("n1");
    let registered: u64 = client.property(&path, "Node", "LastSeenTimestamp").await;
    // Each answer of the agent is a message, the last of them at least 20 ms after the first.
    let now_us = || wall_ms() * 1_000;
    let mut asked = 0;
    while asked < registered + 20_000 {
        asked = now_us();
        client.call(&path, "GetUnitProperties", &"a.service").await.unwrap();
    }
    agent.kill();
    client.until_status("n1", "offline").await;
    let seen: u64 = client.property(&path, "Node", "LastSeenTimestamp").await;
    // Both times are rounded to milliseconds.
    assert!(seen + 2_000 >= asked && seen <= now_us(), "{registered} {asked} {seen}");
}
