//! Starts real stores for tests: Debian's Apache ZooKeeper and the embedded keeper, each with a new
//! directory and its own port, and stops them when the test ends. Expectations about a store do not
//! belong here.
//!
//! Other packages include this file with `#[path = "../../tests/harness/mod.rs"] mod harness;`.

// Every test binary compiles the harness separately, and none uses all of it.
#![allow(dead_code, unused_imports, unused_macros)]

pub(crate) mod golden;
pub(crate) mod groups;
pub(crate) mod ports;
pub(crate) mod scenario;
pub(crate) mod wire;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Time limit of a server's first reply. A JVM on two busy cores takes seconds, not a minute.
pub(crate) const START_DEADLINE: Duration = Duration::from_secs(60);

/// Time limit of a server's shutdown.
pub(crate) const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// A server that loses a race for its port exits at once; this many ports are tried.
const PORT_ATTEMPTS: usize = 5;

/// The shortest time limit of any wait; only a hang reaches it, even on a busy machine.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Polls `fact` until it returns a value. Gives up after `deadline`, or after [`HANG`] if that is
/// longer.
///
/// # Panics
/// When the deadline passes; the message contains `what`.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, deadline: Duration, fact: impl FnMut() -> Option<T>) -> T {
    poll_until(what, deadline.max(HANG), fact)
}

