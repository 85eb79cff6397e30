//! Two machines as network namespaces joined by a virtual cable. They are created for one test and
//! removed with it, even if it panics. Needs root, `ip` and `nft`. No other process uses the ports
//! and addresses inside.

#![allow(clippy::unwrap_used, reason = "only tests call this")]

use portcullis_provider::Nftables;
use portcullis_provider::nftables::{DEFAULT_TIME_LIMIT, Mode, TableName, TableSettings};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::{PortRange, Protocol, Rule};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

pub(crate) const SERVER: &str = "10.77.0.1";
pub(crate) const CLIENT: &str = "10.77.0.2";
/// A second address of the client's machine.
pub(crate) const OTHER_CLIENT: &str = "10.77.0.3";
pub(crate) const SERVER_V6: &str = "fd77::1";
pub(crate) const CLIENT_V6: &str = "fd77::2";
pub(crate) const OTHER_CLIENT_V6: &str = "fd77::3";
pub(crate) const MACHINE: MachineNumber = MachineNumber::new(7);

/// Long enough for a busy machine, short enough for tests that expect no reply.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(crate) struct Net {
    server: Namespace,
    client: Namespace,
}

/// Removed on drop.
#[derive(Debug)]
pub(crate) struct Namespace(pub(crate) String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    Connected,
    Refused,
    TimedOut,
}

impl Namespace {
    pub(crate) fn new(role: &str) -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let name = format!("pc-{}-{}-{role}", std::process::id(), since_epoch.as_nanos());
        run(&["ip", "netns", "add", &name]);
        Self(name)
    }

    /// Runs `work` in the namespace. Sockets created there stay in it, whichever thread uses them.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let name = &self.0;
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let namespace = File::open(format!("/run/netns/{name}")).unwrap();
                rustix::thread::move_into_link_name_space(namespace.as_fd(), None).unwrap();
                work()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    pub(crate) fn ip(&self, arguments: &str) {
        let mut command = vec!["ip", "-n", &self.0];
        command.extend(arguments.split(' '));
        run(&command);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let removed = Command::new("ip").args(["netns", "del", &self.0]).status();
        if !removed.as_ref().is_ok_and(|status| status.success()) {
            let name = &self.0;
            assert!(std::thread::panicking(), "the network namespace {name} was left behind: {removed:?}");
        }
    }
}

/// Removes namespaces of killed tests. Another test may remove the same one at the same moment.
pub(crate) fn sweep() {
    let Ok(names) = std::fs::read_dir("/run/netns") else { return };
    for name in names.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let process = name.strip_prefix("pc-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            let removed = Command::new("ip").args(["netns", "del", &name]).output().unwrap();
            let complaint = String::from_utf8_lossy(&removed.stderr);
            assert!(!Path::new("/run/netns").join(&name).exists(), "{name} was not removed: {complaint}");
        }
    }
}

