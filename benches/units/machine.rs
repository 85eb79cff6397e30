//! A store, an operator, and a machine with its agent. This file does not compute any result.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, SystemTime};

use portcullis::model::UnitId;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::Tree as _;
use portcullis::store::{Address, Credential, ZkTree};

use crate::harness::{Store, wait_for};
use crate::operator::{Operator, output_of};

const DEADLINE: Duration = Duration::from_secs(120);

/// Clock ticks per second in the CPU times of a process.
const TICKS: f64 = 100.0;

pub(crate) struct Machine {
    _store: Store,
    operator: Operator,
    runtime: tokio::runtime::Runtime,
    tree: ZkTree,
}

pub(crate) struct Agent {
    child: Child,
    log: PathBuf,
}

pub(crate) fn wall() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap()
}

impl Machine {
    pub(crate) fn new() -> Self {
        let store = Store::keeper();
        let operator = Operator::with_store(&store.addr().to_string());
        operator.does(&["bootstrap"]);
        operator.does(&["add-machine", "--instance-id", "metal"]);
        let held = fs::read_to_string(operator.config("local.json")).unwrap();
        let held: serde_json::Value = serde_json::from_str(&held).unwrap();
        let credential = Credential::parse(held["auth"].as_str().unwrap()).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let address: Address = store.addr().to_string().parse().unwrap();
        let tree = runtime.block_on(ZkTree::connect(&address, Some(&credential))).unwrap();
        Self { _store: store, operator, runtime, tree }
    }

    pub(crate) fn juju(&self, args: &[&str]) {
        let done = output_of(self.operator.command("juju").args(args));
        assert_eq!(done.code, 0, "{args:?}: {done:?}");
    }

    fn units_dir(&self) -> PathBuf {
        self.operator.home().join("units")
    }

    /// Starts an agent and waits until it holds the machine.
    pub(crate) fn agent(&self) -> Agent {
        let log = self.operator.home().join("agent.log");
        let held = || fs::read_to_string(&log).unwrap_or_default().matches("holding the machine").count();
        let before = held();
        let child = self
            .operator
            .command("portcullis")
            .args(["--log-level", "info", "machine", "--id", "0", "--units-dir"])
            .arg(self.units_dir())
            .stdout(Stdio::null())
            .stderr(File::options().create(true).append(true).open(&log).unwrap())
            .spawn()
            .unwrap();
        wait_for("an agent", DEADLINE, || (held() > before).then_some(()));
        Agent { child, log }
    }

    pub(crate) fn charm(&self, name: &str, hooks: &[(&str, &str)]) -> String {
        let metadata = format!("name: {name}\nsummary: A charm\ndescription: To be measured.\n");
        let charm = self.operator.charm(name, &metadata);
        fs::create_dir_all(Path::new(&charm).join("hooks")).unwrap();
        for (hook, body) in hooks {
            let path = Path::new(&charm).join("hooks").join(hook);
            fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        charm
    }

    fn data(&self, path: &NodePath) -> Option<Vec<u8>> {
        self.runtime.block_on(self.tree.get(path)).ok().map(|node| node.data)
    }

    pub(crate) fn waits_until_started(&self, unit: usize) {
        let path = paths::unit_state(UnitId::new(unit.try_into().unwrap()));
        wait_for("a unit that is started", DEADLINE, || {
            let state: serde_json::Value = serde_json::from_slice(&self.data(&path)?).ok()?;
            (state["state"] == "started").then_some(())
        });
    }

    pub(crate) fn waits_until_tended(&self, unit: usize) {
        let path = paths::unit_agent(UnitId::new(unit.try_into().unwrap()));
        wait_for("a unit that is tended", DEADLINE, || self.data(&path).map(drop));
    }

    /// Returns the number of processes that read the output of services on this machine, and the
    /// sum of their proportional memory (PSS).
    pub(crate) fn readers_mb(&self) -> (usize, f64) {
        let units = self.units_dir();
        let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|entry| entry.path());
        let reader = |process: &PathBuf| {
            let line = fs::read(process.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("\0keep-log\0") && line.contains(units.to_str().unwrap())
        };
        let shares: Vec<f64> = processes.filter(reader).filter_map(|process| share_mb(&process)).collect();
        (shares.len(), shares.iter().sum())
    }

    /// Waits for a line of a file that the hooks of the first unit write.
    pub(crate) fn line(&self, file: &str, number: usize) -> String {
        let path = self.units_dir().join("units/unit-0000000000/charm").join(file);
        wait_for("a hook", DEADLINE, || {
            let text = fs::read_to_string(&path).ok()?;
            text.split_inclusive('\n')
                .nth(number)
                .filter(|line| line.ends_with('\n'))
                .map(|line| line.trim().to_owned())
        })
    }
}

impl Agent {
    pub(crate) fn kill9(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn hooks_run(&self) -> usize {
        fs::read_to_string(&self.log).unwrap().matches("running hook").count()
    }

    pub(crate) fn memory_mb(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        mb(&status, "VmRSS:").unwrap()
    }

    /// Returns the proportional memory (PSS) of the process.
    pub(crate) fn share_mb(&self) -> f64 {
        share_mb(Path::new(&format!("/proc/{}", self.child.id()))).unwrap()
    }

    /// Returns the CPU use in percent of one core.
    pub(crate) fn cpu_share(&self, time: Duration) -> f64 {
        let ticks = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
            fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()
        };
        let before = ticks();
        std::thread::sleep(time);
        (ticks() - before) / TICKS / time.as_secs_f64() * 100.0
    }
}

fn mb(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
}

fn share_mb(process: &Path) -> Option<f64> {
    mb(&fs::read_to_string(process.join("smaps_rollup")).ok()?, "Pss:")
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The agent may have ended already.
        let _ = (self.child.kill(), self.child.wait());
    }
}
