//! The demo's private network: a network namespace for its machine and one for a neighbour, joined
//! by a veth pair. A user namespace gives an unprivileged user the rights to set them up. The
//! host's network is neither visible nor changed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The machine and its neighbour.
const MACHINE: &str = "10.77.0.1";
const NEIGHBOUR: &str = "10.77.0.2";
const PREFIX_LEN: u8 = 24;

/// Marks the process that runs inside the namespaces.
pub(super) const FLAG: &str = "in-namespace";

const NEEDED: [&str; 3] = ["unshare", "ip", "nft"];
const NAMESPACES: [&str; 3] = ["--user", "--map-root-user", "--net"];

/// Tries everything that the demo needs from the kernel, in namespaces of its own.
const PROBE: &str = "ip link add probe type veth peer name peer && nft 'add table inet probe; \
    add chain inet probe input { type filter hook input priority 0; }; \
    add rule inet probe input ct state established accept; add rule inet probe input reject'";

/// A process that only has to start.
const START_LIMIT: Duration = Duration::from_secs(60);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
const MAX_PAGE_BYTES: u64 = 64 * 1024;

/// Replaces this process by one that runs the same command in namespaces of its own. Returns only
/// if that cannot be done, with the reason.
pub(super) fn enter() -> String {
    let path = search_path(std::env::var_os("PATH").as_deref());
    let missing: Vec<&str> = NEEDED.into_iter().filter(|program| !is_in(program, &path)).collect();
    if !missing.is_empty() {
        return format!("not installed: {}", missing.join(", "));
    }
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(NAMESPACES).arg("--").env("PATH", &path);
        command
    };
    match unshare().args(["sh", "-c", PROBE]).stdin(Stdio::null()).output() {
        Ok(probe) if probe.status.success() => {}
        Ok(probe) => {
            let complaint = String::from_utf8_lossy(&probe.stderr);
            let line = complaint.lines().find(|line| !line.trim().is_empty());
            let reason = line.map_or_else(|| probe.status.to_string(), str::to_owned);
            return format!("no private network namespace ({reason})");
        }
        Err(error) => return format!("cannot start unshare: {error}"),
    }
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return format!("cannot determine the path of this program: {error}"),
    };
    let error = unshare().arg(program).args(std::env::args_os().skip(1)).arg(format!("--{FLAG}")).exec();
    format!("cannot start unshare: {error}")
}

/// Where programs are looked for: `ip` and `nft` are often in directories that only root has in its
/// PATH.
fn search_path(path: Option<&OsStr>) -> OsString {
    let mut all = path.unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin")).to_owned();
    all.push(":/usr/sbin:/sbin");
    all
}

fn is_in(program: &str, path: &OsStr) -> bool {
    std::env::split_paths(path).any(|directory| directory.join(program).is_file())
}

/// How a request for a page ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) kind: Kind,
    /// The client's output.
    pub(super) shown: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Page,
    Refused,
    /// Any other failure, for example a timeout.
    Failed,
}

/// Where requests come from.
#[derive(Debug)]
pub(super) enum Client {
    /// The neighbour's namespace, kept alive by this process until its input ends.
    Neighbour(Child),
    /// This machine itself, for a dry run.
    Localhost,
}

impl Client {
    /// Creates the neighbour's namespace and the veth pair to it. Must be called inside the demo's
    /// own namespaces.
    pub(super) fn neighbour() -> anyhow::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let client = Self::Neighbour(command.spawn().context("cannot start unshare")?);
        let namespace = client.namespace().unwrap_or_default();
        let limit = Instant::now() + START_LIMIT;
        let own = fs::read_link("/proc/self/ns/net").context("cannot read this process's namespace")?;
        while fs::read_link(&namespace).is_ok_and(|link| link == own) {
            if Instant::now() >= limit {
                bail!("the neighbour's namespace does not appear");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let Self::Neighbour(child) = &client else { bail!("no neighbour") };
        ip(&format!("link add machine type veth peer name neighbour netns {}", child.id()))?;
        join("machine", MACHINE)?;
        client.inside(|| join("neighbour", NEIGHBOUR))?.and(Ok(client))
    }

    pub(super) fn host(&self) -> &'static str {
        match self {
            Self::Neighbour(_) => MACHINE,
            Self::Localhost => "localhost",
        }
    }

