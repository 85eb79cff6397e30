//! `portcullis install` under a real systemd: the files that it writes are valid, the service works
//! and is restarted after a kill, and processes that hooks have started keep running meanwhile. The
//! systemd instance has namespaces and control groups of its own; see `boot.sh`. Needs root.

// Clippy does not recognize the scenarios as tests.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "../harness/mod.rs"]
mod harness;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use harness::groups::{Groups, directories};
use harness::{binary, wait_for};
use portcullis::machine::join_token::JoinToken;
use portcullis::model::MachineId;
use portcullis::provision::user_data::BootConfig;
use portcullis::store::Credential;
use portcullis::store::acl::Roles;
use portcullis::store::joining::{LaunchOffer, OfferKind};

const DEADLINE: Duration = Duration::from_secs(60);
const UNITS: &str = "/var/lib/portcullis-units/local";

struct Instance {
    /// The end of this process ends all processes of the instance.
    unshare: Child,
    systemd: u32,
    groups: Groups,
    dir: tempfile::TempDir,
}

impl Instance {
    fn boot() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let groups = Groups::new("instance");
        let enter = groups.enter();
        // The process enters the groups before the control group namespace is created, so they are
        // the root groups of that namespace.
        let spaces = "--mount --pid --uts --ipc --net --cgroup --fork --kill-child=KILL";
        let output = File::create(dir.path().join("output")).unwrap();
        let unshare = Command::new("sh")
            .args(["-euc", &format!("{enter}exec setpriv --pdeathsig KILL unshare {spaces} \"$@\""), "sh"])
            .arg(script())
            .arg(binary("portcullis").parent().unwrap())
            .arg(env!("CARGO_MANIFEST_DIR"))
            .env("PORTCULLIS_BOOT", "test")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let mut instance = Self { unshare, systemd: 0, groups, dir };
        instance.systemd = wait_for("systemd", DEADLINE, || {
            let pid = instance.unshare.id();
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
            let child: u32 = children.trim().parse().ok()?;
            (fs::read_to_string(format!("/proc/{child}/comm")).ok()? == "systemd\n").then_some(child)
        });
        wait_for("a systemd that answers", DEADLINE, || {
            instance.output_of(&["systemctl", "is-active", "multi-user.target"]).map(drop)
        });
        instance
    }

    fn command(&self, line: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.systemd.to_string(), "--mount", "--pid", "--net", "--uts", "--ipc"]);
        command.args(line).env_clear().env("PATH", "/run/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        // The same values as in the services.
        command.env("XDG_CONFIG_HOME", "/etc").env("SYSTEMD_UNIT_PATH", "/run/units").stdin(Stdio::null());
        command
    }

    /// Runs a command inside and returns its output, if it succeeds.
    fn output_of(&self, line: &[&str]) -> Option<String> {
        let output = self.command(line).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    #[track_caller]
    fn run(&self, line: &[&str]) -> String {
        let output = self.command(line).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line:?}: {printed}");
        format!("{}{printed}", String::from_utf8_lossy(&output.stdout))
    }

    fn property(&self, name: &str) -> String {
        self.property_of("portcullis.service", name)
    }

    fn property_of(&self, service: &str, name: &str) -> String {
        self.run(&["systemctl", "show", service, "--value", "--property", name]).trim().to_owned()
    }

    /// Kills a service's process and waits until systemd has started a new one.
    fn comes_back(&self, service: &str) {
        let first = self.property_of(service, "MainPID");
        self.run(&["kill", "-KILL", &first]);
        wait_for("another process", DEADLINE, || {
            Some(self.property_of(service, "MainPID")).filter(|pid| *pid != first && pid != "0")
        });
    }

    fn status(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.output_of(&["juju", "status", "--format", "json"])?).ok()
    }

    /// Returns the page of the first unit whose files are in `units`, if its server responds.
    fn page(&self, units: &str) -> Option<String> {
        let charm = format!("{units}/units/unit-0000000000/charm");
        let fetch = format!(
            "import urllib.request; url = 'http://127.0.0.1:' + open('{charm}/port').read(); \
             print(urllib.request.urlopen(url, timeout=5).read().decode())"
        );
        self.output_of(&["python3", "-c", &fetch])
    }
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/systemd/boot.sh")
}

impl Drop for Instance {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log:\n{}", fs::read_to_string(self.dir.path().join("output")).unwrap_or_default());
        }
        let _ = (self.unshare.kill(), self.unshare.wait());
    }
}

