//! Who runs hooks if nothing is said about it: what a person gets who just starts `portcullis up`. Needs root, to be somebody
//! else as well.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::daemon::{DEADLINE, Daemon, juju};
use crate::harness::wait_for;
use crate::operator::{Operator, came};

/// Somebody who is not root.
const NOBODY: u32 = 65_534;

/// A charm that fails with what its start hook prints, so that status shows it.
fn charm(operator: &Operator, name: &str, start: &str) -> String {
    let metadata = format!("name: {name}\nsummary: s\ndescription: d\n");
    let charm = operator.charm(name, &metadata);
    let hook = Path::new(&charm).join("hooks/start");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    fs::write(&hook, format!("#!/bin/sh\n{start}\nexit 1\n")).unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    charm
}

/// Deploys a victim and a thief, and gives what the thief's hook printed: who it is, and what came of its tries.
fn stolen(operator: &Operator) -> Vec<String> {
    let tries = "id -u; id -G
        other=$(dirname \"$(dirname \"$JUJU_CREDENTIALS\")\")/unit-0000000000
        for file in credentials.json charm/metadata.yaml; do cat $other/$file >/dev/null && echo \"has $file\"; done
        touch $other/charm/hooks/stop && echo 'has its hooks'
        kill -0 $(cat $other/charm/left 2>/dev/null || cat \"$LEFT\") && echo 'has its processes'";
    let left = operator.home().join("left");
    fs::write(&left, "").unwrap();
    fs::set_permissions(&left, fs::Permissions::from_mode(0o666)).unwrap();
    let stay = format!("sleep 1000 >/dev/null 2>&1 & echo $! >{}", left.display());
    let tries = tries.replace("$LEFT", left.to_str().unwrap());
    for (name, start) in [("victim", &stay), ("thief", &tries)] {
        let deployed = juju(operator, &["deploy", &charm(operator, name, start)]);
        assert_eq!(deployed.code, 0, "{deployed:?}");
        wait_for("a hook that failed", DEADLINE, || failed(operator, name));
    }
    failed(operator, "thief").unwrap()
}

fn failed(operator: &Operator, service: &str) -> Option<Vec<String>> {
    let status = juju(operator, &["status", "--format", "json"]).stdout;
    let status: Value = serde_json::from_str(&status).ok()?;
    let unit = &status["services"][service]["units"][format!("{service}/0")];
    (unit["agent-state"] == "start-error").then_some(())?;
    let lines = unit["hook-output"].as_array().cloned().unwrap_or_default();
    Some(lines.iter().map(|line| line.as_str().unwrap().to_owned()).collect())
}

/// Removes what was deployed, so that no process is left.
fn cleared(operator: &Operator, daemon: Daemon) {
    for service in ["victim", "thief"] {
        assert_eq!(juju(operator, &["destroy-service", service]).code, 0);
    }
    let left = fs::read_to_string(operator.home().join("left")).unwrap();
    wait_for("an end of the victim's process", DEADLINE, || {
        (!Path::new("/proc").join(left.trim()).exists()).then_some(())
    });
    assert_eq!(daemon.ends("-TERM"), Some(0));
}

#[test]
fn roots_units_are_kept_apart_unless_root_says_otherwise() {
    let operator = Operator::with_store("");
    let daemon = Daemon::start(operator.command("portcullis").args(["up", "--listen", "127.0.0.1:0"]));
    let said = stolen(&operator);
    let user: u32 = said[0].parse().unwrap();
    assert!(user > 1_879_048_192 && said[1] == said[0], "a user and a group of its own: {said:?}");
    assert!(!said.iter().any(|line| line.starts_with("has ")), "{said:?}");
    let refused = |why: &str| said.iter().filter(|line| line.contains(why)).count();
    assert_eq!((refused("Permission denied"), refused("not permitted")), (3, 1), "{said:?}");
    cleared(&operator, daemon);

    // The control, and the way back: hooks that are root's, as it was said, get at everything.
    let operator = Operator::with_store("");
    let root = ["up", "--listen", "127.0.0.1:0", "--hook-user", "root"];
    let daemon = Daemon::start(operator.command("portcullis").args(root));
    let said = stolen(&operator);
    let all =
        ["0", "0", "has credentials.json", "has charm/metadata.yaml", "has its hooks", "has its processes"];
    assert_eq!(said, all);
    cleared(&operator, daemon);
}

/// Programs as they would be in `directory`, whoever may get to where they were built.
fn bring(operator: &Operator, directory: &Path, programs: &[&str]) {
    let ours = operator.command("portcullis");
    let built = Path::new(ours.get_program()).parent().unwrap();
    fs::create_dir(directory).unwrap();
    for program in programs {
        let (from, to) = (built.join(program), directory.join(program));
        // Another file system takes a copy.
        fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop)).unwrap();
    }
}

