//! Third-party clients, kazoo (Python) and zkCli.sh (Java), against ZooKeeper and against the
//! keeper. Their results must be the same. `tests/run` installs both.

mod harness;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harness::{Kind, Options, Store};

/// The digest of `super:test`, the super user of kazoo's tests.
const SUPER: &str = "super:D/InIHSb7yEEbrWz8b9l71RjZJU=";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn python() -> PathBuf {
    let python = root().join(".venv/bin/python");
    assert!(python.exists(), "{} is missing: tests/run creates it", python.display());
    python
}

fn store(kind: Kind) -> Store {
    Store::start(kind, Options { super_digest: Some(SUPER.to_owned()), ..Options::default() })
}

/// Our own tests written with kazoo.
fn kazoo(kind: Kind) {
    let store = store(kind);
    let output = Command::new(python())
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", "tests/kazoo/own"])
        .env("STORE", store.addr().to_string())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(root())
        .output()
        .expect("pytest");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{kind:?}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(" passed"), "no test ran:\n{text}");
    assert!(!text.contains("skipped"), "a test was skipped:\n{text}");
}

#[test]
fn kazoo_works_with_zookeeper() {
    kazoo(Kind::ZooKeeper);
}

#[test]
fn kazoo_works_with_the_keeper() {
    kazoo(Kind::Keeper);
}

/// Runs kazoo's own test suite. The tests that pass on ZooKeeper were recorded with
/// `own_suite.py zookeeper`. Its timeouts are fixed, and too short for a machine with other work.
#[test]
fn alone_kazoos_own_suite_passes_on_the_keeper() {
    let output = Command::new(python())
        .arg(root().join("tests/kazoo/own_suite.py"))
        .arg("keeper")
        .arg(harness::binary("portcullis"))
        .arg(root().join("tests/kazoo/passes_on_zookeeper.txt"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("own_suite.py");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}\n{out}");
}

/// Replaces values that differ between runs: zxids, sessions, dates.
fn steady(line: &str) -> String {
    match line.split_once(" = ") {
        Some((key, _)) if key.ends_with("Zxid") => format!("{key} = ZXID"),
        Some((key, _)) if key.ends_with("time") => format!("{key} = TIME"),
        Some(("ephemeralOwner", owner)) if owner != "0x0" => "ephemeralOwner = SESSION".to_owned(),
        _ => line.to_owned(),
    }
}

/// Runs a session of Debian's zkCli.sh; returns stdout and stderr without values that differ
/// between runs.
fn zkcli(kind: Kind) -> [String; 2] {
    let store = store(kind);
    let script = std::fs::File::open(root().join("fixtures/zkcli/session.txt")).expect("the script");
    let output = Command::new("/usr/share/zookeeper/bin/zkCli.sh")
        .args(["-server", &store.addr().to_string()])
        .stdin(Stdio::from(script))
        .output()
        .expect("zkCli.sh, from Debian's package zookeeper");
    assert!(output.status.success(), "{output:?}");
    [output.stdout, output.stderr].map(|bytes| {
        let text = String::from_utf8(bytes).expect("UTF-8");
        // Events are printed by another thread, at any time.
        let noise = ["SLF4J", "Connecting to", "WATCHER::", "WatchedEvent"];
        let lines =
            text.lines().filter(|line| !line.is_empty() && !noise.iter().any(|word| line.contains(word)));
        lines.map(|line| steady(line) + "\n").collect()
    })
}

fn zkcli_as_recorded(kind: Kind) {
    for (name, seen) in ["stdout.txt", "stderr.txt"].into_iter().zip(zkcli(kind)) {
        let path = root().join("fixtures/zkcli").join(name);
        let recorded = std::fs::read_to_string(&path).expect("the recorded session");
        assert!(seen == recorded, "{kind:?}: {name} is not as recorded:\n{seen}");
    }
}

#[test]
fn zkcli_works_with_zookeeper() {
    zkcli_as_recorded(Kind::ZooKeeper);
}

#[test]
fn zkcli_works_with_the_keeper() {
    zkcli_as_recorded(Kind::Keeper);
}
