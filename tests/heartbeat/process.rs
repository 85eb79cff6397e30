//! Real trackers on a real store, a state manager that answers over HTTP, and a small client that
//! keeps its connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use portcullis::store::Credential;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{START_DEADLINE, STOP_DEADLINE, Store, binary, wait_for};
use crate::manager::{Manager, Mood};

/// A store with an environment, and its operator.
pub(crate) struct Site {
    pub(crate) store: Store,
    home: TempDir,
}

impl Site {
    pub(crate) fn new(store: Store) -> Self {
        let home = tempfile::tempdir().unwrap();
        // Hooks of other users have to reach the files of units below it.
        std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let site = Self { store, home };
        let address = site.store.addr().to_string();
        site.juju(&["--zookeeper", &address, "bootstrap"]);
        site
    }

    /// The output of a command, which must succeed.
    pub(crate) fn juju(&self, args: &[&str]) -> String {
        let done = self.command("juju").args(args).output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    /// The exit code of a command, and its stdout and stderr.
    pub(crate) fn output_of(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let done = self.command("juju").args(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout), text(done.stderr))
    }

    pub(crate) fn home(&self) -> &std::path::Path {
        self.home.path()
    }

    /// The environment variables of the operator's client.
    pub(crate) fn operator(&self) -> Credential {
        let file = std::fs::read(self.home.path().join("portcullis/local.json")).unwrap();
        let remembered: Value = serde_json::from_slice(&file).unwrap();
        Credential::parse(remembered["auth"].as_str().unwrap()).unwrap()
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(binary(program));
        command.env("XDG_CONFIG_HOME", self.home.path()).env_remove("JUJU_ENV").env_remove("JUJU_ZOOKEEPER");
        command.env("XDG_DATA_HOME", self.home.path());
        command
    }

    pub(crate) fn tracker(&self, args: &[&str]) -> Tracker {
        let tracker = self.tracker_without_store(args);
        wait_for("a tracker that has read the store", START_DEADLINE, || {
            (tracker.get("/hmi/v1/readiness").0 == 204).then_some(())
        });
        tracker
    }

    /// Starts a tracker and waits until it listens, also without a store.
    pub(crate) fn tracker_without_store(&self, args: &[&str]) -> Tracker {
        let mut child = self
            .command("portcullis")
            .args(["heartbeat", "--listen", "127.0.0.1:0"])
            .args(args)
            .env("PORTCULLIS_WEBHOOK_SECRET", "hush")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut address = |before: &str| {
            let line = lines.next().unwrap().unwrap();
            line.strip_prefix(before).expect("an address").parse().unwrap()
        };
        let addr = address("listening on ");
        let secure = args.contains(&"--tls-listen").then(|| address("listening with TLS on "));
        Tracker { child, addr, secure }
    }
}

pub(crate) struct Tracker {
    child: Child,
    pub(crate) addr: SocketAddr,
    /// The address of the TLS listener.
    pub(crate) secure: Option<SocketAddr>,
}

