//! The users that run hooks: the defaults of `portcullis up`, with and without root. Needs root.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::daemon::{DEADLINE, Daemon, juju};
use crate::harness::{golden, wait_for};
use crate::operator::{Operator, output_of};

/// UID of an unprivileged user.
const NOBODY: u32 = 65_534;

/// Creates a charm whose start hook prints and fails, so that status shows the output.
fn charm(operator: &Operator, name: &str, start: &str) -> String {
    let metadata = format!("name: {name}\nsummary: s\ndescription: d\n");
    let charm = operator.charm(name, &metadata);
    let hook = Path::new(&charm).join("hooks/start");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    fs::write(&hook, format!("#!/bin/sh\n{start}\nexit 1\n")).unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    charm
}

/// Deploys two units and returns the output of the second unit's hook: its user, and the results of
/// its attempts to access the first unit.
fn stolen(operator: &Operator) -> Vec<String> {
    let tries = "id -u; id -G
        other=$(dirname \"$(dirname \"$JUJU_CREDENTIALS\")\")/unit-0000000000
        for file in credentials.json charm/metadata.yaml; do
            cat $other/$file >/dev/null && echo \"has $file\"
        done
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

/// Destroys the services and waits until no process is left.
fn cleared(operator: &Operator, daemon: Daemon) {
    for service in ["victim", "thief"] {
        assert_eq!(juju(operator, &["destroy-service", service]).code, 0);
    }
    let left = fs::read_to_string(operator.home().join("left")).unwrap();
    wait_for("an end of the victim's process", DEADLINE, || {
        (!Path::new("/proc").join(left.trim()).exists()).then_some(())
    });
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn units_of_root_have_separate_users_by_default() {
    let operator = Operator::with_store("");
    let daemon = Daemon::start(operator.command("portcullis").args(["up", "--listen", "127.0.0.1:0"]));
    let printed = stolen(&operator);
    let user: u32 = printed[0].parse().unwrap();
    assert!(user > 1_879_048_192 && printed[1] == printed[0], "a user and a group of its own: {printed:?}");
    assert!(!printed.iter().any(|line| line.starts_with("has ")), "{printed:?}");
    let refused = |why: &str| printed.iter().filter(|line| line.contains(why)).count();
    assert_eq!((refused("Permission denied"), refused("not permitted")), (3, 1), "{printed:?}");
    cleared(&operator, daemon);

    // The positive control: with --hook-user root, hooks can access everything.
    let operator = Operator::with_store("");
    let root = ["up", "--listen", "127.0.0.1:0", "--hook-user", "root"];
    let daemon = Daemon::start(operator.command("portcullis").args(root));
    let printed = stolen(&operator);
    let all =
        ["0", "0", "has credentials.json", "has charm/metadata.yaml", "has its hooks", "has its processes"];
    assert_eq!(printed, all);
    cleared(&operator, daemon);
}

/// Installs programs in `directory`, since other users may not reach the build directory.
fn bring(operator: &Operator, directory: &Path, programs: &[&str]) {
    let ours = operator.command("portcullis");
    let built = Path::new(ours.get_program()).parent().unwrap();
    fs::create_dir(directory).unwrap();
    for program in programs {
        let (from, to) = (built.join(program), directory.join(program));
        // Across file systems, a copy replaces the link.
        fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop)).unwrap();
    }
}

#[test]
fn an_agent_without_root_warns_that_units_share_a_user() {
    let operator = Operator::with_store("");
    for place in [operator.home(), &operator.home().join("data")] {
        chown(place, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let programs = operator.home().join("programs");
    bring(&operator, &programs, &["portcullis", "juju", "open-port", "close-port", "opened-ports"]);
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
    let log = operator.home().join("printed");
    let mut up = as_nobody("portcullis");
    up.args(["up", "--listen", "127.0.0.1:0"]).stderr(File::create(&log).unwrap());
    let daemon = Daemon::start(&mut up);
    let deployed = output_of(as_nobody("juju").args(["deploy", &charm(&operator, "who", "id -u")]));
    assert_eq!(deployed.code, 0, "{deployed:?}");
    // As the same user: root would refuse files that belong to another user.
    let shown = || {
        let status = output_of(as_nobody("juju").args(["status", "--format", "json"])).stdout;
        let status: Value = serde_json::from_str(&status).ok()?;
        let unit = status["services"]["who"]["units"]["who/0"].clone();
        (unit["agent-state"] == "start-error").then(|| unit["hook-output"].clone())
    };
    assert_eq!(wait_for("a hook", DEADLINE, shown), serde_json::json!(["65534"]));
    let printed = fs::read_to_string(&log).unwrap();
    assert!(printed.contains("can access each other's files: only root can"), "{printed}");
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn an_unreachable_units_directory_is_refused_at_start() {
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
    let why =
        format!("they have no search permission in {}; --hook-user root runs hooks as root", shut.display());
    output_of(&mut up(&[])).is_refusal(1, &why);
    golden::refusals("up_closed_units_dir");
    // The positive control: root can search every directory.
    let daemon = Daemon::start(&mut up(&["--hook-user", "root"]));
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

/// The programs are in a directory that only root can search, for example root's home.
#[test]
fn unreachable_hook_tools_are_copied() {
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
    let printed = wait_for("a hook", DEADLINE, || failed(&operator, "opening"));
    assert!(printed[0].contains("Permission denied"), "the control: {printed:?}");
    assert_eq!(printed[1..], ["80/tcp"]);
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn hooks_keep_the_original_open_file_limit_of_the_agent() {
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
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

/// Files of units that ran as root are in a directory that other users cannot reach; the agent logs
/// a warning.
#[test]
fn units_that_ran_as_root_are_reported_after_a_change_of_user() {
    let operator = Operator::with_store("");
    let log = operator.home().join("printed");
    let up = |more: &[&str]| {
        let mut up = operator.command("portcullis");
        up.args(["up", "--listen", "127.0.0.1:0"]).args(more).stderr(File::create(&log).unwrap());
        Daemon::start(&mut up)
    };
    let place = operator.home().join("data/portcullis/local/machine-0000000000");
    let warnings = || {
        let printed = fs::read_to_string(&log).unwrap();
        let warned = |line: &&str| line.contains("--hook-user root continues with them");
        let lines: Vec<_> = printed.lines().filter(warned).map(str::to_owned).collect();
        assert!(
            lines.iter().all(|line| line.contains(&format!("directory={} units=1", place.display()))),
            "{printed}"
        );
        lines.len()
    };
    let daemon = up(&["--hook-user", "root"]);
    let deployed = juju(&operator, &["deploy", &charm(&operator, "old", "id -u")]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    assert_eq!(wait_for("a hook", DEADLINE, || failed(&operator, "old")), ["0"]);
    assert_eq!(warnings(), 0, "there is no other user");
    assert_eq!(daemon.stop("-TERM"), Some(0));
    for (more, count) in [(&["--hook-user", "root"][..], 0), (&[], 1)] {
        let daemon = up(more);
        assert_eq!(warnings(), count, "{more:?}");
        assert_eq!(daemon.stop("-TERM"), Some(0));
    }
}
