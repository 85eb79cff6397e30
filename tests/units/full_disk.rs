//! A unit fills the disk that also has the data of the store, of the agents and of the operator.
//! `portcullis up` and an agent go on, report the reason, and continue when there is space again.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{ports, wait_for};
use crate::mounts::Mount;
use crate::operator::{Operator, Output, output_of};
use crate::world::{DEADLINE, World, next_first_uid};

/// Hook code that fills the disk.
const FILL: &str = "cat /dev/zero >filler 2>/dev/null || true";

/// A disk of 256 MB that hooks can reach.
fn small_disk() -> Mount {
    let mount = Mount::tmpfs("256m");
    let above = mount.path().parent().unwrap().to_owned();
    fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
    mount
}

/// A host whose files are on a small disk, all but the log of `up`.
struct Host {
    disk: Mount,
    operator: Operator,
    port: u16,
    first_uid: u32,
}

/// A running `portcullis up`, killed if the test ends before it does.
struct Up {
    child: Child,
    log: PathBuf,
}

impl Up {
    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    fn is_running(&mut self) {
        let ended = self.child.try_wait().expect("wait");
        assert_eq!(ended, None, "{}", self.log());
    }

    fn signal(&mut self, signal: &str) -> Option<i32> {
        assert!(
            Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success()
        );
        wait_for("end of portcullis", DEADLINE, || self.child.try_wait().expect("wait")).code()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of up:\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
        // The process has ended already, unless the test failed.
        let _ = (self.child.kill(), self.child.wait());
    }
}

impl Host {
    fn new() -> Self {
        let (disk, operator) = (small_disk(), Operator::with_store(""));
        Self { disk, operator, port: ports::free(), first_uid: next_first_uid() }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.operator.command(program);
        let on_disk = |name: &str| self.disk.path().join(name);
        command
            .env_remove("JUJU_ZOOKEEPER")
            .env("HOME", self.disk.path())
            .env("XDG_CONFIG_HOME", on_disk("config"))
            .env("XDG_DATA_HOME", on_disk("data"))
            .env("PORTCULLIS_UNIT_USERS", on_disk("users.json"));
        command
    }

    fn juju(&self, args: &[&str]) -> Output {
        output_of(self.command("juju").args(args))
    }

    fn up(&self) -> Up {
        let log = self.operator.home().join("up.log");
        let mut command = self.command("portcullis");
        command.args(["--log-level", "info", "up", "--listen", &format!("127.0.0.1:{}", self.port)]);
        // A short tick, so that the sessions of a killed process expire soon.
        command.args(["--tick-ms", "50", "--firewall", "none", "--resync", "2"]);
        command.args(["--hook-user", &format!("{}+", self.first_uid)]);
        command.arg("--units-dir").arg(self.disk.path().join("units"));
        let stderr = File::options().create(true).append(true).open(&log).unwrap();
        let child = command.stdout(Stdio::null()).stderr(stderr).spawn().expect("portcullis starts");
        Up { child, log }
    }

    fn wait_for_status(&self, what: &str, parts: &[&str]) -> String {
        wait_for(what, DEADLINE * 2, || {
            let shown = self.juju(&["status"]);
            let complete = shown.code == 0 && parts.iter().all(|part| shown.stdout.contains(part));
            complete.then_some(shown.stdout)
        })
    }

    fn charm(&self, name: &str, hooks: &[(&str, &str)]) -> String {
        let metadata = format!("name: {name}\nsummary: A charm\ndescription: For a test.\n");
        let charm = self.operator.charm(name, &metadata);
        write_hooks(Path::new(&charm), hooks);
        charm
    }
}