impl Tracker {
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let answer = Client::connect(self.addr).and_then(|mut client| client.ask("GET", path, &[], b""));
        answer.map_or((0, String::new()), |answer| (answer.status, answer.body))
    }

    pub(crate) fn is_judging(&self) -> bool {
        self.get("/hmi/v1/health").1.contains("\"Judging\":true")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let done = Command::new("kill").args([signal, &self.pid().to_string()]).status().unwrap();
        assert!(done.success());
    }

    pub(crate) fn kill9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it, and checks that it exits cleanly.
    pub(crate) fn end(mut self) {
        self.signal("-TERM");
        let status = wait_for("its end", STOP_DEADLINE, || self.child.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// One connection that is kept open.
#[derive(Debug)]
pub(crate) struct Client<S = TcpStream>(pub(crate) BufReader<S>);

impl Client {
    pub(crate) fn connect(addr: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Connects from this local address.
    pub(crate) fn connect_from(ip: std::net::IpAddr, addr: SocketAddr) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stream = runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.bind((ip, 0).into())?;
            socket.connect(addr).await?.into_std()
        })?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Requests a stream, and returns it line by line.
    pub(crate) fn stream(mut self, path: &str) -> impl Iterator<Item = String> {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
        self.0.get_mut().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        self.head().unwrap();
        self.0.lines().map(|line| line.expect("a line in time"))
    }
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn ask(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<Answer> {
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        let mut bytes = request.into_bytes();
        bytes.extend_from_slice(body);
        self.0.get_mut().write_all(&bytes)?;
        let head = self.head()?;
        let length = field(&head, "content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
        Ok(Answer { status, head, body: String::from_utf8(body).unwrap() })
    }

    /// Sends bytes, and returns the head of the answer.
    pub(crate) fn open(&mut self, request: &[u8]) -> std::io::Result<String> {
        self.0.get_mut().write_all(request)?;
        self.head()
    }

    pub(crate) fn beat(&mut self, name: &str) -> std::io::Result<u16> {
        let body = format!(
            "{{\"Component\":\"{name}\",\"Hostname\":\"h\",\"NID\":\"1\",\"Status\":\"OK\",\
             \"Timestamp\":\"t\"}}"
        );
        Ok(self.ask("POST", "/hmi/v1/heartbeat", &[], body.as_bytes())?.status)
    }
}

impl<S: Read> Client<S> {
    fn head(&mut self) -> std::io::Result<String> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.0.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(head)
    }
}

pub(crate) fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// One received call.
#[derive(Debug, Clone)]
pub(crate) struct Got {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// A server for the calls of trackers; `take` returns the status.
pub(crate) fn serve(take: impl Fn(&Got) -> Option<u16> + Send + Sync + 'static) -> SocketAddr {
    serve_over(Some, take)
}

/// The same over the stream that `open` makes of a connection.
pub(crate) fn serve_over<S: Read + Write>(
    open: impl Fn(TcpStream) -> Option<S> + Send + Sync + 'static,
    take: impl Fn(&Got) -> Option<u16> + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let both = std::sync::Arc::new((open, take));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let both = std::sync::Arc::clone(&both);
            std::thread::spawn(move || {
                if let Some(stream) = both.0(stream) {
                    answer_calls(stream, &both.1);
                }
            });
        }
    });
    addr
}

fn answer_calls<S: Read + Write>(stream: S, take: &dyn Fn(&Got) -> Option<u16>) {
    let mut client = Client(BufReader::new(stream));
    while let Ok(head) = client.head() {
        let length = field(&head, "content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        if client.0.read_exact(&mut body).is_err() {
            return;
        }
        let Some(status) = take(&Got { head, body }) else { return };
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
        if client.0.get_mut().write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// The webhook, over HTTP: its address for `Webhook_url`. It is slow, so that a judge can crash
/// during a call.
pub(crate) fn serve_webhook(manager: &Manager) -> String {
    let manager = manager.clone();
    let addr = serve(move |got| {
        let sequences = field(&got.head, "x-portcullis-sequences").unwrap_or_default();
        manager.book().take_hook(sequences, &got.body);
        std::thread::sleep(Duration::from_millis(20));
        Some(200)
    });
    format!("http://{addr}/told")
}

/// The state manager, over HTTP: its address for `Sm_url`.
pub(crate) fn serve_manager(manager: &Manager) -> String {
    let manager = manager.clone();
    let addr = serve(move |got| {
        assert!(
            got.head.starts_with("PATCH /hsm/v2/State/Components/BulkStateData HTTP/1.1\r\n"),
            "{}",
            got.head
        );
        let sequences = field(&got.head, "x-portcullis-sequences").unwrap_or_default();
        let take = || Some(manager.book().take(sequences, &got.body));
        let mood = manager.book().mood;
        manager.book().arrived += 1;
        match mood {
            Mood::Holding => {
                wait_for("another mood", Duration::from_secs(60), || {
                    (manager.book().mood != Mood::Holding).then_some(())
                });
                take()
            }
            Mood::Late(_) => unreachable!("for simulated callers"),
            Mood::Down => None,
            Mood::Failing => Some(500),
            Mood::Answering(status) => Some(status),
            Mood::Hanging => {
                std::thread::sleep(Duration::from_secs(30));
                None
            }
            Mood::Slow => {
                std::thread::sleep(Duration::from_secs(1));
                take()
            }
            Mood::Fine => take(),
        }
    });
    format!("http://{addr}/hsm/v2")
}