/// Lists the control groups of this machine, except those of tests: the mounts, the top-level
/// groups, and the group that a Portcullis service would have.
fn of_this_machine() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts: Vec<&str> = mounts.lines().filter(|line| line.contains(" /sys/fs/cgroup")).collect();
    let mut all: Vec<String> = mounts.iter().map(|mount| (*mount).to_owned()).collect();
    for mount in mounts {
        let top = Path::new(mount.split(' ').nth(4).unwrap());
        let service = top.join("system.slice/portcullis.service");
        let groups = directories(top).into_iter().chain(service.exists().then_some(service));
        all.extend(groups.map(|group| group.display().to_string()));
    }
    all.retain(|name| !name.contains("/portcullis-"));
    all.sort();
    all
}

/// Returns the group of a process in each hierarchy.
fn groups_of(process: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
    let tree = |line: &str| {
        let (tree, group) = line.split_once(':').unwrap().1.split_once(':').unwrap();
        (tree.to_owned(), group.to_owned())
    };
    text.lines().map(tree).collect()
}

#[test]
fn systemd_does_not_boot_outside_a_container() {
    // If the script does not refuse, it has no directory to mount, and it affects only its own
    // mount namespace.
    for (spaces, known, why) in [
        (&["--mount"][..], Some("test"), "not the first process"),
        (&["--mount", "--pid", "--fork", "--kill-child=KILL"], None, "not inside a test machine"),
    ] {
        let mut command = Command::new("unshare");
        command.args(spaces).arg(script()).args(["/nowhere", "/nowhere"]).env_remove("PORTCULLIS_BOOT");
        let told = command.envs(known.map(|known| ("PORTCULLIS_BOOT", known))).output().unwrap();
        let printed = String::from_utf8_lossy(&told.stderr);
        assert!(told.status.code() == Some(1) && printed.contains(why), "{told:?}");
    }
}

#[test]
fn the_service_restarts_and_processes_of_hooks_continue() {
    let before = of_this_machine();
    let systemd = Instance::boot();
    is_in_groups_of_its_own(&systemd);
    let files = ["portcullis", "portcullis-keeper", "portcullis-controller", "portcullis-heartbeat"];
    for file in files
        .map(|name| format!("{name}.service"))
        .iter()
        .chain(["portcullis-machine@3.service".to_owned()].iter())
    {
        let printed = systemd.run(&["systemd-analyze", "verify", file]);
        // Versions before 254 ignore this key.
        let mut printed = printed.lines().filter(|line| !line.contains("Unknown key 'DelegateSubgroup'"));
        assert_eq!(printed.next(), None, "{file}");
    }
    systemd.run(&["systemctl", "start", "portcullis.service"]);
    let running = |status: &serde_json::Value| status["machines"]["0"]["agent-state"] == "running";
    wait_for("a machine", DEADLINE, || systemd.status().filter(running));
    systemd.run(&["juju", "deploy", "/run/repo/fixtures/charms/hello"]);
    systemd.run(&["juju", "expose", "hello"]);
    let hello = "Hello world, from hello/0.\n\n";
    wait_for("a page", DEADLINE, || systemd.page(UNITS).filter(|page| page == hello));
    // The unit has a user of its own, which is not root.
    let server = systemd.run(&["cat", &format!("{UNITS}/units/unit-0000000000/charm/pid")]);
    let user = systemd.run(&["stat", "--format", "%u", &format!("/proc/{}", server.trim())]);
    assert!(user.trim().parse::<u32>().unwrap() >= 1_879_048_192, "{user}");

    systemd.comes_back("portcullis.service");
    assert_eq!(systemd.property("NRestarts"), "1");
    assert_eq!(systemd.page(UNITS).as_deref(), Some(hello), "its server was never gone");
    wait_for("a unit that is looked after", DEADLINE, || {
        systemd.status().filter(|status| {
            running(status) && status["services"]["hello"]["units"]["hello/0"]["agent-state"] == "started"
        })
    });
    // A stop of the service is clean and leaves the server running; the removal of the unit ends
    // it.
    systemd.run(&["systemctl", "stop", "portcullis.service"]);
    assert_eq!(systemd.property("Result"), "success");
    assert_eq!(systemd.page(UNITS).as_deref(), Some(hello));
    systemd.run(&["systemctl", "start", "portcullis.service"]);
    wait_for("a store", DEADLINE, || systemd.output_of(&["juju", "destroy-service", "hello"]));
    wait_for("an end of the server", DEADLINE, || {
        systemd.output_of(&["test", "!", "-e", &format!("/proc/{}", server.trim())])
    });
    let groups = systemd.groups.0.clone();
    drop(systemd);
    assert_eq!(of_this_machine(), before, "this machine is as it was");
    assert!(!groups.iter().any(|group| group.exists()), "{groups:?}");
}

