//! Both servers over TLS: operations per server CPU-second with 64 requests in flight. ZooKeeper
//! serves TLS with Netty and negotiates TLS 1.2 as Debian packages it, the keeper TLS 1.3.

use std::io::{self, Read as _, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::authority::{TestCa, write};
use crate::harness::wire::{Hello, dial};
use crate::harness::{Kind, Options, START_DEADLINE, Store, ports, wait_for};
use crate::load::{self, Load, Op};
use crate::measure::{ENOUGH_CPU, MAX_ROUNDS, cpu};

const IN_FLIGHT: usize = 64;
const GOAL: f64 = 4.0;

/// A server with a plain listener and one with TLS.
struct Server {
    process: Process,
    plain: SocketAddr,
    secure: SocketAddr,
}

enum Process {
    Keeper(Store),
    /// Killed at the end.
    ZooKeeper(Child),
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Self::ZooKeeper(child) = self {
            // The process may have ended already.
            let _ = (child.kill(), child.wait());
        }
    }
}

impl Server {
    fn pid(&self) -> u32 {
        match &self.process {
            Process::Keeper(store) => store.pid(),
            Process::ZooKeeper(child) => child.id(),
        }
    }

    fn keeper(ca: &TestCa, directory: &std::path::Path) -> Self {
        let files = ca.write_identity(directory);
        let secure: SocketAddr = ([127, 0, 0, 1], ports::free()).into();
        let [cert, key] = [files.certificates, files.key].map(|path| path.display().to_string());
        let arguments = ["--tls-listen", &secure.to_string(), "--tls-cert", &cert, "--tls-key", &key];
        let arguments = arguments.map(str::to_owned).to_vec();
        let store = Store::start(Kind::Keeper, Options { arguments, ..Options::default() });
        Self { plain: store.addr(), secure, process: Process::Keeper(store) }
    }

    fn zookeeper(ca: &TestCa, directory: &std::path::Path) -> Self {
        let (chain, key) = ca.issue(&["localhost"]);
        let both = write(directory.join("both.pem"), &(key + &chain));
        let trusted = write(directory.join("ca.pem"), ca.pem());
        let [plain, secure] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], ports::free())));
        let config = format!(
            "tickTime=2000\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nsecureClientPort={}\n\
             secureClientPortAddress=127.0.0.1\nadmin.enableServer=false\n\
             serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
             ssl.keyStore.location={}\nssl.keyStore.type=PEM\nssl.trustStore.location={}\n\
             ssl.trustStore.type=PEM\nssl.clientAuth=none\n",
            directory.join("data").display(),
            plain.port(),
            secure.port(),
            both.display(),
            trusted.display()
        );
        let config = write(directory.join("zoo.cfg"), &config);
        let netty = ["common", "buffer", "transport", "codec", "handler", "resolver"];
        let jars = netty.map(|part| format!("/usr/share/java/netty-{part}.jar")).join(":");
        let mut java = Command::new("java");
        java.args(["-cp", &format!("/usr/share/java/zookeeper.jar:{jars}")]);
        java.arg("org.apache.zookeeper.server.ZooKeeperServerMain").arg(config);
        let child = java.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process = Process::ZooKeeper(child.expect("java starts"));
        let server = Self { process, plain, secure };
        wait_for("ZooKeeper", START_DEADLINE, || {
            [plain, secure].iter().all(|addr| TcpStream::connect(addr).is_ok()).then_some(())
        });
        server
    }

    fn connect(&self, config: &Arc<ClientConfig>) -> StreamOwned<ClientConnection, TcpStream> {
        let name = ServerName::try_from("localhost").expect("a name");
        let tls = ClientConnection::new(Arc::clone(config), name).expect("a client");
        let mut stream = StreamOwned::new(tls, dial(self.secure).expect("a connection"));
        stream.write_all(&Hello::default().frame()).expect("sent");
        let mut length = [0; 4];
        stream.read_exact(&mut length).expect("a session");
        let length = usize::try_from(i32::from_be_bytes(length)).expect("a length");
        stream.read_exact(&mut vec![0; length]).expect("a session");
        stream
    }

    fn run(&self, config: &Arc<ClientConfig>, load: &Load) {
        load::prepare(self.plain, load);
        load::drive(&mut self.connect(config), load);
    }

    /// Operations per CPU-second of the server.
    fn per_cpu_second(&self, config: &Arc<ClientConfig>, op: Op) -> f64 {
        let count = if op == Op::Create { 40_000 } else { 100_000 };
        let load = |parent| Load { op, in_flight: IN_FLIGHT, bytes: 100, count, parent };
        let (mut used, mut rounds) = (Duration::ZERO, 0);
        while used < ENOUGH_CPU && rounds < MAX_ROUNDS {
            let load = load(format!("/{}-{rounds}", op.name()));
            load::prepare(self.plain, &load);
            let mut stream = self.connect(config);
            let before = cpu(self.pid());
            load::drive(&mut stream, &load);
            used += cpu(self.pid()) - before;
            rounds += 1;
        }
        (rounds * count) as f64 / used.as_secs_f64().max(1e-3)
    }
}

/// Measures both servers, and prints a row for each operation.
pub(crate) fn print(out: &mut impl Write) -> io::Result<()> {
    let ca = TestCa::new();
    let directories = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let mut roots = RootCertStore::empty();
    roots.add(ca.der()).expect("a CA");
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let [theirs, ours] =
        [Server::zookeeper(&ca, directories[0].path()), Server::keeper(&ca, directories[1].path())].map(
            |server| {
                // The JVM compiles code while it runs.
                for (op, count) in [(Op::Get, 150_000), (Op::Set, 60_000), (Op::Create, 30_000)] {
                    let parent = format!("/warm-{}", op.name());
                    server.run(&config, &Load { op, in_flight: IN_FLIGHT, bytes: 100, count, parent });
                }
                Op::ALL.map(|op| server.per_cpu_second(&config, op))
            },
        );
    writeln!(out, "operations per server CPU-second over TLS, 100 B, {IN_FLIGHT} in flight")?;
    for ((op, theirs), ours) in Op::ALL.into_iter().zip(theirs).zip(ours) {
        let ratio = ours / theirs;
        let verdict = if ratio >= GOAL { "met" } else { "MISSED" };
        writeln!(
            out,
            "  {:<26}{theirs:>14.0}{ours:>14.0}{ratio:>9.2}  at least {GOAL}x: {verdict}",
            op.name()
        )?;
    }
    Ok(())
}
