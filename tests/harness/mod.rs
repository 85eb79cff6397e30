//! Starts real stores for tests: Debian's Apache ZooKeeper and the embedded keeper, each in a fresh directory on a
//! port of its own, and ends them when the test ends. What a test expects of a store does not belong here.
//!
//! Other packages take this file in with `#[path = "../../tests/harness/mod.rs"] mod harness;`.

// Every test binary compiles the harness for itself, and none of them uses all of it.
#![allow(dead_code, unused_imports, unused_macros)]

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

/// How long a server may take to answer for the first time. A JVM on two busy cores takes seconds, not a minute.
pub(crate) const START_DEADLINE: Duration = Duration::from_secs(60);

/// How long a server may take to end after it was told to.
pub(crate) const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// A lost race for a port shows as a server that ends at once: this often another port is tried.
const PORT_ATTEMPTS: usize = 5;

/// The shortest deadline of any wait: only a hang reaches it, however busy the machine is.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Polls `fact` until it returns a value. Gives up after `deadline`, or after [`HANG`] if that is longer.
///
/// # Panics
/// When the deadline passes; the message carries `what`.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, deadline: Duration, fact: impl FnMut() -> Option<T>) -> T {
    poll_until(what, deadline.max(HANG), fact)
}

/// Polls `fact` until it returns a value or `deadline` has passed.
///
/// # Panics
/// When the deadline passes; the message carries `what`.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    ZooKeeper,
    Keeper,
}

/// How a server is started, beyond its directory and port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// `user:base64(sha1(user:password))` of the user who may do everything.
    pub(crate) super_digest: Option<String>,
    /// Put before the server's own command line, e.g. `strace` and its arguments.
    pub(crate) wrapper: Vec<String>,
    /// Where the data goes, if not below the harness's own directory: a small or a failing file system.
    pub(crate) data_dir: Option<PathBuf>,
    /// More arguments for the keeper.
    pub(crate) arguments: Vec<String>,
    /// ZooKeeper as an operator would run it. Without it the JVM gets a small heap and only its quick compiler, which
    /// starts sooner.
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
    /// A fresh Apache ZooKeeper.
    pub(crate) fn zookeeper() -> Self {
        Self::start(Kind::ZooKeeper, Options::default())
    }

    /// A fresh embedded keeper, as a process of its own.
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

    /// The process that was started: the server, or the wrapper around it.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running server").id()
    }

    /// What the server has said so far, stdout and stderr together.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).expect("the server's output");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Ends the server as a power switch would end its process, and waits until it is gone.
    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().expect("a running server");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Asks the server to stop, and waits until it has.
    pub(crate) fn sigterm(&mut self) -> ExitStatus {
        let done = Command::new("kill").arg("-TERM").arg(self.pid().to_string()).status().expect("kill");
        assert!(done.success(), "no process to stop");
        self.wait_exit(STOP_DEADLINE)
    }

    /// Waits for the server to end by itself.
    pub(crate) fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let child = self.child.as_mut().expect("a running server");
        let status = wait_for("end of the server", deadline, || child.try_wait().expect("wait"));
        self.child = None;
        status
    }

    /// Starts the server again on the same data and port; one that still runs is killed first.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
        assert!(self.try_start(), "{:?} does not start again:\n{}", self.kind, self.log());
    }

    /// Starts the server again where it is expected to refuse: gives its exit status.
    pub(crate) fn restart_refused(&mut self) -> ExitStatus {
        if self.child.is_some() {
            self.kill9();
        }
        self.spawn();
        self.wait_exit(START_DEADLINE)
    }

    /// From here on the server is started with these options. Takes effect at the next `restart`.
    pub(crate) fn set_options(&mut self, options: Options) {
        self.options = options;
    }

    /// The answer to a four-letter word, or nothing when there is no server to give one.
    pub(crate) fn four_letters(&self, word: &str) -> Option<String> {
        self.ask(word, Duration::from_secs(10))
    }

    fn ask(&self, word: &str, patience: Duration) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&self.addr(), Duration::from_secs(2)).ok()?;
        stream.set_read_timeout(Some(patience)).ok()?;
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

    /// Whether it is our process that answers, and not another that took the port meanwhile.
    fn serves(&self) -> bool {
        // ZooKeeper takes connections a moment before it reads them, and forgets those.
        let patience = Duration::from_millis(200);
        match self.kind {
            Kind::ZooKeeper => {
                let data_dir = format!("dataDir={}", self.data_dir().display());
                self.ask("conf", patience).is_some_and(|conf| conf.contains(&data_dir))
            }
            Kind::Keeper => {
                let line = format!("listening on {}", self.addr());
                self.log().lines().any(|said| said == line)
                    && self.ask("ruok", patience).as_deref() == Some("imok")
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
        // Containers and TTL nodes are looked after each second, as in the keeper; a minute is ZooKeeper's own choice.
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

/// A program of the workspace, as built next to the running test.
pub(crate) fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("path of this test");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let binary = profile.join(name);
    assert!(binary.exists(), "{} is missing: build it with `cargo build --workspace`", binary.display());
    binary
}
