//! Accesses that a hook must be denied, attempted from a real hook, each with a positive control.
//! Needs root, because hooks run as other users.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wait_for;
use crate::world::{DEADLINE, World, is_alive};

on_both_stores![
    hook_cannot_access_other_units,
    hook_cannot_access_another_machine,
    hook_cannot_access_another_environment,
    secrets_appear_only_in_their_files,
];

/// Shell function that prints one line with the name of an attempt and its result.
const TRY: &str = r#"
try() {
    what=$1; shift
    if "$@" >/dev/null 2>errors; then echo "$what: yes"; else echo "$what: no: $(tr '\n' ' ' <errors)"; fi
}
"#;

const TRIES: &str = r#"
as() { unit=$1; shift; JUJU_UNIT_NAME=$unit "$@"; }
# What the unit was given, put where an operator's own would be.
mkdir -p pose/portcullis
auth=$(sed 's/.*"auth":"\([^"]*\)".*/\1/' "$JUJU_CREDENTIALS")
(umask 077; printf '{"zookeeper": "%s", "auth": "%s"}' "$JUJU_ZOOKEEPER" "$auth" >pose/portcullis/local.json)
# A credentials file of its own making, that names whom it is given.
forge() { (umask 077; printf '{"unit": "%s", "auth": "%s:%s"}' "$1" "$2" "${auth#*:}" >forged.json)
  JUJU_UNIT_NAME=$1 JUJU_CREDENTIALS=$PWD/forged.json open-port "$3"; }
posing() { XDG_CONFIG_HOME=$PWD/pose juju "$@"; }
{
try flag posing expose victim
try placement posing add-unit victim --to 0
try removal posing remove-unit victim/0
try secrets posing hook-env victim/0
try look posing status
try own-port open-port 8080
try own-credentials cat "$JUJU_CREDENTIALS"
try other-name as victim/0 open-port 8081
try other-ports forge victim/0 unit-0000000000 8081
try own-ports forge thief/0 "${auth%%:*}" 8080
try other-credentials cat "$(dirname "$(dirname "$JUJU_CREDENTIALS")")"/unit-0000000000/credentials.json
try other-charm ls "$(dirname "$(dirname "$JUJU_CREDENTIALS")")"/unit-0000000000/charm
try other-charm-change touch "$(dirname "$(dirname "$JUJU_CREDENTIALS")")"/unit-0000000000/charm/x
try list-units ls "$(dirname "$(dirname "$JUJU_CREDENTIALS")")"
try runs ls "$(dirname "$(dirname "$(dirname "$JUJU_CREDENTIALS")")")"/runs
try operator cat "$CONFIG/local.json"
try machine cat "$CONFIG/local-machines/machine-0000000000.json"
try replace-credentials ln -sf /etc/passwd "$JUJU_CREDENTIALS"
try own-file touch "$CHARM_DIR/mine"
try become-root chown 0 "$CHARM_DIR/mine"
} >tried.new
mv tried.new tried
"#;

