//! Files and directories that other users of the host could change are refused, each with its
//! positive control. Needs root, to leave files that belong to another user.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::daemon::{Daemon, juju};
use crate::harness::{golden, wait_for};
use crate::operator::{Operator, Output, fixture_charm, line_of, output_of};

const DEADLINE: Duration = Duration::from_secs(90);
const NOBODY: u32 = 65_534;

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// `portcullis` with these arguments.
fn portcullis(operator: &Operator, args: &[&str]) -> Command {
    let mut command = operator.command("portcullis");
    command.env_remove("JUJU_ZOOKEEPER").args(args);
    command
}

/// Runs the command to its end and returns its exit code and its stderr.
#[track_caller]
fn ended(operator: &Operator, mut command: Command) -> Output {
    let log = operator.home().join("ended.log");
    let mut child = command.stdout(Stdio::null()).stderr(File::create(&log).unwrap()).spawn().unwrap();
    let end = std::time::Instant::now() + DEADLINE;
    let code = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code().unwrap();
        }
        if std::time::Instant::now() > end {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it goes on: {command:?}: {}", fs::read_to_string(&log).unwrap());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let stderr = fs::read_to_string(&log).unwrap();
    Output { line: line_of(&command), code, stdout: String::new(), stderr }
}

#[track_caller]
fn is_refused(refused: &Output, why: &str, repair: &str) {
    let last: Vec<&str> = refused.stderr.lines().rev().take(2).collect();
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(last[1].starts_with("error: ") && last[1].contains(why), "{refused:?}");
    assert_eq!(last[0], format!("hint: {repair}"));
    golden::record(&refused.line, "", &format!("{}\n{}\n", last[1], last[0]), refused.code);
}

fn status(operator: &Operator) -> Value {
    let shown = juju(operator, &["status", "--format", "json"]).stdout;
    serde_json::from_str(&shown).unwrap_or_default()
}

/// A charm whose start hook prints and fails, so that status shows what it printed.
fn charm(operator: &Operator, name: &str, start: &str) -> String {
    let charm = operator.charm(name, &format!("name: {name}\nsummary: s\ndescription: d\n"));
    let hook = Path::new(&charm).join("hooks/start");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    fs::write(&hook, format!("#!/bin/sh\n{start}\nexit 1\n")).unwrap();
    mode(&hook, 0o755);
    charm
}

/// The lines that a failed start hook printed.
fn printed(operator: &Operator, service: &str) -> Option<Vec<String>> {
    let status = status(operator);
    let unit = &status["services"][service]["units"][format!("{service}/0")];
    (unit["agent-state"] == "start-error").then_some(())?;
    let lines = unit["hook-output"].as_array().cloned().unwrap_or_default();
    Some(lines.iter().map(|line| line.as_str().unwrap().to_owned()).collect())
}

