//! Kills `portcullis join` after each of its steps: the same command completes the work, and the
//! token works for no other host afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::harness::scenario::Site;
use crate::harness::{Kind, Options, Store, wait_for};
use crate::operator::{Operator, Output, output_of};
use crate::strace::Stepping;
use crate::world::{DEADLINE, like};

/// The directories of its own files below the home directory.
const PLACES: &[&str] = &["/config/portcullis/", "/data/portcullis/"];

/// Issues certificates; killed at the end.
struct Controller(Child);

impl Drop for Controller {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

#[test]
fn next_join_continues_after_a_kill_at_any_step() {
    let store = Store::start(Kind::Keeper, Options::default());
    let site = Site { kind: Kind::Keeper, addr: store.addr(), chroot: String::new() };
    let operator = Operator::bootstrapped(&site);
    let mut controller = operator.command("portcullis");
    controller.args(["controller", "--provider", "memory"]).stdout(Stdio::null()).stderr(Stdio::null());
    let _controller = Controller(controller.spawn().expect("it starts"));
    let mut done = BTreeSet::new();
    for number in 0.. {
        let added = operator.does(&["add-machine"]);
        let token = added.stdout.trim_end().strip_prefix("portcullis join ").expect("a token").to_owned();
        let host = Operator::at(&site);
        let killed = kill_at_a_new_step(&host, &token, &mut done);
        let again = join(&host, &token);
        let is_finished = again.code == 0 || again.stderr.contains("this host is machine");
        assert!(is_finished, "{killed:?}: {again:?}");
        let files = fs::read_dir(host.config("local-machines")).unwrap();
        let names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(names, [format!("machine-{number:010}.json")], "{killed:?}");
        let certificate = format!("data/portcullis/local/identity/machine-{number}.pem");
        assert!(again.code != 0 || host.home().join(certificate).exists(), "{killed:?}: {again:?}");
        let other = join(&Operator::at(&site), &token);
        assert!(other.stderr.contains("was used before"), "{killed:?}: {other:?}");
        if killed.is_none() {
            break;
        }
    }
    for part in
        ["write HOME", "rename HOME/config/portcullis/local#machines/machine#.joining", "store /machines/"]
    {
        assert!(done.iter().any(|step| step.contains(part)), "{part}: {done:#?}");
    }
}

fn join(host: &Operator, token: &str) -> Output {
    output_of(host.command("portcullis").args(["join", token]))
}

/// Joins, and kills the process after the first step that is not in `done`. Returns that step.
fn kill_at_a_new_step(host: &Operator, token: &str, done: &mut BTreeSet<String>) -> Option<String> {
    let start = |mut strace: Command| {
        let mut join = host.command("portcullis");
        join.args(["join", token]);
        strace.arg(join.get_program());
        let mut under = like(&join, strace);
        under.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        under.spawn().expect("it starts")
    };
    let mut stepping = Stepping::of_another(start, PLACES);
    while let Some(step) = stepping.next() {
        let what = of_any_host(host, &step.what);
        if done.insert(what.clone()) {
            Stepping::kill(&step);
            let process = format!("/proc/{}", stepping.agent());
            drop(stepping);
            // The next process removes unfinished files of processes that do not exist.
            wait_for("an end of the process", DEADLINE, || (!Path::new(&process).exists()).then_some(()));
            return Some(what);
        }
        Stepping::go_on(&step);
    }
    None
}

/// Removes from a step the parts that differ between hosts: the home directory and numbers.
fn of_any_host(host: &Operator, step: &str) -> String {
    let step = step.replace(host.home().to_str().expect("UTF-8"), "HOME");
    let parts = step.split(|c: char| c.is_ascii_digit() || c == '-').filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("#")
}