fn run(command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

impl Net {
    pub(crate) fn new() -> Self {
        sweep();
        let net = Self { server: Namespace::new("s"), client: Namespace::new("c") };
        net.server.ip(&format!("link add eth0 type veth peer name eth0 netns {}", net.client.0));
        for (namespace, addresses) in [
            (&net.server, &[SERVER, SERVER_V6][..]),
            (&net.client, &[CLIENT, OTHER_CLIENT, CLIENT_V6, OTHER_CLIENT_V6]),
        ] {
            for address in addresses {
                let (len, more) = if address.contains(':') { (64, " nodad") } else { (24, "") };
                namespace.ip(&format!("addr add {address}/{len} dev eth0{more}"));
            }
            namespace.ip("link set lo up");
            namespace.ip("link set eth0 up");
        }
        net.wait_until_joined();
        net
    }

    /// Waits for neighbour discovery; packets that are sent before it are lost.
    fn wait_until_joined(&self) {
        for (server, clients) in [(SERVER, [CLIENT, OTHER_CLIENT]), (SERVER_V6, [CLIENT_V6, OTHER_CLIENT_V6])]
        {
            let listener = self.listen(server);
            let to = listener.local_addr().unwrap();
            for client in clients {
                wait_for("the cable", || self.attempt_from(client, to) == Attempt::Connected);
            }
        }
    }

    /// Returns the command that runs `nft` on the server's machine.
    pub(crate) fn nft_command(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.server.0, "nft"].map(str::to_owned).to_vec()
    }

    pub(crate) fn firewall(&self, mode: Mode, protected: &[u16]) -> Nftables {
        self.firewall_from(mode, protected, Vec::new())
    }

    /// Also with ports that are protected for a source only.
    pub(crate) fn firewall_from(&self, mode: Mode, protected: &[u16], protected_from: Vec<Rule>) -> Nftables {
        let protected =
            protected.iter().map(|&port| PortRange::single(port, Protocol::Tcp).unwrap()).collect();
        let table = TableName::for_instance("test").unwrap();
        let settings = TableSettings { table, mode, protected, protected_from };
        Nftables::new(MACHINE, settings).with_command(self.nft_command(), DEFAULT_TIME_LIMIT)
    }

    /// Runs `nft` as an administrator of the server's machine.
    pub(crate) fn nft(&self, arguments: &[&str]) -> String {
        let command = self.nft_command();
        let mut command: Vec<&str> = command.iter().map(String::as_str).collect();
        command.extend(arguments);
        run(&command)
    }

    /// Listens on a free port of the server. The kernel completes connections without an accept.
    pub(crate) fn listen(&self, address: &str) -> TcpListener {
        let address: IpAddr = address.parse().unwrap();
        self.server.enter(|| TcpListener::bind((address, 0)).unwrap())
    }

    pub(crate) fn listen_udp(&self) -> UdpSocket {
        let socket = self.server.enter(|| UdpSocket::bind((SERVER, 0)).unwrap());
        socket.set_read_timeout(Some(CONNECT_LIMIT)).unwrap();
        socket
    }

    /// Returns a socket of the client that is connected to `to`.
    pub(crate) fn udp_to(&self, to: SocketAddr) -> UdpSocket {
        let socket = self.client.enter(|| UdpSocket::bind((CLIENT, 0)).unwrap());
        socket.connect(to).unwrap();
        socket.set_read_timeout(Some(CONNECT_LIMIT)).unwrap();
        socket
    }

    pub(crate) fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.client.enter(|| TcpStream::connect_timeout(&to, CONNECT_LIMIT))
    }

    pub(crate) fn attempt(&self, to: SocketAddr) -> Attempt {
        outcome(self.connect(to).map(drop))
    }

    /// Runs `work` in the client's network namespace.
    pub(crate) fn on_client<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.client.enter(work)
    }

    /// Runs `work` in the server's network namespace.
    pub(crate) fn on_server<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.server.enter(work)
    }

    /// Connects from the server to itself.
    pub(crate) fn attempt_from_server(&self, to: SocketAddr) -> Attempt {
        outcome(self.server.enter(|| TcpStream::connect_timeout(&to, CONNECT_LIMIT)).map(drop))
    }

    pub(crate) fn attempt_from(&self, source: &str, to: SocketAddr) -> Attempt {
        let source: IpAddr = source.parse().unwrap();
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        outcome(self.client.enter(|| {
            let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(CONNECT_LIMIT))?;
            rustix::net::bind(&socket, &SocketAddr::new(source, 0))?;
            match rustix::net::connect(&socket, &to) {
                // The error of a connect that exceeds the send timeout of its socket.
                Err(Errno::INPROGRESS) => Err(io::ErrorKind::TimedOut.into()),
                other => Ok(other?),
            }
        }))
    }
}

fn outcome(connected: io::Result<()>) -> Attempt {
    match connected.map_err(|error| error.kind()) {
        Ok(()) => Attempt::Connected,
        Err(io::ErrorKind::ConnectionRefused) => Attempt::Refused,
        Err(io::ErrorKind::TimedOut) => Attempt::TimedOut,
        Err(other) => panic!("unexpected error of connect: {other}"),
    }
}

/// Time limit of a wait; only a hang reaches it.
const LIMIT: Duration = Duration::from_secs(120);

/// Waits until `fact` returns true.
pub(crate) fn wait_for(what: &str, mut fact: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !fact() {
        assert!(Instant::now() < deadline, "no {what} within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