    /// Asks the machine for a page, with curl if it is installed.
    pub(super) fn get(&self, port: u16) -> io::Result<Answer> {
        let host = self.host();
        self.inside(|| match curl(&format!("http://{host}:{port}/")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(own_request(host, port)),
            done => done,
        })?
    }

    fn namespace(&self) -> Option<String> {
        match self {
            Self::Neighbour(child) => Some(format!("/proc/{}/ns/net", child.id())),
            Self::Localhost => None,
        }
    }

    /// Runs `work` in the client's namespace, in a thread of its own.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        let namespace = self.namespace();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                if let Some(namespace) = namespace {
                    let file = File::open(namespace)?;
                    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                }
                Ok(work())
            });
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of a request panicked")))
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Self::Neighbour(child) = self {
            // It may have ended already, with everything else on Ctrl-C.
            let _ = (child.kill(), child.wait());
        }
    }
}

/// Gives an interface its address and takes it up, and loopback with it.
fn join(interface: &str, address: &str) -> anyhow::Result<()> {
    ip("link set lo up")?;
    ip(&format!("addr add {address}/{PREFIX_LEN} dev {interface}"))?;
    ip(&format!("link set {interface} up"))
}

fn ip(arguments: &str) -> anyhow::Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output().context("cannot start ip")?;
    if !output.status.success() {
        bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// The exit code of curl for a connection that could not be made.
const CURL_NOT_CONNECTED: i32 = 7;

fn curl(url: &str) -> io::Result<Answer> {
    let mut command = Command::new("curl");
    // Ignores curl's configuration, so that the output is the same on every machine.
    command.args(["--disable", "--silent", "--show-error", "--noproxy", "*", "--max-time"]);
    command.arg(REQUEST_LIMIT.as_secs().to_string()).arg(url).stdin(Stdio::null());
    let output = command.output()?;
    let kind = match output.status.code() {
        Some(0) => Kind::Page,
        Some(CURL_NOT_CONNECTED) => Kind::Refused,
        _ => Kind::Failed,
    };
    let shown = [output.stdout, output.stderr].concat();
    Ok(Answer { kind, shown: String::from_utf8_lossy(&shown).into_owned() })
}

/// For machines without curl.
pub(super) fn own_request(host: &str, port: u16) -> Answer {
    let page = || {
        let address: Ipv4Addr = host.parse().unwrap_or(Ipv4Addr::LOCALHOST);
        let mut stream = TcpStream::connect_timeout(&(address, port).into(), REQUEST_LIMIT)?;
        stream.set_read_timeout(Some(REQUEST_LIMIT))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.take(MAX_PAGE_BYTES).read_to_string(&mut answer)?;
        Ok::<_, io::Error>(answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
    };
    match page() {
        Ok(page) => Answer { kind: Kind::Page, shown: page },
        Err(error) => {
            let refused = error.kind() == io::ErrorKind::ConnectionRefused;
            let kind = if refused { Kind::Refused } else { Kind::Failed };
            Answer {
                kind,
                shown: format!("{error} (curl is not installed; this is the demo's own request)\n"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_directories_of_roots_path() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("nft"), "").unwrap();
        let path = search_path(Some(home.path().as_os_str()));
        assert!(is_in("nft", &path));
        assert!(!is_in("no-such-program", &path));
        assert!(search_path(None).to_string_lossy().ends_with(":/bin:/usr/sbin:/sbin"));
    }

    #[test]
    fn the_demo_fetches_pages_without_curl() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 256]).unwrap();
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nHello.\n").unwrap();
        });
        assert_eq!(own_request("127.0.0.1", port), Answer { kind: Kind::Page, shown: "Hello.\n".to_owned() });
        serving.join().unwrap();
        assert_eq!(own_request("127.0.0.1", port).kind, Kind::Refused, "the listener is gone");
    }
}
