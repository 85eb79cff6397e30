//! A machine's agent that is killed after each of its steps, and whoever watches over a hook after each of theirs: each time
//! another one follows, and at the end everything was done, and nothing twice that was not cut short.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::scenario::Site;
use crate::harness::wire::{Client, Put, op};
use crate::harness::{Kind, Options, Store, wait_for};
use crate::steps::{Step, Stepping};
use crate::world::{DEADLINE, World, is_alive};

const HOOKS: [&str; 5] = ["install", "start", "exposed", "unexposed", "stop"];

/// `super:secret`.
const SUPER: &str = "super:lK75jTNcA+U9vtVEw5vB51mj/w4=";

#[test]
fn an_agent_that_is_killed_after_any_step_is_followed_by_one_that_goes_on() {
    let deaths = Deaths::until_there_are_no_more(Victim::Agent, 1);
    // What the life of a unit takes at least; a test that sees nothing of it would pass as well.
    assert!(deaths.done.len() > 100, "{:#?}", deaths.done);
}

#[test]
fn a_hook_whose_watcher_is_killed_after_any_step_runs_to_its_end() {
    let deaths = Deaths::until_there_are_no_more(Victim::Runner, 4);
    assert!(deaths.done.len() > 20, "{:#?}", deaths.done);
}

#[test]
fn a_hook_whose_watcher_and_agent_are_killed_after_any_step_runs_to_its_end() {
    // One unit: with the agent every other hook's watcher may go as well, and one that is cut short twice is not tried again.
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
    /// The steps that somebody was killed after; with each, whether the hook was the last one.
    done: BTreeSet<(String, bool)>,
    /// In this life of the units: how often each run has begun by now, if somebody was killed in it, and after what.
    again: BTreeMap<(String, u64), (usize, String)>,
    /// All control groups that were made.
    groups: BTreeSet<PathBuf>,
}

impl Deaths {
    /// Lets units live until there is nothing new to be killed after.
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
            life.has_left_nothing(&deaths);
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
                // Also if it fails: nobody would be left to end the agent.
                let _end = End { over: &over, agent: &agent };
                life.goes_by();
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

    /// Whether somebody is to be killed after this one: once after each.
    fn is_due(&mut self, step: &Step) -> bool {
        self.groups.extend(step.made.clone());
        match (&step.run, self.victim) {
            (None, Victim::Agent) => self.done.insert((step.what.clone(), false)),
            (Some(run), Victim::Runner | Victim::Both) => {
                // One that is cut short twice is not tried again, which is tested elsewhere.
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

/// Whether the hook has begun and its end is not written down.
fn is_in_the_middle(step: &str) -> bool {
    step.starts_with("write RUNS/log") || (step.ends_with("/N.new") && !step.starts_with("rename"))
}

/// Says that it is over and kills the agent, so that nobody waits for its next step.
pub(crate) struct End<'a> {
    pub(crate) over: &'a AtomicBool,
    pub(crate) agent: &'a AtomicI32,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // It may be gone already.
        let _ =
            Pid::from_raw(self.agent.load(Ordering::SeqCst)).map(|agent| kill_process(agent, Signal::KILL));
    }
}

/// Units that live from their deployment to their removal.
struct Life<'a> {
    world: &'a World,
    first: u64,
    units: u64,
}

impl Life<'_> {
    fn service(&self) -> String {
        // A name has a letter after a dash.
        format!("mortal-{}", "x".repeat(usize::try_from(self.first + 1).unwrap()))
    }

    fn unit(&self, number: u64) -> String {
        format!("{}/{number}", self.service())
    }

    /// As far as their operator sees it.
    fn goes_by(&self) {
        let (world, service) = (self.world, self.service());
        let (diary, left) = (world.operator.home().join("diary"), world.operator.home().join("left"));
        for path in [&diary, &left] {
            fs::write(path, "").unwrap();
            world.share(path);
        }
        let tell = format!("echo \"$JUJU_UNIT_NAME $JUJU_HOOK_NAME\" >>{}", diary.display());
        // One at a time, also where one was cut short.
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
            let unit = world.becomes(&self.unit(number), "started");
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
        // To its end: one that was cut short is still due, unless its unit is removed.
        let settled = |unit| {
            let state = fs::read_to_string(self.runs(unit).join("state")).unwrap_or_default();
            assert!(!state.contains("error"), "{}: {state}", self.unit(unit));
            !state.contains("running") && self.lines("diary", unit).iter().any(|line| line == hook)
        };
        wait_for(hook, DEADLINE, || (0..self.units).all(settled).then_some(()));
    }

    fn has_left_nothing(&self, deaths: &Deaths) {
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

/// What a session of a dead process leaves goes at once, and not when it expires.
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
