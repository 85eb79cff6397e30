//! Short scenarios, each repeated with a crash before the effect, a crash after the effect, or a
//! stop at every single call that the agents make in it. In each case the open ports must become
//! the wanted ports.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::actions::{Action, RETRY_RECOVERY};
use crate::faults::{Fault, Mishap};
use crate::record::Armed;
use crate::seeds::{first_line, run_in_world};
use crate::world::{Shape, World};

use Action::{
    AddMachine, AddUnit, Close, Corrupt, Crash, Deploy, Destroy, EditRules, EndProviderFaults, Expire,
    Expose, ExposeTo, FailCalls, Flood, Interrupt, LoseInstance, Open, RemoveUnit, RepairStore, Stop,
    Terminate, Unexpose,
};

/// Long enough for the agents to process an action if there is no fault.
const STEP: Duration = Duration::from_millis(30);

struct Scenario {
    name: &'static str,
    agents: usize,
    provisions: bool,
    actions: &'static [Action],
}

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "ports are opened and closed",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Open(0, 0), Open(1, 3), Open(0, 5), Close(0, 0), Unexpose(0)],
    },
    Scenario {
        name: "two units share a port",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Expose(1), Open(0, 0), Open(2, 0), Open(1, 0), Close(0, 0), Close(2, 0)],
    },
    Scenario {
        name: "ranges are replaced",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 6),
            Open(0, 8),
            Close(0, 6),
            Open(0, 0),
            Open(0, 2),
            Open(0, 1),
            Close(0, 1),
        ],
    },
    Scenario {
        name: "all services are unexposed",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Expose(1), Expose(2), Flood(30), Unexpose(0), Unexpose(1), Unexpose(2)],
    },
    Scenario {
        name: "a unit cannot be read",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Open(1, 3),
            Corrupt(Mishap::CorruptPorts, 0, 0),
            Open(1, 1),
            Close(1, 3),
            RepairStore,
            Close(0, 0),
        ],
    },
    Scenario {
        name: "a record cannot be read",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Corrupt(Mishap::CorruptUnit, 0, 1),
            Open(1, 0),
            Corrupt(Mishap::CorruptFlag, 0, 0),
            RepairStore,
        ],
    },
    Scenario {
        name: "a name is used again",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Open(1, 1),
            Destroy(0),
            Deploy(0, 1),
            Expose(0),
            Open(4, 2),
            RemoveUnit(4),
        ],
    },
    Scenario {
        name: "machines are added and removed",
        agents: 1,
        provisions: false,
        actions: &[AddMachine, AddUnit(0, 3), Expose(0), Open(6, 0), RemoveUnit(6), Terminate(3)],
    },
    Scenario {
        name: "exposed to some sources",
        agents: 1,
        provisions: false,
        actions: &[ExposeTo(0, 0), Open(0, 0), Open(1, 5), ExposeTo(0, 1), Expose(0), Unexpose(0)],
    },
    Scenario {
        name: "a third party edits the rules",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            EditRules(Mishap::RuleRemoved, 0),
            EditRules(Mishap::RuleAdded, 1),
            EditRules(Mishap::GroupDrift, 2),
            Interrupt,
            EditRules(Mishap::ForeignEqual, 0),
            Open(0, 1),
            Interrupt,
        ],
    },
    Scenario {
        name: "provider calls fail",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            FailCalls(2),
            Open(0, 0),
            Open(1, 3),
            Close(0, 0),
            EndProviderFaults,
            Open(0, 2),
        ],
    },
    Scenario {
        name: "one agent replaces the other",
        agents: 2,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Crash(0),
            Open(1, 1),
            Expire(1),
            Close(0, 0),
            Stop(0),
            Stop(1),
            Open(0, 3),
        ],
    },
    Scenario {
        name: "instances are launched and terminated",
        agents: 1,
        provisions: true,
        actions: &[
            AddMachine,
            AddUnit(0, 3),
            Expose(0),
            Open(6, 0),
            AddMachine,
            RemoveUnit(6),
            Terminate(3),
            Terminate(4),
        ],
    },
    Scenario {
        name: "a group and an instance are lost",
        agents: 2,
        provisions: true,
        actions: &[
            Expose(0),
            Open(0, 0),
            EditRules(Mishap::GroupDeleted, 0),
            LoseInstance(1),
            Interrupt,
            Crash(0),
            Open(0, 1),
            AddMachine,
        ],
    },
];

/// Runs a scenario with one fault. Returns false if there was no call left for the fault.
fn run_scenario(scenario: &Scenario, fault: Fault, skip: u64) -> bool {
    run_in_world(async {
        let mut world = World::new(3, Shape::small(scenario.agents, scenario.provisions), false).await;
        world.perform(Action::Arm(Armed { fault, kind: None, skip })).await;
        for &action in scenario.actions {
            world.perform(action).await;
            world.pause(STEP).await;
            world.check().await;
        }
        let occurred = !world.has_faults();
        world.disarm();
        world.perform(RepairStore).await;
        world.perform(EndProviderFaults).await;
        // Triggers a read of everything, for changes that only a resync would detect.
        world.interceptor.store.interrupt();
        world.pause(2 * RETRY_RECOVERY).await;
        world.forget_faults();
        world.check().await;
        occurred
    })
}

#[test]
fn alone_scenarios_converge_when_any_call_is_cut_off() {
    let faults = [Fault::CrashBefore, Fault::CrashAfter, Fault::Stop];
    let tasks: Vec<(&Scenario, Fault)> =
        SCENARIOS.iter().flat_map(|scenario| faults.map(|fault| (scenario, fault))).collect();
    let (next, runs) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = std::time::Instant::now();
    std::panic::set_hook(Box::new(|_| {}));
    let work = || -> Vec<String> {
        let mut failed = Vec::new();
        while let Some((scenario, fault)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            for skip in 0.. {
                runs.fetch_add(1, Ordering::Relaxed);
                match std::panic::catch_unwind(|| run_scenario(scenario, *fault, skip)) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(panic) => {
                        failed.push(format!(
                            "{}: {fault:?} at call {skip}: {}",
                            scenario.name,
                            first_line(&*panic)
                        ));
                        break;
                    }
                }
            }
        }
        failed
    };
    let failed: Vec<String> = std::thread::scope(|scope| {
        let workers = std::thread::available_parallelism().map_or(2, usize::from);
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no panic of its own")).collect()
    });
    drop(std::panic::take_hook());
    println!("{} runs in {:.1?}", runs.load(Ordering::Relaxed), begun.elapsed());
    assert_eq!(failed, Vec::<String>::new());
}