/// Polls `fact` until it returns a value or `deadline` has passed.
///
/// # Panics
/// When the deadline passes; the message contains `what`.
#[track_caller]
pub(crate) fn poll_until<T>(what: &str, deadline: Duration, mut fact: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(found) = fact() {
            return found;
        }
        assert!(Instant::now() < end, "no {what} within {deadline:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Polls `count` until it is `total`. Gives up when it has not changed for [`HANG`]: work in many
/// steps may take any time on a busy machine.
///
/// # Panics
/// When the count stays the same for too long; the message contains `what`.
#[track_caller]
pub(crate) fn wait_for_count(what: &str, total: usize, mut count: impl FnMut() -> usize) {
    let mut reached = count();
    while reached != total {
        let what = format!("{what}: {reached} of {total}, and no more");
        reached = wait_for(&what, HANG, || Some(count()).filter(|now| *now != reached));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    ZooKeeper,
    Keeper,
}

/// Start options of a server besides its directory and port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// `user:base64(sha1(user:password))` of the superuser.
    pub(crate) super_digest: Option<String>,
    /// A prefix of the server's command line, for example `strace` and its arguments.
    pub(crate) wrapper: Vec<String>,
    /// Overrides the data directory, for example with a small or failing file system.
    pub(crate) data_dir: Option<PathBuf>,
    /// Additional arguments of the keeper.
    pub(crate) arguments: Vec<String>,
    /// Runs ZooKeeper with production settings. Otherwise the JVM gets a small heap and only its
    /// fast compiler, so that it starts sooner.
    pub(crate) tuned_for_work: bool,
}

/// A running server. Dropping it kills the process and removes its directory.
#[derive(Debug)]
pub(crate) struct Store {
    kind: Kind,
    options: Options,
    port: u16,
    child: Option<Child>,
    dir: TempDir,
}

impl Store {
    /// Starts an Apache ZooKeeper without data.
    pub(crate) fn zookeeper() -> Self {
        Self::start(Kind::ZooKeeper, Options::default())
    }

    /// Starts an embedded keeper without data, as a separate process.
    pub(crate) fn keeper() -> Self {
        Self::start(Kind::Keeper, Options::default())
    }

    pub(crate) fn start(kind: Kind, options: Options) -> Self {
        let dir = tempfile::Builder::new().prefix("portcullis-test-").tempdir().expect("temporary directory");
        let mut store = Self { kind, options, port: 0, child: None, dir };
        std::fs::create_dir_all(store.data_dir()).expect("data directory");
        for _ in 0..PORT_ATTEMPTS {
            store.port = ports::free();
            if store.try_start() {
                return store;
            }
        }
        panic!("{kind:?} does not start:\n{}", store.log());
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.options.data_dir.clone().unwrap_or_else(|| self.dir.path().join("data"))
    }

    /// Returns the id of the started process: the server, or the wrapper around it.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running server").id()
    }

    /// Returns the server's output so far, stdout and stderr together.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).expect("the server's output");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Kills the server with SIGKILL, and waits for its end.
    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().expect("a running server");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Stops the server with SIGTERM, and waits for its end.
    pub(crate) fn sigterm(&mut self) -> ExitStatus {
        let done = Command::new("kill").arg("-TERM").arg(self.pid().to_string()).status().expect("kill");
        assert!(done.success(), "no process to stop");
        self.wait_exit(STOP_DEADLINE)
    }

    /// Waits until the server exits.
    pub(crate) fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let child = self.child.as_mut().expect("a running server");
        let status = wait_for("end of the server", deadline, || child.try_wait().expect("wait"));
        self.child = None;
        status
    }

    /// Starts the server again with the same data and port; a running one is killed first.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
        assert!(self.try_start(), "{:?} does not start again:\n{}", self.kind, self.log());
    }

    /// Starts the server again, expects that it refuses to run, and returns its exit status.
    pub(crate) fn restart_refused(&mut self) -> ExitStatus {
        if self.child.is_some() {
            self.kill9();
        }
        self.spawn();
        self.wait_exit(START_DEADLINE)
    }

    /// Sets the start options, which take effect at the next `restart`.
    pub(crate) fn set_options(&mut self, options: Options) {
        self.options = options;
    }

    /// Returns the reply to a four-letter command; `None` if no server replies.
    pub(crate) fn four_letters(&self, word: &str) -> Option<String> {
        self.ask(word, Duration::from_secs(10))
    }

    fn ask(&self, word: &str, timeout: Duration) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&self.addr(), Duration::from_secs(2)).ok()?;
        stream.set_read_timeout(Some(timeout)).ok()?;
        stream.write_all(word.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    fn try_start(&mut self) -> bool {
        self.spawn();
        wait_for("first answer", START_DEADLINE, || {
            let ended = self.child.as_mut().expect("just started").try_wait().expect("wait").is_some();
            if ended {
                self.child = None;
                return Some(false);
            }
            self.serves().then_some(true)
        })
    }

    /// Returns whether our own process replies, and not another one that took the port meanwhile.
    fn serves(&self) -> bool {
        // ZooKeeper accepts connections shortly before it reads from them, and loses those.
        let timeout = Duration::from_millis(200);
        match self.kind {
            Kind::ZooKeeper => {
                let data_dir = format!("dataDir={}", self.data_dir().display());
                self.ask("conf", timeout).is_some_and(|conf| conf.contains(&data_dir))
            }
            Kind::Keeper => {
                let line = format!("listening on {}", self.addr());
                self.log().lines().any(|printed| printed == line)
                    && self.ask("ruok", timeout).as_deref() == Some("imok")
            }
        }
    }

    fn spawn(&mut self) {
        let output = File::create(self.log_path()).expect("file for the server's output");
        let errors = output.try_clone().expect("second handle");
        let child = self.command().stdin(Stdio::null()).stdout(output).stderr(errors).spawn();
        self.child = Some(child.expect("start the server"));
    }

    fn command(&self) -> Command {
        let mut line = self.options.wrapper.clone();
        match self.kind {
            Kind::ZooKeeper => line.extend(self.zookeeper_line()),
            Kind::Keeper => line.extend(self.keeper_line()),
        }
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).current_dir(self.dir.path());
        if let (Kind::Keeper, Some(digest)) = (self.kind, &self.options.super_digest) {
            command.env("PORTCULLIS_SUPER_DIGEST", digest);
        }
        command
    }

    fn zookeeper_line(&self) -> Vec<String> {
        let config = self.dir.path().join("zoo.cfg");
        let text = format!(
            "tickTime=2000\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n\
             4lw.commands.whitelist=*\nadmin.enableServer=false\nreconfigEnabled=true\n",
            self.data_dir().display(),
            self.port
        );
        std::fs::write(&config, text).expect("zoo.cfg");
        // Expired containers and TTL nodes are deleted every second, as in the keeper; ZooKeeper's
        // default is a minute.
        let mut line =
            ["java", "-Dzookeeper.extendedTypesEnabled=true", "-Dznode.container.checkIntervalMs=1000"]
                .map(str::to_owned)
                .to_vec();
        if !self.options.tuned_for_work {
            line.extend(["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"].map(str::to_owned));
        }
        if let Some(digest) = &self.options.super_digest {
            line.push(format!("-Dzookeeper.DigestAuthenticationProvider.superDigest={digest}"));
        }
        line.extend(["-cp", "/usr/share/java/zookeeper.jar"].map(str::to_owned));
        line.push("org.apache.zookeeper.server.ZooKeeperServerMain".to_owned());
        line.push(config.display().to_string());
        line
    }

    fn keeper_line(&self) -> Vec<String> {
        let binary = binary("portcullis").display().to_string();
        let data_dir = self.data_dir().display().to_string();
        let line = [&binary, "keeper", "--data-dir", &data_dir, "--listen", &self.addr().to_string()];
        line.into_iter().map(str::to_owned).chain(self.options.arguments.iter().cloned()).collect()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("output")
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
    }
}

/// Returns the path of a program of the workspace, built next to the running test.
pub(crate) fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("path of this test");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let binary = profile.join(name);
    assert!(binary.exists(), "{} is missing: build it with `cargo build --workspace`", binary.display());
    binary
}
