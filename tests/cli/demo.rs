//! `portcullis demo`: with hook tools that cargo builds, with real nftables in network namespaces
//! of its own, with and without privileges, and as a dry run where the kernel allows no namespaces.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::harness::{binary, golden};
use crate::operator::{Output, output_of};

const TOOLS: [&str; 3] = ["open-port", "close-port", "opened-ports"];
const NOBODY: u32 = 65_534;

/// A fresh installation: the programs in one directory, and an empty one for temporary files.
struct Newcomer {
    place: TempDir,
}

impl Newcomer {
    fn new(programs: &[&str]) -> Self {
        let place = tempfile::tempdir().unwrap();
        for directory in ["bin", "tmp"] {
            let directory = place.path().join(directory);
            fs::create_dir(&directory).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let newcomer = Self { place };
        for program in programs {
            fs::copy(binary(program), newcomer.bin().join(program)).unwrap();
        }
        newcomer
    }

    fn with_everything() -> Self {
        Self::new(&["portcullis", "hirte-proxy", "open-port", "close-port", "opened-ports"])
    }

    fn bin(&self) -> PathBuf {
        self.place.path().join("bin")
    }

    fn tmp(&self) -> PathBuf {
        self.place.path().join("tmp")
    }

    /// An executable script beside the programs.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.bin().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// The demo with stdout and stderr combined, as on a terminal, and with no other environment
    /// variables.
    fn demo(&self, prefix: &[&str]) -> Command {
        let mut words = prefix.to_vec();
        words.extend(["/bin/sh", "-c", "exec \"$0\" demo 2>&1"]);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(self.bin().join("portcullis")).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap());
        command.env("HOME", self.place.path()).env("TMPDIR", self.tmp());
        command.env("PORTCULLIS_UNIT_USERS", self.place.path().join("users.json"));
        command.stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn left_nothing(&self) {
        let left: Vec<_> =
            fs::read_dir(self.tmp()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "the demo left something behind: {left:?}");
    }
}

/// Asserts that the text contains all `parts` in this order.
#[track_caller]
fn in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else {
            panic!("{part:?} is missing, or not there, in {text}")
        };
        rest = after;
    }
}

#[track_caller]
fn shows_all_steps(shown: &Output) {
    assert_eq!(shown.code, 0, "{}", shown.stdout);
    in_order(
        &shown.stdout,
        &[
            "$ juju deploy ",
            "agent-state: started",
            "$ curl http://10.77.0.1:",
            "curl: (7) ",
            "$ juju expose hello\n",
            "$ curl http://10.77.0.1:",
            "Hello world, from hello/0.\n",
            "$ juju status hello\n",
            "exposed: true",
            "/tcp\n",
            "$ juju unexpose hello\n",
            "$ curl http://10.77.0.1:",
            "curl: (7) ",
            "$ juju status --format tabular\n",
            "# Done.",
            "$ juju destroy-service hello\n",
        ],
    );
    for bad in ["problem:", "WARN", "ERROR", "pending", "dry run", "dry-run"] {
        assert!(!shown.stdout.contains(bad), "{bad:?} in {}", shown.stdout);
    }
}

#[test]
fn the_demo_shows_a_port_refused_then_open_then_refused() {
    let newcomer = Newcomer::with_everything();
    let shown = output_of(&mut newcomer.demo(&["env"]));
    shows_all_steps(&shown);
    // A unit on each of two nodes is started, watched and stopped.
    in_order(
        &shown.stdout,
        &[
            "# Two nodes,",
            "$ portcullis manager ",
            "listening on 127.0.0.1:",
            "$ portcullis agent --name n1 ",
            "$ portcullis agent --name n2 ",
            " list\n",
            " start n1 hello.service\n",
            " start n2 hello.service\n",
            " monitor * hello.service\n",
            " stop n1 hello.service\n",
            " stop n2 hello.service\n",
            " start n1 need-db.service\n",
            " status n2 db.service\n",
            "active",
            " deps\n",
            "hirte-proxy@n2_db.service  n2",
            " stop n1 need-db.service\n",
            "# Done.",
        ],
    );
    let (_, watched) = shown.stdout.split_once(" monitor * hello.service\n").unwrap();
    for node in ["n1", "n2"] {
        let is_change = |line: &&str| line.contains(&format!("{node} ")) && line.contains("inactive");
        assert!(watched.lines().any(|line| is_change(&line)), "{watched}");
    }
    says_what_the_tutorial_says(&shown.stdout.replace(newcomer.tmp().to_str().unwrap(), "/tmp"));
    newcomer.left_nothing();
}

#[test]
fn the_demo_needs_no_privileges() {
    let newcomer = Newcomer::with_everything();
    chown(newcomer.tmp(), Some(NOBODY), Some(NOBODY)).unwrap();
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let shown = output_of(&mut newcomer.demo(&nobody));
    shows_all_steps(&shown);
    // This user may create no control groups.
    let lines = shown.stdout.lines().filter(|line| line.starts_with("# Nodes with a systemd of their own"));
    assert_eq!(lines.count(), 1, "{}", shown.stdout);
    newcomer.left_nothing();
}

