//! `portcullis` itself: up, down, and up again; the demo; and who is in whose way.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::harness::{binary, wait_for};
use crate::operator::{Came, Operator, came, fixture_charm};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A running `portcullis`, killed if the test ends before it does.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) addr: String,
}

impl Daemon {
    fn up(operator: &Operator) -> Self {
        Self::start(operator.command("portcullis").args(["up", "--listen", "127.0.0.1:0"]))
    }

    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child =
            command.env_remove("JUJU_ZOOKEEPER").stdout(Stdio::piped()).spawn().expect("portcullis starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its stdout")).read_line(&mut line).expect("a line");
        let addr = line.trim_end().strip_prefix("listening on ").expect("where it listens").to_owned();
        Self { child, addr }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end, and gives its exit code.
    pub(crate) fn ends(mut self, signal: &str) -> Option<i32> {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        wait_for("end of portcullis", DEADLINE, || self.child.try_wait().expect("wait")).code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ended already in every test that passes.
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// `juju` with no flags and no variables at all.
pub(crate) fn juju(operator: &Operator, args: &[&str]) -> Came {
    came(operator.command("juju").env_remove("JUJU_ZOOKEEPER").args(args))
}

#[test]
fn up_and_down_and_up_again() {
    let operator = Operator::with_store("");
    let first = Daemon::up(&operator);
    let deployed = juju(&operator, &["deploy", &fixture_charm("wordpress")]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    assert_eq!(juju(&operator, &["expose", "wordpress"]).stderr, "Service 'wordpress' was exposed.\n");
    // The machine is looked after, and the charm's hooks ran.
    // It is heard, too, and when last is all that may differ.
    // Its firewall is not: what would be done there is said, and not done.
    let dry = "80/tcp opening: to be opened to 0.0.0.0/0, ::/0; dry run: machine 0 is left as it is; would open 80/tcp";
    let running = |shown: &String| {
        ["agent-state: running", "agent-state: started", "flag: OK\n    health: ok\n", dry]
            .iter()
            .all(|part| shown.contains(part))
    };
    let status = || {
        let shown = juju(&operator, &["status"]).stdout;
        let same = shown.lines().filter(|line| !line.trim_start().starts_with("last-beat: "));
        same.map(|line| format!("{line}\n")).collect::<String>()
    };
    let before = wait_for("a unit that is started", DEADLINE, || Some(status()).filter(running));
    assert!(before.contains("instance-id: local") && before.contains("machine: 0"), "{before}");
    assert!(before.contains("        open-ports:\n        - 80/tcp\n"), "{before}");
    let explained = juju(&operator, &["firewall", "explain", "0"]).stdout;
    assert!(explained.contains("a dry run for nftables on the machine itself"), "{explained}");
    let tables = came(Command::new("nft").args(["list", "tables"]));
    assert!(tables.code == 0 && !tables.stdout.contains("portcullis"), "{tables:?}");
    let mode = fs::metadata(operator.home().join("data/portcullis/local")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);

    let up = |args: &[&str]| {
        came(operator.command("portcullis").env_remove("JUJU_ZOOKEEPER").arg("up").args(args))
    };
    up(&["--listen", "127.0.0.1:0"]).is_refusal(1, "is in use by another keeper");
    up(&["--listen", &first.addr, "--data-dir", "other"])
        .is_refusal(1, &format!("cannot listen on {}", first.addr));
    up(&["--listen", "127.0.0.1:0", "--data-dir", "third"])
        .is_refusal(1, "environment 'local' is the one in the store");
    assert_eq!(status(), before);

    assert_eq!(first.ends("-TERM"), Some(0));
    juju(&operator, &["status"]).is_refusal(1, "cannot reach the store");
    let second = Daemon::up(&operator);
    let after = wait_for("the machine's agent", DEADLINE, || Some(status()).filter(running));
    assert_eq!(after, before);
    assert_eq!(second.ends("-INT"), Some(0));
}

#[test]
fn up_takes_up_what_a_crash_left() {
    let operator = Operator::with_store("");
    let mut first = Daemon::up(&operator);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    // As if it had ended after writing the file and before making the tree.
    fs::remove_dir_all(operator.home().join("data/portcullis")).unwrap();
    for file in ["local.json", "local-controller.json"] {
        let path = operator.config(file);
        let mut known: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert!(known.as_object_mut().unwrap().remove("cluster-id").is_some());
        fs::write(&path, known.to_string()).unwrap();
    }
    let second = Daemon::up(&operator);
    let status = juju(&operator, &["status"]);
    assert_eq!(status.code, 0, "{status:?}");
    assert_eq!(second.ends("-TERM"), Some(0));
}

/// Somebody whose home has nothing in it.
fn empty_handed() -> Operator {
    let operator = Operator::with_store("");
    fs::remove_dir(operator.home().join("data")).unwrap();
    operator
}

#[test]
fn the_demo_needs_nothing_but_itself() {
    let operator = empty_handed();
    let alone = operator.home().join("portcullis");
    // The list of users is the host's, and stays.
    let host = tempfile::tempdir().unwrap();
    let users = host.path().join("users.json");
    fs::copy(binary("portcullis"), &alone).unwrap();
    let told = came(
        Command::new(&alone)
            .env_clear()
            .env("HOME", operator.home())
            .env("TMPDIR", operator.home())
            .stdin(Stdio::null()),
    );
    assert!(told.code == 2 && told.stderr.contains("Usage: portcullis"), "{told:?}");
    let told = came(
        Command::new(&alone)
            .arg("demo")
            .env_clear()
            .env("PORTCULLIS_UNIT_USERS", &users)
            .env("HOME", operator.home())
            .env("TMPDIR", operator.home())
            .stdin(Stdio::null()),
    );
    assert_eq!(told.code, 0, "{told:?}");
    for part in [
        "$ juju deploy ",
        "agent-state: started",
        "$ open-port ",
        "$ juju expose hello",
        "Hello world, from hello/0.\n$ juju status hello",
        "/tcp\n",
        "Hello from hello/0.\n$ juju status --format tabular",
        "# Done.",
    ] {
        assert!(told.stdout.contains(part), "{part:?} is not in {}", told.stdout);
    }
    // As on a screen, both outputs together.
    let mut shown = Command::new("/bin/sh");
    shown.args(["-c", "exec \"$0\" demo 2>&1"]).arg(&alone);
    shown.env_clear().env("PORTCULLIS_UNIT_USERS", &users);
    let shown = came(shown.env("HOME", operator.home()).env("TMPDIR", operator.home()));
    says_what_the_readme_says(&shown.stdout.replace(operator.home().to_str().unwrap(), "/tmp"));
    let left: Vec<_> =
        fs::read_dir(operator.home()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["portcullis"], "the demo left something behind");
}

/// Each line of the README's first screen is one of the demo's, in the same order, but for numbers that are drawn by lot.
fn says_what_the_readme_says(told: &str) {
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let screen = readme.split("somewhat shortened:\n").nth(1).expect("a screen");
    let screen = screen.lines().skip(1).map_while(|line| line.strip_prefix("    "));
    let plain = |line: &str| {
        let mut shown = String::new();
        let numbers = line.split_inclusive(|c: char| !c.is_ascii_digit());
        for part in numbers {
            let digits = part.chars().take_while(char::is_ascii_digit).count();
            shown += if digits >= 4 { "N" } else { &part[..digits] };
            shown += &part[digits..];
        }
        shown
    };
    let mut told = told.lines().map(plain);
    let mut lines = 0;
    for line in screen.map(plain) {
        lines += 1;
        let found = match line.split_once(" ...") {
            Some((start, _)) => told.any(|said| said.starts_with(start)),
            None => told.any(|said| said == line),
        };
        assert!(found, "the demo does not say, or not there: {line}");
    }
    assert!(lines > 30, "{lines} lines of a screen");
}

#[test]
fn a_demo_that_is_cut_short_leaves_nothing_behind_either() {
    let operator = empty_handed();
    let host = tempfile::tempdir().unwrap();
    for (signal, name) in [("-INT", "SIGINT"), ("-TERM", "SIGTERM")] {
        let mut demo = Command::new(binary("portcullis"))
            .arg("demo")
            .env("PORTCULLIS_UNIT_USERS", host.path().join("users.json"))
            .env("TMPDIR", operator.home())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
        let store = told.find_map(|line| line.strip_prefix("listening on ").map(str::to_owned)).unwrap();
        // In the middle of the unit's hooks.
        told.find(|line| line.starts_with("# The machine runs")).unwrap();
        let sent = Command::new("kill").args([signal, &demo.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let said: Vec<String> = told.collect();
        let came = demo.wait_with_output().unwrap();
        let stderr = String::from_utf8(came.stderr).unwrap();
        let end = format!("error: the story was cut short by {name}\n");
        assert!(stderr.ends_with(&end), "{stderr} {said:?}");
        assert_eq!(came.status.code(), Some(1));
        assert!(said.iter().any(|line| line == "$ juju destroy-service hello"), "{said:?}");
        let left: Vec<_> = fs::read_dir(operator.home()).unwrap().map(Result::unwrap).collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(TcpStream::connect(store).is_err(), "the store is still there");
        let place = operator.home().as_os_str().as_encoded_bytes();
        let mentions = |file: &Path| {
            let bytes = fs::read(file).unwrap_or_default();
            bytes.windows(place.len()).any(|part| part == place)
        };
        for process in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
            let left = ["cmdline", "environ"].into_iter().any(|file| mentions(&process.path().join(file)));
            assert!(!left, "process {} is left", process.path().display());
        }
    }
}

#[test]
fn a_store_that_lost_the_environment_is_not_filled_anew() {
    let operator = Operator::with_store("");
    let up = || {
        came(operator.command("portcullis").env_remove("JUJU_ZOOKEEPER").args([
            "up",
            "--listen",
            "127.0.0.1:0",
        ]))
    };
    assert_eq!(Daemon::up(&operator).ends("-TERM"), Some(0));
    let (data, aside) = (operator.home().join("data/portcullis/local"), operator.home().join("aside"));
    fs::rename(&data, &aside).unwrap();
    up().is_refusal(1, "environment 'local' was made in the store at 127.0.0.1:");
    fs::remove_dir_all(&data).unwrap();
    fs::rename(&aside, &data).unwrap();
    let again = Daemon::up(&operator);
    let shown = juju(&operator, &["status"]);
    assert_eq!((shown.code, shown.stderr.as_str()), (0, ""), "{shown:?}");
    assert_eq!(again.ends("-TERM"), Some(0));
}

#[test]
fn a_charm_whose_name_is_no_text_is_looked_for() {
    use std::os::unix::ffi::OsStrExt as _;
    let operator = Operator::with_store("");
    let up = Daemon::up(&operator);
    let name = std::ffi::OsStr::from_bytes(b"charm-\xff");
    came(operator.command("juju").env_remove("JUJU_ZOOKEEPER").arg("deploy").arg(name))
        .is_refusal(1, "metadata.yaml is missing");
    assert_eq!(up.ends("-TERM"), Some(0));
}