fn hook_cannot_access_other_units(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    // The hooks of each unit run as a user of their own.
    let agent = world.agent(&[]);
    // A hook can also open its own stdout and stderr.
    let start = "open-port 9000 && echo up >/dev/stderr && echo up >/dev/stdout";
    world.deploy(&world.charm("victim", &[("start", start)]), "victim");
    world.wait_for_state("victim/0", "started");
    let config = operator.config("");
    let tries = TRIES.replace("$CONFIG", config.to_str().unwrap().trim_end_matches('/'));
    let tries = format!("{TRY}{tries}");
    world.deploy(&world.charm("thief", &[("start", &tries)]), "thief");
    world.wait_for_state("thief/0", "started");
    let tried = fs::read_to_string(world.charm_dir("thief/0").join("tried")).unwrap();
    for (what, worked, why) in [
        ("own-port", true, ""),
        ("own-credentials", true, ""),
        ("own-file", true, ""),
        ("other-name", false, "are those of thief/0, not of victim/0"),
        ("other-ports", false, "does not allow this with these credentials"),
        ("own-ports", true, ""),
        ("other-credentials", false, "Permission denied"),
        ("other-charm", false, "Permission denied"),
        ("other-charm-change", false, "Permission denied"),
        ("list-units", false, "Permission denied"),
        ("runs", false, "Permission denied"),
        ("operator", false, "Permission denied"),
        ("machine", false, "Permission denied"),
        ("replace-credentials", false, "Permission denied"),
        ("become-root", false, "not permitted"),
        ("flag", false, "the store refuses these credentials"),
        ("placement", false, "the store refuses these credentials"),
        ("removal", false, "the store refuses these credentials"),
        ("secrets", false, "the store refuses these credentials"),
        ("look", false, "the store refuses these credentials"),
    ] {
        output_of(&tried, what, worked, why);
    }
    assert_eq!(operator.status()["services"]["victim"].get("exposed"), None);
    assert_eq!(operator.status()["services"]["victim"]["units"].as_object().unwrap().len(), 1);
    // Control: the owner of the files can read them.
    let credentials = world.units_dir().join("units/unit-0000000000/credentials.json");
    assert!(fs::read_to_string(&credentials).unwrap().contains("victim/0"));
    let held = fs::metadata(&credentials).unwrap();
    assert_eq!((held.permissions().mode() & 0o777, held.uid()), (0o600, world.first_uid));
    // Each unit has the ports that its own hooks opened.
    operator.does(&["expose", "victim"]);
    operator.does(&["expose", "thief"]);
    assert_eq!(world.unit("victim/0")["open-ports"], serde_json::json!(["9000/tcp"]));
    assert_eq!(world.unit("thief/0")["open-ports"], serde_json::json!(["8080/tcp"]));

    // A credential is revoked with its unit: a copy of it opens no port.
    let kept = operator.home().join("stolen.json");
    fs::copy(world.charm_dir("thief/0").parent().unwrap().join("credentials.json"), &kept).unwrap();
    let open = |credentials: &Path| {
        let mut tool = operator.command("open-port");
        tool.arg("8082").env("JUJU_UNIT_NAME", "thief/0").env("JUJU_ENV", "local");
        crate::operator::output_of(tool.env("JUJU_CREDENTIALS", credentials))
    };
    assert_eq!(open(&kept).code, 0, "the control: it works as long as the unit is there");
    operator.does(&["destroy-service", "thief"]);
    let refused = open(&kept);
    assert!(refused.code == 1 && refused.stderr.contains("no such znode"), "{refused:?}");
    agent.stop();
}

#[track_caller]
fn output_of(tried: &str, what: &str, worked: bool, why: &str) {
    let line = tried.lines().find(|line| line.starts_with(&format!("{what}: "))).expect(what);
    let outcome = if worked { "yes" } else { "no" };
    assert!(line.starts_with(&format!("{what}: {outcome}")) && line.contains(why), "{line}");
}

/// Attempts of a hook to access files of another machine on the same host, with every path known.
const ELSEWHERE: &[(&str, &str)] = &[
    ("machine", "cat $CONFIG/local-machines/machine-0000000001.json"),
    ("credentials", "cat $OTHER/units/unit-0000000000/credentials.json"),
    ("charm", "ls $OTHER/units/unit-0000000000/charm"),
    ("charm-file", "cat $OTHER/units/unit-0000000000/charm/metadata.yaml"),
    ("charm-change", "touch $OTHER/units/unit-0000000000/charm/x"),
    ("units", "ls $OTHER/units"),
    ("runs", "ls $OTHER/runs"),
    ("log", "cat $OTHER/runs/unit-0000000000/log"),
    ("state", "cat $OTHER/runs/unit-0000000000/state"),
    ("charms", "ls $OTHER/charms"),
    ("packed-charm", "cat $OTHER/charms/$HASH"),
    // A process that can open the lock file can lock it, and so keep the agent from its units.
    ("lock", "cat $OTHER/lock"),
    ("own-charms", "ls $OWN/charms"),
    ("own-lock", "cat $OWN/lock"),
];