fn write_hooks(charm: &Path, hooks: &[(&str, &str)]) {
    fs::create_dir_all(charm.join("hooks")).unwrap();
    for (hook, body) in hooks {
        let path = charm.join("hooks").join(hook);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// The store refuses changes once the space is used up that its log has reserved. Charms of half a
/// megabyte use it up.
fn deploy_until_refused(host: &Host) -> Output {
    for number in 0..40_u32 {
        let charm = host.charm(&format!("bulk{number}"), &[]);
        let noise = (0..500_000_u32).map(|at| (at.wrapping_mul(2_654_435_761 ^ number) >> 13) as u8);
        fs::write(Path::new(&charm).join("noise"), noise.collect::<Vec<_>>()).unwrap();
        let deployed = host.juju(&["deploy", &charm]);
        if deployed.code != 0 {
            return deployed;
        }
    }
    panic!("the store takes changes although the disk is full");
}

fn is_full(disk: &Mount) -> bool {
    let probe = disk.path().join("probe");
    let written = fs::write(&probe, vec![1; 1 << 20]);
    let _ = fs::remove_file(probe);
    written.is_err()
}

/// Removes the file that fills the disk.
fn free(units: &Path) {
    let mut charms =
        fs::read_dir(units.join("units")).unwrap().map(|unit| unit.unwrap().path().join("charm"));
    let filler = charms.find_map(|charm| Some(charm.join("filler")).filter(|filler| filler.exists()));
    fs::remove_file(filler.expect("a unit that fills the disk")).unwrap();
}

on_both_stores![agent_continues_on_a_full_disk];

fn agent_continues_on_a_full_disk(site: &Site) {
    let disk = small_disk();
    let world = World::new(site).with_units_in(disk.path().join("units"));
    let mut agent = world.agent(&[]);
    world.deploy(&world.charm("greedy", &[("start", FILL)]), "greedy");
    wait_for("a full disk", DEADLINE, || is_full(&disk).then_some(()));
    world.wait_for_state("greedy/0", "started");
    // Its files may still fit into the reserve.
    world.deploy(&world.charm("calm", &[]), "calm");
    assert!(agent.is_running(), "{}", agent.log());
    // An agent also starts there.
    agent.kill9();
    let before = agent.log().len();
    let mut agent = world.agent(&[]);
    wait_for("the agent", DEADLINE, || agent.log()[before..].contains("holding the machine").then_some(()));
    assert!(agent.is_running(), "{}", agent.log());
    free(&world.units_dir());
    wait_for("the unit", DEADLINE, || {
        let state = world.unit("calm/0")["agent-state"].clone();
        if state == "install-error" {
            // The next agent retries, too, so there may be no error any more.
            world.operator.juju(&["resolved", "--retry", "calm/0"]);
        }
        (state == "started").then_some(())
    });
    agent.stop();
}

#[test]
fn up_continues_on_a_full_disk() {
    let host = Host::new();
    let mut up = host.up();
    host.wait_for_status("a machine", &["agent-state: running"]);
    for (name, hooks) in [("calm", &[("exposed", "open-port 80")]), ("greedy", &[("start", FILL)])] {
        let deployed = host.juju(&["deploy", &host.charm(name, hooks)]);
        assert_eq!(deployed.code, 0, "{deployed:?}");
    }
    wait_for("a full disk", DEADLINE, || is_full(&host.disk).then_some(()));
    let refused = deploy_until_refused(&host);
    refused.fails_with(1, "its disk is full");
    up.is_running();
    assert!(up.log().contains("disk full"), "{}", up.log());
    host.wait_for_status("the services", &["calm", "greedy"]);

    // `up` also starts on the full disk.
    up.signal("-KILL");
    let mut up = host.up();
    host.wait_for_status("the services", &["calm", "greedy"]);
    host.juju(&["expose", "calm"]).fails_with(1, "its disk is full");
    up.is_running();

    free(&host.disk.path().join("units"));
    wait_for("changes that are accepted", DEADLINE * 2, || {
        (host.juju(&["expose", "calm"]).code == 0).then_some(())
    });
    host.wait_for_status("a port, and heartbeats", &["- 80/tcp", "flag: OK\n    health: ok\n"]);
    up.is_running();
    assert_eq!(up.signal("-TERM"), Some(0), "{}", up.log());
}
