//! Measures the cost of planning for very many machines, and checks that a change of one unit plans
//! one machine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis::firewall::capacity::Capacity;
use portcullis::firewall::observe::{Exposure, UnitFacts, View};
use portcullis::firewall::plan::{LastGranted, MachinePlan, plan_machine};
use portcullis::firewall::policy::Policy;
use portcullis::firewall::wanted::wanted;
use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, ServiceId, UnitId, UnitName};
use portcullis::store::changes::Key;
use portcullis::store::records;
use portcullis_provider::rule::{Family, Rule};
use rustix::time::{ClockId, clock_gettime};

pub(crate) const MACHINES: u32 = 10_000;

fn environment() -> View {
    let mut view = View::default();
    view.services.insert(ServiceId::new(0), Exposure::To(Ok(Vec::new())));
    for n in 0..MACHINES {
        let record = records::Machine {
            instance_id: Some(format!("i-{n}").parse().expect("an id")),
            name: None,
            addresses: Vec::new(),
            adopted: false,
            rest: serde_json::Map::new(),
        };
        view.machines.insert(MachineId::new(n), Ok(record));
        let ports = ["80", "443", "8000-8010"].map(|text| parse_argument(text).expect("a port"));
        let name = UnitName::new("web".parse().expect("a name"), n);
        let record = Ok((name, ServiceId::new(0), Some(MachineId::new(n))));
        view.units.insert(UnitId::new(n), UnitFacts { record, ports: Ok(ports.to_vec()), listed_on: None });
    }
    view
}

/// The rules of each machine: none yet, or the wanted ones.
type Owned = BTreeMap<MachineId, BTreeSet<Rule>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    NothingOpen,
    Converged,
}

fn owned(view: &View, policy: &Policy, case: Case) -> Owned {
    let rules = |machine| wanted(&view.requests_on(machine), &BOTH, policy).rules();
    let machines = view.machines.keys().copied();
    match case {
        Case::NothingOpen => machines.map(|machine| (machine, BTreeSet::new())).collect(),
        Case::Converged => machines.map(|machine| (machine, rules(machine).rules().collect())).collect(),
    }
}

const BOTH: [Family; 2] = [Family::V4, Family::V6];

fn plan(view: &View, policy: &Policy, machine: MachineId, owned: &Owned) -> MachinePlan {
    let wanted = wanted(&view.requests_on(machine), &BOTH, policy);
    plan_machine(
        &wanted,
        &owned[&machine],
        &BTreeSet::new(),
        &LastGranted::new(),
        policy,
        Capacity::new(Some(60), &[], false),
    )
}

/// The resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// The CPU time of this process so far, over all cores.
fn work() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("a time since the start")
}

/// The cost of planning. Durations are CPU time, because planning never waits and other load on the
/// machine must not count.
#[derive(Debug)]
pub(crate) struct Measured {
    pub all: Duration,
    /// Memory of the view, the rules of the machines, and the plans.
    pub bytes: u64,
    /// Time to plan again after one unit has opened another port.
    pub one: Duration,
    /// The number of objects read again and of machines planned again for that port.
    pub for_one: (usize, usize),
}

pub(crate) fn measure(case: Case) -> Measured {
    let before = resident();
    let (mut view, policy) = (environment(), Policy::with_own_ports([]));
    let owned = owned(&view, &policy, case);
    let start = work();
    let plans: BTreeMap<MachineId, MachinePlan> =
        view.machines.keys().map(|machine| (*machine, plan(&view, &policy, *machine, &owned))).collect();
    let all = work() - start;
    let bytes = resident().saturating_sub(before);
    let opens: usize = plans.values().map(|plan| plan.change.open.len()).sum();
    assert_eq!(opens, if case == Case::Converged { 0 } else { 6 * MACHINES as usize });

    let changed = UnitId::new(7);
    let mut facts = view.units.get(changed).expect("a unit").clone();
    facts.ports.as_mut().expect("ports").push(parse_argument("5432").expect("a port"));
    let start = work();
    view.units.insert(changed, facts);
    let dirty = BTreeSet::from([Key::Unit(changed)]);
    let (around, concerned) =
        (view.keys_to_reread(dirty.iter().copied()), view.affected_machines(dirty.iter().copied()));
    let again: Vec<MachinePlan> =
        concerned.iter().map(|machine| plan(&view, &policy, *machine, &owned)).collect();
    let one = work() - start;
    let opens: usize = again.iter().map(|plan| plan.change.open.len()).sum();
    assert_eq!(opens, if case == Case::Converged { 2 } else { 8 });
    Measured { all, bytes, one, for_one: (around.len(), again.len()) }
}

#[test]
fn alone_one_changed_unit_among_ten_thousand_machines_plans_one_machine() {
    for case in [Case::NothingOpen, Case::Converged] {
        let Measured { all, bytes, one, for_one } = measure(case);
        println!(
            "{case:?}: {MACHINES} machines in {all:?}, with {} MB; one changed unit in {one:?}",
            bytes >> 20
        );
        assert_eq!(for_one, (2, 1), "the unit and its service are read, and one machine is planned");
        assert!(bytes < 50 << 20, "{bytes} bytes");
    }
}
