//! Nodes, agents and units in memory, under random events. For every order of
//! events, each dep service finally runs exactly if its unit has a proxy.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::super::name::dep_of;
use super::*;

const NODES: usize = 3;
const PROXIES: usize = 2;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// A source starts a proxy: source, its number, and the node of the target.
    Start(usize, usize, usize),
    Stop(usize, usize),
    LinkLost(usize),
    LinkHealed(usize),
    Reboot(usize),
    UnitStops(usize),
    DepStopped(usize),
    JobEnds {
        node: usize,
        fails: bool,
    },
    /// The reports of a node arrive. The ends of jobs may arrive before them.
    ReportsArrive(usize),
    ManagerRestarts,
    Passes(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let node = || 0..NODES;
    prop_oneof![
        4 => (node(), 0..PROXIES, node()).prop_map(|(source, name, on)| Event::Start(source, name, on)),
        2 => (node(), 0..PROXIES).prop_map(|(source, name)| Event::Stop(source, name)),
        2 => node().prop_map(Event::LinkLost),
        3 => node().prop_map(Event::LinkHealed),
        1 => node().prop_map(Event::Reboot),
        1 => node().prop_map(Event::UnitStops),
        1 => node().prop_map(Event::DepStopped),
        4 => (node(), any::<bool>()).prop_map(|(node, fails)| Event::JobEnds { node, fails }),
        4 => node().prop_map(Event::ReportsArrive),
        1 => Just(Event::ManagerRestarts),
        3 => (0..20_000_u64).prop_map(Event::Passes),
    ]
}

/// A node: its systemd with one unit, and its agent.
#[derive(Debug, Default)]
struct Machine {
    is_linked: bool,
    instance: u64,
    unit: bool,
    dep: bool,
    job: Option<bool>,
    /// States of the unit and of the dep service that were not delivered yet.
    reports: VecDeque<(bool, bool)>,
    /// The proxies of the agent: the target node, and the instance once they are active.
    proxies: BTreeMap<String, (usize, Option<u64>)>,
}

struct World {
    core: Core,
    now: Duration,
    machines: [Machine; NODES],
    watched: BTreeSet<NodeUnit>,
    /// Whether units stop when nothing needs them.
    stops_unneeded: bool,
}

fn name(index: usize) -> NodeName {
    format!("n{index}").parse().unwrap()
}

fn index(of: &NodeName) -> usize {
    of.as_str()[1..].parse().unwrap()
}

impl World {
    fn new(stops_unneeded: bool) -> Self {
        let (machines, watched) = (Default::default(), BTreeSet::new());
        let mut world = Self { core: Self::core(), now: at(0), machines, watched, stops_unneeded };
        (0..NODES).for_each(|node| world.link(node));
        world
    }

    fn core() -> Core {
        let mut core = Core::new(GRACE);
        let all: BTreeSet<NodeName> = (0..NODES).map(name).collect();
        core.set_rules(all.iter().map(|node| (node.clone(), Some(all.clone()))).collect(), at(0));
        core
    }

    /// Executes effects, and those that follow from them.
    fn execute(&mut self, effects: Vec<Effect>) {
        let mut queue = VecDeque::from(effects);
        while let Some(effect) = queue.pop_front() {
            let now = self.now;
            let more = match effect {
                Effect::StartDep { target } => self.job(&target, true),
                Effect::StopDep { target } => self.job(&target, false),
                Effect::Watch { target } => {
                    self.watched.insert(target.clone());
                    self.report(index(&target.0))
                }
                Effect::Unwatch { target } => {
                    self.watched.remove(&target);
                    Vec::new()
                }
                Effect::Refresh { target } => self.report(index(&target.0)),
                Effect::Ready { proxy: (source, proxy), result } => {
                    let machine = &mut self.machines[index(&source)];
                    match (machine.is_linked, result) {
                        (false, _) => {}
                        (true, Ok(instance)) => {
                            if let Some(known) = machine.proxies.get_mut(&proxy) {
                                known.1 = Some(instance);
                            }
                        }
                        (true, Err(_)) => drop(machine.proxies.remove(&proxy)),
                    }
                    Vec::new()
                }
                Effect::TargetStopped { proxy, .. } => {
                    let machine = &mut self.machines[index(&proxy.0)];
                    if machine.is_linked {
                        machine.proxies.remove(&proxy.1);
                        self.core.removed(&proxy, now)
                    } else {
                        Vec::new()
                    }
                }
            };
            queue.extend(more);
        }
    }

    fn job(&mut self, target: &NodeUnit, is_start: bool) -> Vec<Effect> {
        let machine = &mut self.machines[index(&target.0)];
        assert!(machine.is_linked && machine.job.is_none(), "one job at a time, on a node that is online");
        machine.job = Some(is_start);
        Vec::new()
    }

    /// Sends a report, which arrives later.
    fn report(&mut self, node: usize) -> Vec<Effect> {
        let key = (name(node), "db.service".to_owned());
        let machine = &mut self.machines[node];
        if machine.is_linked && self.watched.contains(&key) {
            machine.reports.push_back((machine.unit, machine.dep));
        }
        Vec::new()
    }

    fn deliver(&mut self, node: usize) {
        let activity = |active| if active { Activity::Active } else { Activity::Inactive };
        while let Some((unit, dep)) = self.machines[node].reports.pop_front() {
            let name = name(node);
            let effects = self.core.unit_state(&name, &dep_of("db.service"), activity(dep), self.now);
            self.execute(effects);
            let effects = self.core.unit_state(&name, "db.service", activity(unit), self.now);
            self.execute(effects);
        }
    }

