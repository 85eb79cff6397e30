//! Kills `portcullis up` after each step of its start, from the very first one: the next process
//! continues from there, and a charm that is deployed then runs its hooks once. The tests of the
//! agent alone cover its work on units.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::harness::wait_for;
use crate::killed::End;
use crate::operator::{Operator, Output, output_of};
use crate::strace::Stepping;
use crate::world::{DEADLINE, like};

/// The directories of its own files below the home directory: credentials, and the data of the
/// store.
const PLACES: &[&str] = &["/config/portcullis/", "/data/portcullis/"];

#[test]
fn next_up_continues_after_a_kill_at_any_step() {
    let mut done = BTreeSet::new();
    loop {
        let before = done.len();
        let home = Home(Operator::with_store(""));
        home.kill_at_every_step(&mut done);
        home.assert_complete();
        if done.len() == before {
            break;
        }
    }
    // Minimum steps of a start: a store, an environment in it, and the credentials.
    for part in ["local.json", "local-controller.json", "machine-", "/data/portcullis", "store /services"] {
        assert!(done.iter().any(|step| step.contains(part)), "{part}: {done:#?}");
    }
}

/// Returns whether a step can be recognized in another process. Writes of trackers have random
/// names, and tests of their own; a reply of the store does not name the request.
fn is_recognizable(step: &str) -> bool {
    let asked = ["/services", "/machines/", "/units/"];
    step.strip_prefix("store ").is_none_or(|path| asked.iter().any(|start| path.starts_with(start)))
}

struct Home(Operator);

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log:\n{}", fs::read_to_string(self.0.home().join("up.log")).unwrap_or_default());
        }
    }
}

impl Home {
    fn juju(&self, args: &[&str]) -> Output {
        output_of(self.0.command("juju").env_remove("JUJU_ZOOKEEPER").args(args))
    }

    fn up_under(&self, mut other: Command) -> Child {
        let mut up = self.0.command("portcullis");
        // A short tick, so that sessions of killed processes expire soon.
        up.args([
            "--log-level",
            "info",
            "up",
            "--listen",
            "127.0.0.1:0",
            "--tick-ms",
            "50",
            "--firewall",
            "none",
            "--resync",
            "2",
        ]);
        other.arg(up.get_program());
        let log =
            File::options().create(true).append(true).open(self.0.home().join("up.log")).expect("a log");
        let mut other = like(&up, other);
        other.env_remove("JUJU_ZOOKEEPER").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        other.spawn().expect("it starts")
    }

    fn kill_at_every_step(&self, done: &mut BTreeSet<String>) {
        let (over, up) = (AtomicBool::new(false), AtomicI32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _end = End { over: &over, agent: &up };
                self.run_commands();
            });
            while !over.load(Ordering::SeqCst) {
                let mut stepping = Stepping::of_another(|strace| self.up_under(strace), PLACES);
                up.store(stepping.agent(), Ordering::SeqCst);
                while let Some(step) = stepping.next() {
                    if is_recognizable(&step.what) && done.insert(self.of_any_life(&step.what)) {
                        Stepping::kill(&step);
                        break;
                    }
                    Stepping::go_on(&step);
                }
            }
        });
    }

    /// Removes from a step the parts that differ between processes: the home directory, and the
    /// numbers of processes, files and sessions.
    fn of_any_life(&self, step: &str) -> String {
        let step = step.replace(self.0.home().to_str().expect("UTF-8"), "HOME");
        let mut shown = String::new();
        for c in step.chars() {
            if !c.is_ascii_digit() {
                shown.push(c);
            } else if !shown.ends_with('#') {
                shown.push('#');
            }
        }
        shown
    }

    /// Runs the operator's commands, with retries while `up` is down.
    fn run_commands(&self) {
        let charm = self.0.charm("plain", "name: plain\nsummary: A charm\ndescription: For a test.\n");
        let hooks = std::path::Path::new(&charm).join("hooks");
        fs::create_dir(&hooks).unwrap();
        let journal = self.0.home().join("journal");
        fs::write(&journal, "").unwrap();
        fs::set_permissions(&journal, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        for hook in ["install", "start"] {
            let path = hooks.join(hook);
            fs::write(&path, format!("#!/bin/sh\necho {hook} >>{}\n", journal.display())).unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        wait_for("a service", DEADLINE, || {
            let deployed = self.juju(&["deploy", &charm, "plain"]);
            // An earlier attempt may have succeeded without its reply being received.
            (deployed.code == 0 || deployed.stderr.contains("already")).then_some(())
        });
        wait_for("a unit that is started", DEADLINE * 2, || {
            self.juju(&["status"]).stdout.contains("agent-state: started").then_some(())
        });
    }

    fn assert_complete(&self) {
        let ran = fs::read_to_string(self.0.home().join("journal")).unwrap();
        assert_eq!(ran, "install\nstart\n", "{}", fs::read_to_string(self.0.home().join("up.log")).unwrap());
        let names = |place: &str| -> BTreeSet<String> {
            let listed = fs::read_dir(self.0.config(place)).unwrap();
            listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        assert_eq!(names("local-machines"), BTreeSet::from(["machine-0000000000.json".to_owned()]));
        let wanted = [
            "local-authority.json",
            "local-controller.json",
            "local-identity",
            "local-machines",
            "local.json",
        ]
        .map(str::to_owned);
        // `juju deploy` keeps its idempotency key there if `up` was killed before the reply.
        let mut found = names("");
        found.remove("local-unanswered");
        assert_eq!(found, BTreeSet::from(wanted));
    }
}