#[track_caller]
fn deploy(operator: &Operator, charm: &str) {
    let deployed = juju(operator, &["deploy", charm]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
}

/// Removes services and waits until nothing of their units is left.
#[track_caller]
fn destroy(operator: &Operator, services: &[&str], units: &Path) {
    for service in services {
        assert_eq!(juju(operator, &["destroy-service", service]).code, 0);
    }
    wait_for("an end of the units", DEADLINE, || {
        fs::read_dir(units.join("runs")).unwrap().next().is_none().then_some(())
    });
}

#[test]
fn writable_units_directory_gives_no_user_root() {
    let operator = Operator::with_store("");
    let units = operator.home().join("units");
    let planted = units.join("runs/unit-0000000000");
    fs::create_dir_all(&planted).unwrap();
    fs::write(planted.join("user"), "0").unwrap();
    mode(&units, 0o777);
    for place in [units.join("runs"), planted.clone(), planted.join("user")] {
        chown(&place, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let up = ["up", "--listen", "127.0.0.1:0", "--units-dir", units.to_str().unwrap()];
    let refused = ended(&operator, portcullis(&operator, &up));
    let repair = format!("chmod go-w {}", units.display());
    is_refused(&refused, "units can be written by other users (mode 0777)", &repair);
    // After the repair, the directory still has a file of another user.
    mode(&units, 0o755);
    let refused = ended(&operator, portcullis(&operator, &up));
    let repair = format!("chown 0 {}/runs", units.display());
    is_refused(&refused, "units/runs belongs to user 65534, who could change it", &repair);
    golden::refusals("trust_units_dir");
    // The positive control: without that file, the unit gets its own user.
    fs::remove_dir_all(units.join("runs")).unwrap();
    let start = || Daemon::start(&mut portcullis(&operator, &up));
    let daemon = start();
    deploy(&operator, &charm(&operator, "who", "id -u"));
    let user = wait_for("a hook", DEADLINE, || printed(&operator, "who"));
    assert!(user[0].parse::<u32>().unwrap() >= 1_879_048_192, "{user:?}");
    assert_eq!(daemon.stop("-TERM"), Some(0));
    // A file that belongs to root and names root is refused, too.
    let own = fs::read(planted.join("user")).unwrap();
    fs::write(planted.join("user"), "0").unwrap();
    let daemon = start();
    assert_eq!(juju(&operator, &["resolved", "--retry", "who/0"]).code, 0);
    wait_for("a user that is refused", DEADLINE, || {
        let error = status(&operator)["services"]["who"]["units"]["who/0"]["hook-error"].to_string();
        error.contains("unit-0000000000/user names root").then_some(())
    });
    fs::write(planted.join("user"), own).unwrap();
    assert_eq!(juju(&operator, &["resolved", "--retry", "who/0"]).code, 0);
    wait_for("the control: a hook", DEADLINE, || {
        printed(&operator, "who").filter(|printed| *printed == user)
    });
    destroy(&operator, &["who"], &units);
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn a_data_directory_that_others_can_write_is_refused() {
    let operator = Operator::with_store("");
    let data = operator.home().join("keeper");
    let keeper = ["keeper", "--listen", "127.0.0.1:0", "--data-dir", data.to_str().unwrap()];
    let start = || Daemon::start(&mut portcullis(&operator, &keeper));
    assert_eq!(start().stop("-TERM"), Some(0), "the control: it makes its own");
    let file = data.join("lock");
    for (place, safe, open) in [(&data, 0o700, 0o777), (&file, 0o600, 0o666)] {
        mode(place, open);
        let why = format!("{} can be written by other users (mode {open:04o})", place.display());
        let refused = ended(&operator, portcullis(&operator, &keeper));
        is_refused(&refused, &why, &format!("chmod go-w {}", place.display()));
        mode(place, safe);
        chown(place, Some(NOBODY), None).unwrap();
        let refused = ended(&operator, portcullis(&operator, &keeper));
        is_refused(&refused, "belongs to user 65534", &format!("chown 0 {}", place.display()));
        chown(place, Some(0), None).unwrap();
    }
    golden::refusals("trust_data_dir");
    assert_eq!(start().stop("-TERM"), Some(0), "the control: it is repaired");
}

#[test]
fn config_files_that_others_can_replace_are_refused() {
    let operator = Operator::with_store("");
    let daemon = Daemon::start(&mut portcullis(&operator, &["up", "--listen", "127.0.0.1:0"]));
    assert_eq!(juju(&operator, &["status"]).code, 0, "the control");
    let config = operator.config("");
    let config = config.components().as_path();
    mode(config, 0o777);
    let refused = juju(&operator, &["status"]);
    let why = "can be written by other users (mode 0777)";
    is_refused(&refused, why, &format!("chmod go-w {}", config.display()));
    mode(config, 0o700);
    let file = operator.config("local.json");
    chown(&file, Some(NOBODY), Some(NOBODY)).unwrap();
    let refused = juju(&operator, &["status"]);
    is_refused(&refused, "belongs to user 65534", &format!("chown 0 {}", file.display()));
    chown(&file, Some(0), Some(0)).unwrap();
    golden::refusals("trust_config");
    assert_eq!(juju(&operator, &["status"]).code, 0, "the control: it is repaired");
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[cfg(feature = "fleet")]
#[test]
fn node_configurations_that_others_can_change_are_refused() {
    let operator = Operator::with_store("");
    let file = operator.home().join("node.conf");
    fs::write(&file, "nonsense\n").unwrap();
    let path = file.to_str().unwrap();
    for role in ["manager", "agent"] {
        let run = || ended(&operator, portcullis(&operator, &[role, "--config", path]));
        mode(&file, 0o666);
        let why = "node.conf can be written by other users (mode 0666)";
        is_refused(&run(), why, &format!("chmod go-w {path}"));
        mode(&file, 0o644);
        chown(&file, Some(NOBODY), None).unwrap();
        is_refused(&run(), "belongs to user 65534", &format!("chown 0 {path}"));
        chown(&file, Some(0), None).unwrap();
        // The positive control: the file is read, and its content is refused.
        let read = run();
        assert!(read.code == 2 && read.stderr.contains(&format!("{path}: ")), "{read:?}");
    }
    golden::refusals("trust_node_configuration");
}

#[test]
fn a_policy_that_becomes_empty_leaves_the_last_one_in_force() {
    let operator = Operator::with_store("");
    let policy = operator.home().join("policy.yaml");
    let write = |text: &str| fs::write(&policy, text).unwrap();
    let path = policy.to_str().unwrap();
    let up = ["up", "--listen", "127.0.0.1:0", "--resync", "1", "--policy", path];
    for empty in ["", " \n", "# forbidden-ports: [80]\n"] {
        write(empty);
        let refused = ended(&operator, portcullis(&operator, &up));
        assert!(
            refused.code == 1 && refused.stderr.contains("policy.yaml: the file is empty"),
            "{refused:?}"
        );
        golden::record(&refused.line, "", &refused.stderr, refused.code);
    }
    write("forbidden-ports: [80]\n");
    mode(&policy, 0o666);
    let refused = ended(&operator, portcullis(&operator, &up));
    let why = "policy.yaml can be written by other users (mode 0666)";
    is_refused(&refused, why, &format!("chmod go-w {path}"));
    golden::refusals("trust_policy");
    mode(&policy, 0o644);
    let daemon = Daemon::start(&mut portcullis(&operator, &up));
    deploy(&operator, &fixture_charm("wordpress"));
    assert_eq!(juju(&operator, &["expose", "wordpress"]).code, 0);
    let unit = || status(&operator)["services"]["wordpress"]["units"]["wordpress/0"].clone();
    let is_held =
        || unit()["firewall-info"].to_string().contains("80/tcp held back: policy forbids the port");
    let problem = || status(&operator)["machines"]["0"]["problem"].to_string();
    wait_for("a port that is held back", DEADLINE, || is_held().then_some(()));
    assert!(!problem().contains("policy"), "{}", problem());
    write("");
    let told = wait_for("a problem", DEADLINE, || Some(problem()).filter(|told| told.contains("is empty")));
    assert!(told.contains("the policy that was read last stays in force"), "{told}");
    // Ports that are requested again stay closed, too.
    assert_eq!(juju(&operator, &["unexpose", "wordpress"]).code, 0);
    assert_eq!(juju(&operator, &["expose", "wordpress"]).code, 0);
    wait_for("a port that is held back", DEADLINE, || is_held().then_some(()));
    // The positive control: a readable policy replaces it.
    write("forbidden-ports: [81]\n");
    wait_for("a port that is not held back", DEADLINE, || {
        // A dry run lists the ports that it would open under the machine.
        let listed = status(&operator)["machines"]["0"]["firewall-info"].to_string().contains("80/tcp");
        (listed && !problem().contains("policy") && !is_held()).then_some(())
    });
    assert_eq!(juju(&operator, &["destroy-service", "wordpress"]).code, 0);
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn hooks_gain_no_privileges() {
    let operator = Operator::with_store("");
    let id = operator.home().join("id");
    fs::copy("/usr/bin/id", &id).unwrap();
    mode(&id, 0o4755);
    // The positive control: outside a hook the program gives every user the rights of root.
    let mut elsewhere = Command::new("setpriv");
    elsewhere.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&id).arg("-u");
    assert_eq!(output_of(&mut elsewhere).stdout, "0\n");
    let daemon = Daemon::start(&mut portcullis(&operator, &["up", "--listen", "127.0.0.1:0"]));
    let start = format!("id -u; {} -u; grep NoNewPrivs /proc/self/status", id.display());
    deploy(&operator, &charm(&operator, "climber", &start));
    let printed = wait_for("a hook", DEADLINE, || printed(&operator, "climber"));
    assert!(printed[0] != "0" && printed[0] == printed[1], "{printed:?}");
    assert!(printed[2].starts_with("NoNewPrivs:") && printed[2].ends_with('1'), "{printed:?}");
    assert_eq!(juju(&operator, &["destroy-service", "climber"]).code, 0);
    assert_eq!(daemon.stop("-TERM"), Some(0));
}

#[test]
fn a_unit_has_no_more_processes_than_its_limit() {
    let operator = Operator::with_store("");
    let units = operator.home().join("units");
    let start = "for n in $(seq 60); do sleep 1000 >/dev/null 2>&1 & done; echo all";
    for (name, limits, expected) in [("bomb", "pids=20", false), ("busy", "pids=512,memory=1G", true)] {
        let up = ["up", "--listen", "127.0.0.1:0", "--units-dir", units.to_str().unwrap()];
        let daemon = Daemon::start(portcullis(&operator, &up).args(["--hook-limits", limits]));
        deploy(&operator, &charm(&operator, name, start));
        let printed = wait_for("a hook", DEADLINE, || printed(&operator, name));
        assert_eq!(printed.iter().any(|line| line == "all"), expected, "{limits}: {printed:?}");
        destroy(&operator, &[name], &units);
        assert_eq!(daemon.stop("-TERM"), Some(0));
    }
    let nonsense = portcullis(&operator, &["up", "--hook-limits", "cpu=1"]);
    let refused = ended(&operator, nonsense);
    assert!(
        refused.code == 2 && refused.stderr.contains("'cpu=1' is not pids=N or memory=BYTES"),
        "{refused:?}"
    );
    golden::record(&refused.line, "", &refused.stderr, refused.code);
    golden::refusals("hook_limits");
}

#[test]
fn clean_starts_and_clean_removals_log_no_warning() {
    let operator = Operator::with_store("");
    let (units, log) = (operator.home().join("units"), operator.home().join("up.log"));
    let up = ["up", "--listen", "127.0.0.1:0", "--units-dir", units.to_str().unwrap()];
    let start = || {
        let log = File::options().create(true).append(true).open(&log).unwrap();
        Daemon::start(portcullis(&operator, &up).stderr(log))
    };
    let health = || status(&operator)["machines"]["0"].clone();
    let is_well = || {
        let seen = health();
        // Between the start of the agent and its first beat, the health is unknown.
        let wrong = seen["agent-state"] == "running" && seen["health"] == "stopped";
        assert!(!wrong, "{seen}");
        (seen["health"] == "ok").then_some(())
    };
    let first = start();
    wait_for("a machine that is well", DEADLINE, is_well);
    for name in ["one", "two", "three"] {
        deploy(&operator, &charm(&operator, name, "true"));
    }
    for name in ["one", "two", "three"] {
        wait_for("a hook", DEADLINE, || printed(&operator, name));
    }
    destroy(&operator, &["one", "two", "three"], &units);
    assert_eq!(first.stop("-TERM"), Some(0));
    let second = start();
    wait_for("a machine that is well again", DEADLINE, is_well);
    assert_eq!(second.stop("-TERM"), Some(0));
    let log = fs::read_to_string(&log).unwrap();
    // The hooks of these charms fail, and that is logged.
    let (failed, others): (Vec<&str>, Vec<&str>) = log.lines().partition(|line| line.contains("hook failed"));
    assert!(failed.iter().all(|line| line.contains(" WARN ")) && failed.len() >= 3, "the control: {log}");
    let warnings: Vec<&str> =
        others.into_iter().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).collect();
    assert_eq!(warnings, Vec::<&str>::new());
}