    fn link(&mut self, node: usize) {
        let machine = &mut self.machines[node];
        if std::mem::replace(&mut machine.is_linked, true) {
            return;
        }
        let (name, now) = (name(node), self.now);
        self.core.node_online(&name, now);
        let report = self.report(node);
        self.execute(report);
        for (proxy, (on, instance)) in self.machines[node].proxies.clone() {
            let (key, on) = ((name.clone(), proxy), target(&format!("n{on}")));
            let effects = match instance {
                Some(instance) => self.core.established(key, on, instance, now),
                None => self.core.requested(key, on, BTreeSet::new(), now),
            };
            self.execute(effects);
        }
        let machine = &self.machines[node];
        let deps = if machine.dep { vec![dep_of("db.service")] } else { Vec::new() };
        let effects = self.core.announced(&name, machine.instance, &deps, now);
        self.execute(effects);
    }

    fn cut(&mut self, node: usize) {
        if std::mem::replace(&mut self.machines[node].is_linked, false) {
            // systemd goes on with the job.
            if let Some(is_start) = self.machines[node].job.take() {
                self.finish(node, is_start);
            }
            self.machines[node].reports.clear();
            let effects = self.core.node_lost(&name(node), self.now);
            self.execute(effects);
        }
    }

    fn finish(&mut self, node: usize, is_start: bool) {
        let machine = &mut self.machines[node];
        machine.dep = is_start;
        machine.unit = is_start || (machine.unit && !self.stops_unneeded);
    }

    fn changed(&mut self, node: usize) {
        let effects = self.report(node);
        self.execute(effects);
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Start(source, number, on) => {
                let proxy = format!("p{number}");
                let machine = &mut self.machines[source];
                machine.proxies.insert(proxy.clone(), (on, None));
                if machine.is_linked {
                    let target = target(&format!("n{on}"));
                    let effects =
                        self.core.requested((name(source), proxy), target, BTreeSet::new(), self.now);
                    self.execute(effects);
                }
            }
            Event::Stop(source, number) => {
                let machine = &mut self.machines[source];
                let was = machine.proxies.remove(&format!("p{number}")).is_some();
                if was && machine.is_linked {
                    let effects = self.core.removed(&(name(source), format!("p{number}")), self.now);
                    self.execute(effects);
                }
            }
            Event::LinkLost(node) => self.cut(node),
            Event::LinkHealed(node) => self.link(node),
            Event::Reboot(node) => {
                self.cut(node);
                let machine = &mut self.machines[node];
                (machine.unit, machine.dep) = (false, false);
                machine.instance += 1;
            }
            Event::UnitStops(node) => {
                (self.machines[node].unit, self.machines[node].dep) = (false, false);
                self.changed(node);
            }
            Event::DepStopped(node) => {
                self.machines[node].dep = false;
                self.changed(node);
            }
            Event::JobEnds { node, fails } => {
                let Some(is_start) = self.machines[node].job.take() else { return };
                if !fails {
                    self.finish(node, is_start);
                }
                self.changed(node);
                let result = if fails { Err("failed".to_owned()) } else { Ok(()) };
                let effects = self.core.job_ended(&name(node), &dep_of("db.service"), &result, self.now);
                self.execute(effects);
            }
            Event::ReportsArrive(node) => self.deliver(node),
            Event::ManagerRestarts => {
                (0..NODES).for_each(|node| self.cut(node));
                (self.core, self.watched) = (Self::core(), BTreeSet::new());
            }
            Event::Passes(ms) => {
                self.now += at(ms);
                let effects = self.core.tick(self.now);
                self.execute(effects);
            }
        }
    }

    /// Heals all links, and lets everything end that is under way.
    fn converge(&mut self) {
        (0..NODES).for_each(|node| self.link(node));
        for _ in 0..100 {
            for node in 0..NODES {
                self.apply(Event::JobEnds { node, fails: false });
                self.deliver(node);
            }
            match self.core.deadline() {
                Some(deadline) => {
                    assert!(deadline > self.now, "a deadline that is over is repeated for ever");
                    self.now = deadline;
                    let effects = self.core.tick(self.now);
                    self.execute(effects);
                }
                None if self.machines.iter().all(|it| it.job.is_none() && it.reports.is_empty()) => return,
                None => {}
            }
        }
        panic!("does not converge");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_dep_runs_exactly_while_its_unit_has_a_proxy(
        events in prop::collection::vec(event(), 0..60),
        stops_unneeded in any::<bool>(),
    ) {
        let mut world = World::new(stops_unneeded);
        for event in events {
            world.apply(event);
        }
        world.converge();
        for (node, machine) in world.machines.iter().enumerate() {
            let of = |machine: &Machine| machine.proxies.values().filter(|(on, _)| *on == node).count();
            let count: usize = world.machines.iter().map(of).sum();
            prop_assert_eq!(machine.dep, count > 0, "n{} has {} proxies", node, count);
            prop_assert!(machine.unit || count == 0, "a proxy of a unit that does not run");
            prop_assert!(machine.proxies.values().all(|(_, instance)| instance.is_some()), "a proxy waits");
        }
        let needed = world.machines.iter().filter(|machine| machine.dep).count();
        prop_assert_eq!(world.watched.len(), needed, "a record is left");
        prop_assert!(world.core.list().iter().all(|listed| listed.state != ListedState::Waiting));
    }
}
