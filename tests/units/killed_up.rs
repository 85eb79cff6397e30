//! Everything in one process, killed after each step of its start, from the first one that there ever was: the next one goes on
//! where it was, and what is deployed then runs once. What its agent does with units is tested where the agent is alone.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::harness::wait_for;
use crate::killed::End;
use crate::operator::{Came, Operator, came};
use crate::steps::Stepping;
use crate::world::{DEADLINE, like};

/// What it writes for itself, in its home: who it is to the store, and the store.
const PLACES: &[&str] = &["/config/portcullis/", "/data/portcullis/"];

#[test]
fn an_up_that_is_killed_after_any_step_is_followed_by_one_that_goes_on() {
    let mut done = BTreeSet::new();
    loop {
        let before = done.len();
        let home = Home(Operator::with_store(""));
        home.goes_through(&mut done);
        home.is_as_if_nothing_had_happened();
        if done.len() == before {
            break;
        }
    }
    // What a start takes at least: a store, an environment in it, and who is who.
    for part in ["local.json", "local-controller.json", "machine-", "/data/portcullis", "store /services"] {
        assert!(done.iter().any(|step| step.contains(part)), "{part}: {done:#?}");
    }
}

/// What trackers write has names that are drawn by lot, and tests of its own; an answer says nothing of what is asked.
fn is_told_apart(step: &str) -> bool {
    let asked = ["/services", "/machines/", "/units/"];
    step.strip_prefix("store ").is_none_or(|path| asked.iter().any(|start| path.starts_with(start)))
}

struct Home(Operator);

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("it said:\n{}", fs::read_to_string(self.0.home().join("up.log")).unwrap_or_default());
        }
    }
}

impl Home {
    fn juju(&self, args: &[&str]) -> Came {
        came(self.0.command("juju").env_remove("JUJU_ZOOKEEPER").args(args))
    }

    fn up_under(&self, mut other: Command) -> Child {
        let mut up = self.0.command("portcullis");
        // Sessions of the dead end soon.
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

    fn goes_through(&self, done: &mut BTreeSet<String>) {
        let (over, up) = (AtomicBool::new(false), AtomicI32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _end = End { over: &over, agent: &up };
                self.is_used();
            });
            while !over.load(Ordering::SeqCst) {
                let mut stepping = Stepping::of_another(|strace| self.up_under(strace), PLACES);
                up.store(stepping.agent(), Ordering::SeqCst);
                while let Some(step) = stepping.next() {
                    if is_told_apart(&step.what) && done.insert(self.of_any_life(&step.what)) {
                        Stepping::kill(&step);
                        break;
                    }
                    Stepping::go_on(&step);
                }
            }
        });
    }

    /// A step without what differs from life to life: the home, numbers of processes, files and sessions.
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

    /// As its operator sees it, who tries again when it is down.
    fn is_used(&self) {
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
            // Done by one whose answer was lost.
            (deployed.code == 0 || deployed.stderr.contains("already")).then_some(())
        });
        wait_for("a unit that is started", DEADLINE * 2, || {
            self.juju(&["status"]).stdout.contains("agent-state: started").then_some(())
        });
    }

    fn is_as_if_nothing_had_happened(&self) {
        let ran = fs::read_to_string(self.0.home().join("journal")).unwrap();
        assert_eq!(ran, "install\nstart\n", "{}", fs::read_to_string(self.0.home().join("up.log")).unwrap());
        let names = |place: &str| -> BTreeSet<String> {
            let listed = fs::read_dir(self.0.config(place)).unwrap();
            listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        assert_eq!(names("local-machines"), BTreeSet::from(["machine-0000000000.json".to_owned()]));
        let wanted = ["local-controller.json", "local-machines", "local.json"].map(str::to_owned);
        assert_eq!(names(""), BTreeSet::from(wanted));
    }
}