#[test]
fn who_is_not_root_is_told_that_units_share_a_user() {
    let operator = Operator::with_store("");
    for place in [operator.home(), &operator.home().join("data")] {
        chown(place, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let programs = operator.home().join("programs");
    bring(&operator, &programs, &["portcullis", "juju"]);
    let as_nobody = |program: &str| {
        let theirs = operator.command(program);
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
            .arg(programs.join(program));
        command.env_clear().envs(theirs.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env_remove("JUJU_ZOOKEEPER").current_dir(operator.home());
        command
    };
    let log = operator.home().join("said");
    let mut up = as_nobody("portcullis");
    up.args(["up", "--listen", "127.0.0.1:0"]).stderr(File::create(&log).unwrap());
    let daemon = Daemon::start(&mut up);
    let deployed = came(as_nobody("juju").args(["deploy", &charm(&operator, "who", "id -u")]));
    assert_eq!(deployed.code, 0, "{deployed:?}");
    // Root reads what is theirs, but is told that it is not root's own.
    let shown = || {
        let status = came(as_nobody("juju").args(["status", "--format", "json"])).stdout;
        let status: Value = serde_json::from_str(&status).ok()?;
        let unit = status["services"]["who"]["units"]["who/0"].clone();
        (unit["agent-state"] == "start-error").then(|| unit["hook-output"].clone())
    };
    assert_eq!(wait_for("a hook", DEADLINE, shown), serde_json::json!(["65534"]));
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.contains("can get at each other's files: only root can"), "{said}");
    assert_eq!(daemon.ends("-TERM"), Some(0));
}

#[test]
fn a_way_that_is_closed_is_named_before_anything_runs() {
    let operator = Operator::with_store("");
    let shut = operator.home().join("shut");
    fs::create_dir(&shut).unwrap();
    fs::set_permissions(&shut, fs::Permissions::from_mode(0o700)).unwrap();
    let up = |more: &[&str]| {
        let mut command = operator.command("portcullis");
        command.env_remove("JUJU_ZOOKEEPER").args([
            "up",
            "--listen",
            "127.0.0.1:0",
            "--units-dir",
            "shut/units",
        ]);
        command.args(more);
        command
    };
    let why = format!("{} is closed to them; --hook-user root runs hooks as root", shut.display());
    came(&mut up(&[])).is_refusal(1, &why);
    // The control: who passes anyway is not kept out.
    let daemon = Daemon::start(&mut up(&["--hook-user", "root"]));
    assert_eq!(daemon.ends("-TERM"), Some(0));
}

/// As where root builds in its own home.
#[test]
fn tools_that_are_out_of_reach_are_brought() {
    let operator = Operator::with_store("");
    let shut = operator.home().join("shut");
    bring(&operator, &shut, &["portcullis", "open-port", "close-port", "opened-ports"]);
    fs::set_permissions(&shut, fs::Permissions::from_mode(0o700)).unwrap();
    let ours = operator.command("portcullis");
    let mut up = Command::new(shut.join("portcullis"));
    up.args(["up", "--listen", "127.0.0.1:0"]);
    up.env_clear().envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let daemon = Daemon::start(&mut up);
    let hook = format!("cat {0}/open-port; open-port 80/tcp && opened-ports", shut.display());
    let deployed = juju(&operator, &["deploy", &charm(&operator, "opening", &hook)]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    let said = wait_for("a hook", DEADLINE, || failed(&operator, "opening"));
    assert!(said[0].contains("Permission denied"), "the control: {said:?}");
    assert_eq!(said[1..], ["80/tcp"]);
    assert_eq!(daemon.ends("-TERM"), Some(0));
}

#[test]
fn hooks_have_the_limit_of_files_that_the_agent_was_started_with() {
    let operator = Operator::with_store("");
    let ours = operator.command("portcullis");
    let mut up = Command::new("prlimit");
    up.args(["--nofile=300:4096", "--"]).arg(ours.get_program()).args(["up", "--listen", "127.0.0.1:0"]);
    up.env_clear().envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let daemon = Daemon::start(&mut up);
    let raised = fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let raised = raised.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(raised.split_whitespace().nth(3), Some("4096"), "the control: its own is raised");
    let deployed = juju(&operator, &["deploy", &charm(&operator, "asking", "ulimit -Sn")]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    assert_eq!(wait_for("a hook", DEADLINE, || failed(&operator, "asking")), ["300"]);
    assert_eq!(daemon.ends("-TERM"), Some(0));
}

/// Where root's hooks were root, files of units are where hooks of others do not get to: nobody is left to wonder.
#[test]
fn units_that_were_roots_are_not_left_behind_in_silence() {
    let operator = Operator::with_store("");
    let log = operator.home().join("said");
    let up = |more: &[&str]| {
        let mut up = operator.command("portcullis");
        up.args(["up", "--listen", "127.0.0.1:0"]).args(more).stderr(File::create(&log).unwrap());
        Daemon::start(&mut up)
    };
    let place = operator.home().join("data/portcullis/local/machine-0000000000");
    let warnings = || {
        let said = fs::read_to_string(&log).unwrap();
        let warned = |line: &&str| line.contains("--hook-user root goes on with them");
        let lines: Vec<_> = said.lines().filter(warned).map(str::to_owned).collect();
        assert!(
            lines.iter().all(|line| line.contains(&format!("directory={} units=1", place.display()))),
            "{said}"
        );
        lines.len()
    };
    let daemon = up(&["--hook-user", "root"]);
    let deployed = juju(&operator, &["deploy", &charm(&operator, "old", "id -u")]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    assert_eq!(wait_for("a hook", DEADLINE, || failed(&operator, "old")), ["0"]);
    assert_eq!(warnings(), 0, "there is nobody else");
    assert_eq!(daemon.ends("-TERM"), Some(0));
    for (more, count) in [(&["--hook-user", "root"][..], 0), (&[], 1)] {
        let daemon = up(more);
        assert_eq!(warnings(), count, "{more:?}");
        assert_eq!(daemon.ends("-TERM"), Some(0));
    }
}
