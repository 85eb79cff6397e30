//! `juju status --watch`: with a terminal and without, until Ctrl-C.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::controller::{Controller, open_port};
use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wait_for;
use crate::operator::{Operator, fixture_charm};

on_both_stores![status_watch_shows_every_change,];

const DEADLINE: Duration = Duration::from_secs(60);

/// Sequence that clears a terminal.
const WIPED: &str = "\u{1b}[H\u{1b}[2J";

/// A running `juju status --watch` and its output.
struct Watcher {
    child: Child,
    seen: PathBuf,
    between: &'static str,
}

impl Watcher {
    fn without_terminal(operator: &Operator) -> Self {
        let seen = operator.home().join("seen");
        let mut command = operator.command("juju");
        let child = command.args(["status", "--watch"]).stdout(File::create(&seen).unwrap()).spawn().unwrap();
        Self { child, seen, between: "---\n" }
    }

    /// `script` provides a terminal and types its stdin into it.
    fn with_terminal(operator: &Operator) -> Self {
        let seen = operator.home().join("typescript");
        let juju = operator.command("juju");
        let typed =
            format!("exec {} status --watch --format tabular", Path::new(juju.get_program()).display());
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &typed]).arg(&seen).env_clear();
        for (name, value) in juju.get_envs() {
            command.env(name, value.unwrap());
        }
        command.env("SHELL", "/bin/sh").env("TERM", "xterm").current_dir(operator.home());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        Self { child, seen, between: WIPED }
    }

    /// Returns the number of screens and the last one.
    fn picture(&self) -> (usize, String) {
        let seen = fs::read_to_string(&self.seen).unwrap_or_default();
        let pictures: Vec<&str> = seen.split(self.between).skip(1).collect();
        (pictures.len(), pictures.last().copied().unwrap_or_default().to_owned())
    }

    #[track_caller]
    fn wait_for_text(&self, text: &str, there: bool) -> usize {
        wait_for(&format!("{text} in {:?}", self.picture()), DEADLINE, || {
            let (count, picture) = self.picture();
            (count > 0 && picture.contains(text) == there).then_some(count)
        })
    }

    #[track_caller]
    fn ends_well(mut self) {
        let ended = wait_for("an end", DEADLINE, || self.child.try_wait().unwrap());
        assert_eq!(ended.code(), Some(0), "{:?}", self.picture());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // The process has ended already, unless the test failed.
        let _ = (self.child.kill(), self.child.wait());
    }
}

fn status_watch_shows_every_change(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine", "--instance-id", "i-1"]);
    operator.does(&["deploy", &fixture_charm("wordpress"), "--to", "0"]);
    open_port(&operator, site, ("wordpress/0", 0), "80");
    let plain = Watcher::without_terminal(&operator);
    let mut terminal = Watcher::with_terminal(&operator);
    plain.wait_for_text("wordpress/0", true);
    terminal.wait_for_text("wordpress/0", true);
    let before = plain.wait_for_text("exposed: true", false);
    operator.does(&["expose", "wordpress"]);
    let after = plain.wait_for_text("firewall: pending", true);
    assert!(after > before && after <= before + 2, "{before} pictures, then {after}");
    terminal.wait_for_text("80/tcp", true);
    // A controller's report is a change, too.
    let controller = Controller::start(&operator, "controller");
    plain.wait_for_text("firewall: pending", false);
    // Without a change, no screen is printed.
    let (calm, _) = plain.picture();
    assert_eq!(operator.status()["services"]["wordpress"]["exposed"], true);
    assert_eq!(plain.picture().0, calm);
    operator.does(&["unexpose", "wordpress"]);
    plain.wait_for_text("exposed: true", false);
    terminal.wait_for_text("80/tcp", false);
    drop(controller);
    // Ctrl-C from the terminal, and SIGINT from another process.
    terminal.child.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    terminal.ends_well();
    let sent = Command::new("kill").args(["-INT", &plain.child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    plain.ends_well();
}