/// Hooks on one machine cannot access the files of another, unless they run as root.
fn hook_cannot_access_another_machine(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    operator.does(&["add-machine", "--instance-id", "more-metal"]);
    let elsewhere = operator.home().join("units-1");
    let other = world.agent_of("1", &elsewhere, &[]);
    operator.does(&["deploy", &world.charm("victim", &[("start", "echo up")]), "--to", "1"]);
    world.wait_for_state("victim/0", "started");
    let kept: Vec<_> = fs::read_dir(elsewhere.join("charms")).unwrap().map(|kept| kept.unwrap()).collect();
    assert_eq!(kept.len(), 1, "the charm, as it output");
    let hash = kept[0].file_name().into_string().unwrap();
    let tried = |service: &str| {
        let tries: String = ELSEWHERE.iter().map(|(what, how)| format!("try {what} {how}\n")).collect();
        let script = format!("{TRY}{{\n{tries}}} >tried.new\nmv tried.new tried");
        let config = operator.config("");
        let script = script
            .replace("$CONFIG", config.to_str().unwrap().trim_end_matches('/'))
            .replace("$OTHER", elsewhere.to_str().unwrap())
            .replace("$OWN", world.units_dir().to_str().unwrap())
            .replace("$HASH", &hash);
        world.deploy(&world.charm(service, &[("start", &script)]), service);
        world.wait_for_state(&format!("{service}/0"), "started");
        fs::read_to_string(world.charm_dir(&format!("{service}/0")).join("tried")).unwrap()
    };
    let agent = world.agent(&[]);
    let refused = tried("thief");
    for (what, _) in ELSEWHERE {
        output_of(&refused, what, false, "Permission denied");
    }
    agent.stop();
    // Control: the same attempts by hooks that run as root.
    let agent = world.agent(&["--hook-user", "0:0"]);
    let worked = tried("robber");
    for (what, _) in ELSEWHERE {
        output_of(&worked, what, true, "");
    }
    agent.stop();
    other.stop();
}

/// Two environments on one host have units with the same numbers: no two units ever get the same
/// user, in any order of deployment.
fn hook_cannot_access_another_environment(site: &Site) {
    let one = World::new(site);
    let two = World::new(&site.other()).on_the_host_of(&one);
    let (first, second) = (one.agent(&[]), two.agent(&[]));
    one.deploy(&one.charm("victim", &[("start", "setsid sleep 1000 & echo $! >left")]), "victim");
    one.wait_for_state("victim/0", "started");
    let charm = one.charm_dir("victim/0");
    let left = fs::read_to_string(charm.join("left")).unwrap();
    let tries = format!(
        "{TRY}{{\ntry credentials cat {home}/credentials.json\ntry charm touch {home}/charm/x\n\
         try process kill -9 {left}\n}} >tried.new\nmv tried.new tried",
        home = charm.parent().unwrap().display(),
    );
    let tried = |service: &str| {
        two.deploy(&two.charm(service, &[("start", &tries)]), service);
        two.wait_for_state(&format!("{service}/0"), "started");
        fs::read_to_string(two.charm_dir(&format!("{service}/0")).join("tried")).unwrap()
    };
    let refused = tried("thief");
    for (what, why) in [
        ("credentials", "Permission denied"),
        ("charm", "Permission denied"),
        ("process", "Operation not permitted"),
    ] {
        output_of(&refused, what, false, why);
    }
    assert!(is_alive(&left));
    let owner = |world: &World, unit: &str| {
        fs::metadata(world.charm_dir(unit).parent().unwrap().join("credentials.json")).unwrap().uid()
    };
    let (victims, thiefs) = (owner(&one, "victim/0"), owner(&two, "thief/0"));
    assert_ne!(victims, thiefs);
    // A later unit does not get the user of a removed one, and each unit keeps its user.
    two.operator.does(&["destroy-service", "thief"]);
    wait_for("a machine without units", DEADLINE, || two.is_cleared_away().then_some(()));
    second.stop();
    let second = two.agent(&[]);
    output_of(&tried("successor"), "credentials", false, "Permission denied");
    assert!(![victims, thiefs].contains(&owner(&two, "successor/0")));
    assert_eq!(owner(&one, "victim/0"), victims);
    second.stop();
    // Control: the same attempts by hooks that run as the user of the other unit.
    let second = two.agent(&["--hook-user", &format!("{victims}:{victims}")]);
    let worked = tried("robber");
    for what in ["credentials", "charm", "process"] {
        output_of(&worked, what, true, "");
    }
    second.stop();
    first.stop();
}

