//! What it costs to plan for very many machines, and that one changed unit costs the work for one machine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use portcullis::firewall::observe::{Exposure, UnitFacts, View};
use portcullis::firewall::plan::{LastGranted, MachinePlan, plan_machine};
use portcullis::firewall::policy::Policy;
use portcullis::firewall::wanted::wanted;
use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, ServiceId, UnitId, UnitName};
use portcullis::store::changes::Key;
use portcullis::store::records;
use portcullis_provider::rule::Family;

pub(crate) const MACHINES: u32 = 10_000;

fn environment() -> View {
    let mut view = View::default();
    view.services.insert(ServiceId::new(0), Exposure::To(Ok(Vec::new())));
    for n in 0..MACHINES {
        let record = records::Machine {
            instance_id: Some(format!("i-{n}").parse().expect("an id")),
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

fn plan(view: &View, policy: &Policy, machine: MachineId) -> MachinePlan {
    let wanted = wanted(&view.claims_on(machine), &[Family::V4, Family::V6], policy);
    plan_machine(&wanted, &BTreeSet::new(), &BTreeSet::new(), &LastGranted::new(), 60)
}

/// What the process has in memory, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// What planning took.
#[derive(Debug)]
pub(crate) struct Measured {
    pub all: Duration,
    pub bytes: u64,
    pub one: Duration,
    /// What was read and what was planned again for one changed unit.
    pub for_one: (usize, usize),
}

pub(crate) fn measure() -> Measured {
    let before = resident();
    let (view, policy) = (environment(), Policy::with_own_ports([]));
    let start = Instant::now();
    let plans: BTreeMap<MachineId, MachinePlan> =
        view.machines.keys().map(|machine| (*machine, plan(&view, &policy, *machine))).collect();
    let all = start.elapsed();
    let bytes = resident().saturating_sub(before);
    let opens: usize = plans.values().map(|plan| plan.change.open.len()).sum();
    assert_eq!(opens, 6 * MACHINES as usize);
    let start = Instant::now();
    let dirty = BTreeSet::from([Key::Unit(UnitId::new(7))]);
    let (around, concerned) = (view.around(&dirty), view.concerned(dirty.iter().copied()));
    let again: Vec<MachinePlan> = concerned.iter().map(|machine| plan(&view, &policy, *machine)).collect();
    Measured { all, bytes, one: start.elapsed(), for_one: (around.len(), again.len()) }
}

#[test]
fn alone_planning_for_ten_thousand_machines_takes_no_time() {
    let Measured { all, bytes, one, for_one } = measure();
    println!("{MACHINES} machines planned in {all:?}, with {} MB; one changed unit in {one:?}", bytes >> 20);
    assert_eq!(for_one, (2, 1), "a unit and its service decide about one machine");
    // Generous: a debug build on a busy machine is many times slower than what counts.
    assert!(all.as_secs() < 5 && one.as_millis() < 20, "{all:?}, {one:?}");
    assert!(bytes < 50 << 20, "{bytes} bytes");
}
