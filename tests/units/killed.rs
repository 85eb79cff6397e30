//! Kills a machine's agent after each of its steps, and a hook's runner after each of its steps.
//! Every time a new process takes over; at the end all work is done, and only interrupted hooks
//! have run twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::scenario::Site;
use crate::harness::wire::{Client, Put, op};
use crate::harness::{Kind, Options, Store, wait_for};
use crate::strace::{Step, Stepping};
use crate::world::{DEADLINE, World, is_alive};

const HOOKS: [&str; 5] = ["install", "start", "exposed", "unexposed", "stop"];

/// The digest of `super:secret`.
const SUPER: &str = "super:lK75jTNcA+U9vtVEw5vB51mj/w4=";

#[test]
fn next_agent_continues_after_a_kill_at_any_step() {
    let deaths = Deaths::until_there_are_no_more(Victim::Agent, 1);
    // Minimum number of steps in the life of a unit; without it, a test that sees no steps would
    // pass.
    assert!(deaths.done.len() > 100, "{:#?}", deaths.done);
}

#[test]
fn hook_completes_after_its_watcher_is_killed_at_any_step() {
    let deaths = Deaths::until_there_are_no_more(Victim::Runner, 4);
    assert!(deaths.done.len() > 20, "{:#?}", deaths.done);
}

#[test]
fn hook_completes_after_its_watcher_and_agent_are_killed_at_any_step() {
    // One unit only: killing the agent may also end the runners of other hooks, and a hook that is
    // interrupted twice is not retried.
    let deaths = Deaths::until_there_are_no_more(Victim::Both, 1);
    assert!(deaths.done.len() > 20, "{:#?}", deaths.done);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Agent,
    Runner,
    Both,
}

struct Deaths {
    victim: Victim,
    /// The steps after which a process was killed, each with whether its hook was the last one.
    done: BTreeSet<(String, bool)>,
    /// For each run with a kill, in the current life of the units: how often it has begun, and the
    /// step after which the kill happened.
    again: BTreeMap<(String, u64), (usize, String)>,
    /// All control groups that were created.
    groups: BTreeSet<PathBuf>,
}

impl Deaths {
    /// Deploys and removes units until a whole life has no step without a kill after it.
    fn until_there_are_no_more(victim: Victim, units: u64) -> Self {
        let options = Options { super_digest: Some(SUPER.to_owned()), ..Options::default() };
        let store = Store::start(Kind::Keeper, options);
        let site = Site { kind: Kind::Keeper, addr: store.addr(), chroot: String::new() };
        let world = World::new(&site);
        let mut deaths =
            Self { victim, done: BTreeSet::new(), again: BTreeMap::new(), groups: BTreeSet::new() };
        for first in (0..).step_by(usize::try_from(units).unwrap()) {
            let before = deaths.done.len();
            deaths.again.clear();
            let life = Life { world: &world, first, units };
            deaths.go_through(&site, &life);
            life.assert_nothing_left(&deaths);
            if deaths.done.len() == before {
                return deaths;
            }
        }
        unreachable!("there are always more units")
    }

    fn go_through(&mut self, site: &Site, life: &Life<'_>) {
        let agent = AtomicI32::new(0);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Also on failure: otherwise the agent would never end.
                let _end = End { over: &over, agent: &agent };
                life.run_commands();
            });
            while !over.load(Ordering::SeqCst) {
                let mut stepping = Stepping::start(life.world, self.victim != Victim::Agent);
                agent.store(stepping.agent(), Ordering::SeqCst);
                while let Some(step) = stepping.next() {
                    if !self.is_due(&step) {
                        Stepping::go_on(&step);
                        continue;
                    }
                    Stepping::kill(&step);
                    if self.victim != Victim::Runner {
                        break;
                    }
                }
                drop(stepping);
                expire(site, life);
            }
        });
    }

    /// Returns whether to kill a process after this step: once after each step.
    fn is_due(&mut self, step: &Step) -> bool {
        self.groups.extend(step.made.clone());
        match (&step.run, self.victim) {
            (None, Victim::Agent) => self.done.insert((step.what.clone(), false)),
            (Some(run), Victim::Runner | Victim::Both) => {
                // A run that is interrupted twice is not retried; another test covers that.
                if self.again.contains_key(run) || !self.done.insert((step.what.clone(), run.1 == 5)) {
                    return false;
                }
                let begun = if is_in_the_middle(&step.what) { 2 } else { 1 };
                self.again.insert(run.clone(), (begun, step.what.clone()));
                true
            }
            _ => false,
        }
    }
}

/// Returns whether the hook has begun and its result is not yet recorded.
fn is_in_the_middle(step: &str) -> bool {
    step.starts_with("write RUNS/log") || (step.ends_with("/N.new") && !step.starts_with("rename"))
}

/// On drop, sets `over` and kills the agent, so that no thread waits for its next step.
pub(crate) struct End<'a> {
    pub(crate) over: &'a AtomicBool,
    pub(crate) agent: &'a AtomicI32,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // The agent may have ended already.
        let _ =
            Pid::from_raw(self.agent.load(Ordering::SeqCst)).map(|agent| kill_process(agent, Signal::KILL));
    }
}

/// Units from their deployment to their removal.
struct Life<'a> {
    world: &'a World,
    first: u64,
    units: u64,
}