fn secrets_appear_only_in_their_files(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    let agent = world.agent(&[]);
    // Prints its command line and environment, runs until it is inspected, and fails.
    let start = "cat /proc/self/cmdline; env; : >up; while [ ! -e go ]; do sleep 0.05; done; exit 1";
    world.deploy(&world.charm("loud", &[("start", start)]), "loud");
    wait_for("a hook that runs", DEADLINE, || {
        world.units_dir().join("units/unit-0000000000/charm/up").exists().then_some(())
    });
    let credentials = world.units_dir().join("units/unit-0000000000/credentials.json");
    let mut secrets = Vec::new();
    for file in [credentials.clone(), operator.config("local.json"), machine_file(operator.home())] {
        let held: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let secret = held["auth"].as_str().unwrap().split_once(':').unwrap().1.to_owned();
        assert!(secret.len() >= 32, "{}", file.display());
        secrets.push(secret);
    }
    let mut looked_at = 0;
    for process in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        for file in ["cmdline", "environ"] {
            // A process may end during the scan.
            let Ok(bytes) = fs::read(process.path().join(file)) else { continue };
            looked_at += 1;
            let text = String::from_utf8_lossy(&bytes);
            let leaked = secrets.iter().any(|secret| text.contains(secret));
            assert!(!leaked, "a secret in {}", process.path().join(file).display());
        }
    }
    assert!(looked_at > 4, "no file was checked");
    fs::write(world.units_dir().join("units/unit-0000000000/charm/go"), "").unwrap();
    world.wait_for_state("loud/0", "start-error");
    let shown = operator.does(&["status"]).stdout;
    let log = fs::read_to_string(world.units_dir().join("runs/unit-0000000000/log")).unwrap();
    assert!(shown.contains("hook-output"), "{shown}");
    // The hook has every documented environment variable.
    let charm = world.charm_dir("loud/0").display().to_string();
    for (name, value) in [
        ("CHARM_DIR", charm.as_str()),
        ("PWD", &charm),
        ("JUJU_CREDENTIALS", credentials.to_str().unwrap()),
        ("JUJU_ENV", "local"),
        ("JUJU_HOOK_NAME", "start"),
        ("JUJU_UNIT_NAME", "loud/0"),
        ("JUJU_ZOOKEEPER", &site.connect_string()),
    ] {
        assert!(log.contains(&format!("{name}={value}\n")), "{name} is not {value}: {log}");
    }
    for secret in &secrets {
        for text in [&shown, &log, &agent.log()] {
            assert!(!text.contains(secret.as_str()), "a secret is told: {text}");
        }
    }
    // Control: the file contains the secret, and the search finds it there.
    assert!(fs::read_to_string(credentials).unwrap().contains(&secrets[0]));
    agent.stop();
}

fn machine_file(home: &Path) -> std::path::PathBuf {
    home.join("config/portcullis/local-machines/machine-0000000000.json")
}