/// One service for each role, as in an environment with several machines: the store, the
/// controller, and the machine with its own firewall.
#[test]
fn the_roles_work_together_and_come_back_one_by_one() {
    let systemd = Instance::boot();
    let (keeper, machine, controller) =
        ("portcullis-keeper.service", "portcullis-machine@0.service", "portcullis-controller.service");
    systemd.run(&["systemctl", "start", keeper]);
    let store = ["juju", "--zookeeper", "127.0.0.1:2181", "bootstrap"];
    wait_for("a store", DEADLINE, || systemd.output_of(&store));
    systemd.run(&["juju", "add-machine", "--instance-id", "metal"]);
    systemd.run(&["systemctl", "start", machine, controller]);
    systemd.run(&["juju", "deploy", "/run/repo/fixtures/charms/hello", "--to", "0"]);
    systemd.run(&["juju", "expose", "hello"]);
    let (units, hello) = ("/var/lib/portcullis-units/local-0", "Hello world, from hello/0.\n\n");
    wait_for("a page", DEADLINE, || systemd.page(units).filter(|page| page == hello));
    let server = systemd.run(&["cat", &format!("{units}/units/unit-0000000000/charm/pid")]);
    let user = systemd.run(&["stat", "--format", "%u", &format!("/proc/{}", server.trim())]);
    assert!(user.trim().parse::<u32>().unwrap() >= 1_879_048_192, "{user}");
    // The port is really open: nftables has a rule for it.
    let port = systemd.run(&["cat", &format!("{units}/units/unit-0000000000/charm/port")]);
    wait_for("an open port", DEADLINE, || {
        systemd.output_of(&["nft", "list", "ruleset"]).filter(|rules| rules.contains(port.trim()))
    });
    for service in [machine, keeper, controller] {
        systemd.comes_back(service);
        assert_eq!(systemd.page(units).as_deref(), Some(hello), "its server was never gone");
        wait_for("a unit that is looked after", DEADLINE, || {
            systemd.status().filter(|status| {
                let unit = &status["services"]["hello"]["units"]["hello/0"];
                status["machines"]["0"]["agent-state"] == "running" && unit["agent-state"] == "started"
            })
        });
    }
    // The removal of the unit ends its server and closes its port.
    systemd.run(&["juju", "destroy-service", "hello"]);
    wait_for("an end of the server", DEADLINE, || {
        systemd.output_of(&["test", "!", "-e", &format!("/proc/{}", server.trim())])
    });
    wait_for("a shut port", DEADLINE, || {
        systemd.output_of(&["nft", "list", "ruleset"]).filter(|rules| !rules.contains(port.trim()))
    });
    for service in [machine, controller, keeper] {
        systemd.run(&["systemctl", "stop", service]);
        assert_eq!(systemd.property_of(service, "Result"), "success", "{service}");
    }
}

/// Runs the user data of a launched instance as cloud-init does. The test machine has `portcullis`
/// on the PATH of its services, as an image must.
#[test]
fn the_machine_of_user_data_runs_units_and_its_restart_leaves_their_processes_alone() {
    let systemd = Instance::boot();
    let keeper = "portcullis-keeper.service";
    systemd.run(&["systemctl", "set-environment", "PATH=/run/bin:/usr/sbin:/usr/bin:/sbin:/bin"]);
    systemd.run(&["systemctl", "start", keeper]);
    let store = ["juju", "--zookeeper", "127.0.0.1:2181", "bootstrap"];
    wait_for("a store", DEADLINE, || systemd.output_of(&store));
    systemd.run(&["juju", "add-machine", "--instance-id", "metal"]);
    // An operator's token stands for the one of the controller, which is in another znode.
    let printed = systemd.run(&["juju", "machine", "token", "0"]);
    let token = printed.lines().find_map(|line| line.strip_prefix("portcullis join ")).expect("a token");
    let token: JoinToken = token.parse().unwrap();
    let identity = || Credential::parse("nobody:secret").unwrap().identity();
    let roles = Roles { operator: identity(), controller: identity() };
    let boot = BootConfig::new("local".parse().unwrap(), token.store.clone(), None, roles);
    let once = token.credential.clone();
    let offer = LaunchOffer { machine: MachineId::new(0), once, expires_ms: token.expires_ms };
    let user_data = boot.user_data(&offer);
    let launch = JoinToken { offer: OfferKind::Launch, ..token.clone() };
    assert!(user_data.reveal().contains(&launch.expose()), "{}", user_data.reveal());
    let script = user_data.reveal().replace(&launch.expose(), &token.expose());
    systemd.run(&["sh", "-c", &script]);
    assert_eq!(systemd.output_of(&["cat", "/etc/portcullis/join-token"]), None, "the token is removed");

    let service = "portcullis-machine.service";
    let enabled = systemd.run(&["systemctl", "is-enabled", service]);
    assert!(enabled.starts_with("enabled"), "{enabled}");
    systemd.run(&["juju", "deploy", "/run/repo/fixtures/charms/hello", "--to", "0"]);
    systemd.run(&["juju", "expose", "hello"]);
    let (units, hello) = ("/var/lib/portcullis-units/local-0", "Hello world, from hello/0.\n\n");
    wait_for("a page", DEADLINE, || systemd.page(units).filter(|page| page == hello));
    systemd.comes_back(service);
    assert_eq!(systemd.page(units).as_deref(), Some(hello), "its server was never gone");
    wait_for("a unit that is looked after", DEADLINE, || {
        systemd.status().filter(|status| {
            let unit = &status["services"]["hello"]["units"]["hello/0"];
            status["machines"]["0"]["agent-state"] == "running" && unit["agent-state"] == "started"
        })
    });
}