impl Life<'_> {
    fn service(&self) -> String {
        // A service name must have a letter after a dash.
        format!("mortal-{}", "x".repeat(usize::try_from(self.first + 1).unwrap()))
    }

    fn unit(&self, number: u64) -> String {
        format!("{}/{number}", self.service())
    }

    /// Runs the operator's commands for the whole life and checks their effects.
    fn run_commands(&self) {
        let (world, service) = (self.world, self.service());
        let (diary, left) = (world.operator.home().join("diary"), world.operator.home().join("left"));
        for path in [&diary, &left] {
            fs::write(path, "").unwrap();
            world.share(path);
        }
        let tell = format!("echo \"$JUJU_UNIT_NAME $JUJU_HOOK_NAME\" >>{}", diary.display());
        // Hooks of a unit run one at a time, also after an interrupted one.
        let alone =
            format!("exec 9>>busy; flock -n 9 || echo \"$JUJU_UNIT_NAME both\" >>{}", diary.display());
        let log = format!("{alone}; {tell}; echo done; sleep 0.1");
        let start = format!("setsid sleep 1000 & echo $JUJU_UNIT_NAME $! >>{}; {log}", left.display());
        let hooks = HOOKS.map(|hook| (hook, if hook == "start" { start.as_str() } else { &log }));
        let charm = world.charm("mortal", &hooks);
        world.operator.does(&["deploy", &charm, &service, "-n", &self.units.to_string(), "--to", "0"]);
        world.operator.does(&["expose", &service]);
        self.all_ran("exposed");
        world.operator.does(&["unexpose", &service]);
        self.all_ran("unexposed");
        for number in 0..self.units {
            let unit = world.wait_for_state(&self.unit(number), "started");
            assert_eq!(unit.get("hook-error"), None, "{unit}");
            let alive = self.left(number).iter().filter(|pid| is_alive(pid)).count();
            assert_eq!(alive, 1, "one service of {}", self.unit(number));
        }
        world.operator.does(&["destroy-service", &service]);
        wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    }

    fn lines(&self, file: &str, unit: u64) -> Vec<String> {
        let text = fs::read_to_string(self.world.operator.home().join(file)).unwrap_or_default();
        let unit = format!("{} ", self.unit(unit));
        text.lines().filter_map(|line| line.strip_prefix(&unit)).map(str::to_owned).collect()
    }

    fn runs(&self, unit: u64) -> PathBuf {
        self.world.units_dir().join(format!("runs/unit-{:010}", self.first + unit))
    }

    fn left(&self, unit: u64) -> Vec<String> {
        self.lines("left", unit)
    }

    fn all_ran(&self, hook: &str) {
        // Waits for the end of the hook: an interrupted one is still due, unless its unit is
        // removed.
        let settled = |unit| {
            let state = fs::read_to_string(self.runs(unit).join("state")).unwrap_or_default();
            assert!(!state.contains("error"), "{}: {state}", self.unit(unit));
            !state.contains("running") && self.lines("diary", unit).iter().any(|line| line == hook)
        };
        wait_for(hook, DEADLINE, || (0..self.units).all(settled).then_some(()));
    }

    fn assert_nothing_left(&self, deaths: &Deaths) {
        let units = self.world.units_dir();
        for unit in 0..self.units {
            let key = self.runs(unit).display().to_string();
            let wanted: Vec<&str> = (1..)
                .zip(HOOKS)
                .flat_map(|(run, hook)| {
                    vec![hook; deaths.again.get(&(key.clone(), run)).map_or(1, |(begun, _)| *begun)]
                })
                .collect();
            assert_eq!(self.lines("diary", unit), wanted, "{}: {:#?}", self.unit(unit), deaths.again);
            assert!(!self.left(unit).iter().any(|pid| is_alive(pid)), "a service of {}", self.unit(unit));
        }
        for (place, most) in [(units.join("charms"), 1), (units.join("units"), 0), (units.join("runs"), 0)] {
            let found: Vec<_> = fs::read_dir(&place).unwrap().map(|file| file.unwrap().file_name()).collect();
            assert!(found.len() <= most, "{}: {found:?}", place.display());
        }
        let config = self.world.operator.config("local-machines");
        let found: Vec<_> = fs::read_dir(config).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(found, ["machine-0000000000.json"]);
        let groups: Vec<_> = deaths.groups.iter().filter(|group| group.exists()).collect();
        assert!(groups.is_empty(), "{groups:?}");
    }
}

/// Deletes the ephemeral nodes of a killed process at once, instead of when its session expires.
fn expire(site: &Site, life: &Life<'_>) {
    let mut client = Client::connect(site.addr);
    let auth = Put::new().int(0).bytes("digest").bytes("super:secret");
    client.send_as(-4, op::AUTH, &auth).expect("sent");
    assert_eq!(client.receive().expect("an answer").err, 0);
    let units = (0..life.units).map(|unit| format!("/units/unit-{:010}/agent", life.first + unit));
    for path in units.chain(["/machines/machine-0000000000/agent".to_owned()]) {
        let deleted = client.call(op::DELETE, &Put::new().bytes(&path).int(-1));
        assert!([0, -101].contains(&deleted.err), "{path}: {}", deleted.err);
    }
    client.close();
}