#[test]
fn without_namespaces_the_demo_is_a_dry_run() {
    let newcomer = Newcomer::with_everything();
    newcomer.script("unshare", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1");
    let path = format!("{}:{}", newcomer.bin().display(), std::env::var("PATH").unwrap());
    let shown = output_of(newcomer.demo(&["env"]).env("PATH", path));
    assert_eq!(shown.code, 0, "{}", shown.stdout);
    let reason = "no private network namespace (unshare: unshare failed: Operation not permitted)";
    let lines: Vec<&str> = shown.stdout.lines().filter(|line| line.contains(reason)).collect();
    assert_eq!(lines.len(), 1, "{}", shown.stdout);
    in_order(
        &shown.stdout,
        &[
            reason,
            "$ juju expose hello\n",
            "Hello world, from hello/0.\n",
            "$ juju unexpose hello\n",
            "\n# Done.",
        ],
    );
    assert!(!shown.stdout.contains("WARN"), "{}", shown.stdout);
    newcomer.left_nothing();
}

#[test]
fn cargo_builds_the_hook_tools_for_the_demo() {
    let newcomer = Newcomer::new(&["portcullis"]);
    let refused = output_of(&mut newcomer.demo(&["env"]));
    assert_eq!(refused.code, 1, "{}", refused.stdout);
    let text = "error: open-port, close-port and opened-ports are not in ";
    assert!(refused.stdout.starts_with(text), "{}", refused.stdout);
    assert!(
        refused.stdout.contains("\nhint: `cargo build --no-default-features --workspace`"),
        "{}",
        refused.stdout
    );

    golden::placeholder(newcomer.place.path().to_str().unwrap(), "HOME");
    golden::record("portcullis demo", &refused.stdout, "", refused.code);
    golden::refusals("demo");

    // A script that replaces cargo and copies the tools.
    let copies: Vec<String> = TOOLS
        .iter()
        .map(|tool| format!("cp {} {}", binary(tool).display(), newcomer.bin().display()))
        .collect();
    let noted = newcomer.place.path().join("arguments");
    let cargo =
        newcomer.script("cargo", &format!("echo \"$@\" >>{}\n{}", noted.display(), copies.join("\n")));
    let repository = env!("CARGO_MANIFEST_DIR");
    let shown = output_of(newcomer.demo(&["env"]).env("CARGO", cargo).env("CARGO_MANIFEST_DIR", repository));
    shows_all_steps(&shown);
    let arguments = fs::read_to_string(noted).unwrap();
    let end = format!(
        "--manifest-path {repository}/Cargo.toml --profile bin --target-dir {}\n",
        newcomer.place.path().display()
    );
    let helper = "--package portcullis --no-default-features --features fleet --bin hirte-proxy";
    let expected = format!("build --package portcullis-hooks --bins {end}build {helper} {end}");
    assert_eq!(arguments, expected, "the profile is the directory's name");
}

#[test]
fn cargo_demo_shows_compile_progress() {
    let config = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/.cargo/config.toml")).unwrap();
    let alias = config.lines().find(|line| line.starts_with("demo = ")).expect("the alias");
    assert_eq!(alias, "demo = \"run --no-default-features --features fleet --bin portcullis -- demo\"");
}

/// Each line of the transcript in the tutorial is one of the demo's, in the same order. Numbers of
/// four digits and more differ from run to run.
fn says_what_the_tutorial_says(told: &str) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/tutorials/one-machine.md");
    let page = fs::read_to_string(page).unwrap();
    let screen = page.split("somewhat shortened:\n").nth(1).expect("a transcript");
    let screen =
        screen.split("```text\n").nth(1).expect("its text").lines().take_while(|line| *line != "```");
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
            Some((start, _)) => told.any(|printed| printed.starts_with(start)),
            None => told.any(|printed| printed == line),
        };
        assert!(found, "the demo does not say, or not there: {line}");
    }
    assert!(lines > 10, "{lines} lines of a transcript");
}

#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    let newcomer = Newcomer::with_everything();
    for (signal, name) in [("-INT", "SIGINT"), ("-TERM", "SIGTERM")] {
        let mut demo = Command::new(newcomer.bin().join("portcullis"))
            .arg("demo")
            .env_remove("CARGO")
            .env("PORTCULLIS_UNIT_USERS", newcomer.place.path().join("users.json"))
            .env("TMPDIR", newcomer.tmp())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
        let store = told.find_map(|line| line.strip_prefix("listening on ").map(str::to_owned)).unwrap();
        // While the unit's hooks run.
        told.find(|line| line.starts_with("# The machine runs")).unwrap();
        let sent = Command::new("kill").args([signal, &demo.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let printed: Vec<String> = told.collect();
        let output = demo.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let end = format!("error: the demo was interrupted by {name}\n");
        assert!(stderr.ends_with(&end), "{stderr} {printed:?}");
        assert_eq!(output.status.code(), Some(1));
        assert!(printed.iter().any(|line| line == "$ juju destroy-service hello"), "{printed:?}");
        newcomer.left_nothing();
        assert!(TcpStream::connect(store).is_err(), "the store is still there");
        let place = newcomer.tmp().into_os_string().into_encoded_bytes();
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