/// Joins a host with `--service`, and removes the machine again by hand, as an administrator whose
/// environment variables are not those of the service.
#[test]
fn a_machine_that_joined_as_a_service_leaves_with_one_command() {
    let systemd = Instance::boot();
    let (keeper, service) = ("portcullis-keeper.service", "portcullis-machine@0.service");
    systemd.run(&["systemctl", "start", keeper]);
    let store = ["juju", "--zookeeper", "127.0.0.1:2181", "bootstrap"];
    wait_for("a store", DEADLINE, || systemd.output_of(&store));
    let printed = systemd.run(&["juju", "add-machine"]);
    let token = printed.lines().find_map(|line| line.strip_prefix("portcullis join ")).expect("a token");
    // A host that cannot run the agent does not use the token up.
    systemd.run(&["cp", "/run/bin/portcullis", "/tmp/portcullis"]);
    let refused = systemd.command(&["/tmp/portcullis", "join", "--service", token]).output().unwrap();
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("open-port, close-port and opened-ports are not in /tmp"), "{refused}");
    systemd.run(&["rm", "/tmp/portcullis"]);
    let joined = systemd.run(&["portcullis", "join", "--service", token]);
    assert!(joined.contains("Machine 0 has joined") && joined.contains("is enabled and running"), "{joined}");
    // The command can be repeated.
    systemd.run(&["systemctl", "disable", "--now", service]);
    let again = systemd.run(&["portcullis", "join", "--service", token]);
    assert!(again.contains("is machine 0 already") && again.contains("is enabled and running"), "{again}");

    systemd.run(&["juju", "deploy", "/run/repo/fixtures/charms/hello", "--to", "0"]);
    let units = "/var/lib/portcullis-units/local-0";
    wait_for("a page", DEADLINE, || systemd.page(units).filter(|page| page.contains("from hello/0.")));
    let server = systemd.run(&["cat", &format!("{units}/units/unit-0000000000/charm/pid")]);
    systemd.run(&["systemctl", "stop", service]);
    // The machine's host is no host of an operator.
    systemd.run(&["mv", "/etc/portcullis/local.json", "/tmp/local.json"]);
    let leave =
        ["env", "-u", "XDG_CONFIG_HOME", "HOME=/tmp", "portcullis", "machine", "--id", "0", "--leave"];
    let left = systemd.run(&leave);
    assert!(left.contains("Machine 0 has left: 1 units"), "{left}");
    systemd.run(&["test", "!", "-e", &format!("/proc/{}", server.trim())]);
    let files =
        systemd.run(&["find", "/etc/portcullis/local-machines", "/var/lib/portcullis/local/identity"]);
    assert!(!files.contains("machine-0"), "{files}");
    // The service is still enabled: it ends, and is not started again.
    systemd.run(&["systemctl", "start", service]);
    wait_for("an end of the service", DEADLINE, || {
        (systemd.property_of(service, "ActiveState") == "failed").then_some(())
    });
    assert_eq!(systemd.property_of(service, "ExecMainStatus"), "3");
    assert_eq!(systemd.property_of(service, "NRestarts"), "0");
}

/// Checks from outside that systemd is in the instance's group in the unified and in the
/// `name=systemd` hierarchy. In all others it is in the group of the test, and they are not mounted
/// inside.
fn is_in_groups_of_its_own(systemd: &Instance) {
    let top = format!("/{}", systemd.groups.name());
    let ours = groups_of("self");
    for (tree, group) in groups_of(&systemd.systemd.to_string()) {
        if tree.is_empty() || tree == "name=systemd" {
            assert!(group == top || group.starts_with(&format!("{top}/")), "{tree}: {group}");
        } else {
            assert!(ours.contains(&(tree.clone(), group.clone())), "{tree}: {group}");
        }
    }
    let mounts = systemd.run(&["cat", "/proc/1/mountinfo"]);
    let kinds = mounts.lines().filter_map(|line| line.split_once(" - ")?.1.split(' ').next());
    assert_eq!(kinds.filter(|kind| kind.starts_with("cgroup")).count(), 1, "{mounts}");
}
