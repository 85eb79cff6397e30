//! Short scenarios, each repeated with a crash before the effect, a crash after the effect, or a
//! stop at every single call that the agents make in it. In each case the open ports must become
//! the wanted ports.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::actions::{Action, SHALLOW};
use crate::faults::{Fault, Mishap};
use crate::record::Armed;
use crate::world::{Shape, World};
use crate::{first_line, in_a_world};

use Action::{
    AddMachine, AddUnit, Close, Corrupt, Crash, Cure, Deploy, Destroy, Expire, Expose, ExposeTo, Flood, Heal,
    Interrupt, LoseInstance, Meddle, Open, RemoveUnit, Stop, Storm, Terminate, Unexpose,
};

/// Long enough for the agents to process an action if there is no fault.
const STEP: Duration = Duration::from_millis(30);

struct Story {
    name: &'static str,
    agents: usize,
    provisions: bool,
    actions: &'static [Action],
}

const STORIES: &[Story] = &[
    Story {
        name: "ports come and go",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Open(0, 0), Open(1, 3), Open(0, 5), Close(0, 0), Unexpose(0)],
    },
    Story {
        name: "two want the same",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Expose(1), Open(0, 0), Open(2, 0), Open(1, 0), Close(0, 0), Close(2, 0)],
    },
    Story {
        name: "ranges are spelled anew",
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
    Story {
        name: "all is shut",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Expose(1), Expose(2), Flood(30), Unexpose(0), Unexpose(1), Unexpose(2)],
    },
    Story {
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
            Heal,
            Close(0, 0),
        ],
    },
    Story {
        name: "a record cannot be read",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Corrupt(Mishap::CorruptUnit, 0, 1),
            Open(1, 0),
            Corrupt(Mishap::CorruptFlag, 0, 0),
            Heal,
        ],
    },
    Story {
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
    Story {
        name: "machines come and go",
        agents: 1,
        provisions: false,
        actions: &[AddMachine, AddUnit(0, 3), Expose(0), Open(6, 0), RemoveUnit(6), Terminate(3)],
    },
    Story {
        name: "exposed to some",
        agents: 1,
        provisions: false,
        actions: &[ExposeTo(0, 0), Open(0, 0), Open(1, 5), ExposeTo(0, 1), Expose(0), Unexpose(0)],
    },
    Story {
        name: "somebody else at the rules",
        agents: 1,
        provisions: false,
        actions: &[
            Expose(0),
            Open(0, 0),
            Meddle(Mishap::RuleRemoved, 0),
            Meddle(Mishap::RuleAdded, 1),
            Meddle(Mishap::GroupDrift, 2),
            Interrupt,
            Meddle(Mishap::ForeignEqual, 0),
            Open(0, 1),
            Interrupt,
        ],
    },
    Story {
        name: "the provider has a bad day",
        agents: 1,
        provisions: false,
        actions: &[Expose(0), Storm(2), Open(0, 0), Open(1, 3), Close(0, 0), Cure, Open(0, 2)],
    },
    Story {
        name: "one takes over from the other",
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
    Story {
        name: "instances come and go",
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
    Story {
        name: "a group and an instance are lost",
        agents: 2,
        provisions: true,
        actions: &[
            Expose(0),
            Open(0, 0),
            Meddle(Mishap::GroupDeleted, 0),
            LoseInstance(1),
            Interrupt,
            Crash(0),
            Open(0, 1),
            AddMachine,
        ],
    },
];

/// Runs a scenario with one fault. Returns false if there was no call left for the fault.
fn tell(story: &Story, fault: Fault, skip: u64) -> bool {
    in_a_world(async {
        let mut world = World::new(3, Shape::small(story.agents, story.provisions), false).await;
        world.perform(Action::Arm(Armed { fault, kind: None, skip })).await;
        for &action in story.actions {
            world.perform(action).await;
            world.pause(STEP).await;
            world.check().await;
        }
        let struck = !world.ailing();
        world.disarm();
        world.perform(Heal).await;
        world.perform(Cure).await;
        // Triggers a read of everything, for changes that only a resync would detect.
        world.interceptor.store.interrupt();
        world.pause(2 * SHALLOW).await;
        world.forgive();
        world.check().await;
        struck
    })
}

#[test]
fn alone_every_call_of_every_story_is_cut_off() {
    let faults = [Fault::CrashBefore, Fault::CrashAfter, Fault::Stop];
    let tasks: Vec<(&Story, Fault)> =
        STORIES.iter().flat_map(|story| faults.map(|fault| (story, fault))).collect();
    let (next, told) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begun = std::time::Instant::now();
    std::panic::set_hook(Box::new(|_| {}));
    let work = || -> Vec<String> {
        let mut failed = Vec::new();
        while let Some((story, fault)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            for skip in 0.. {
                told.fetch_add(1, Ordering::Relaxed);
                match std::panic::catch_unwind(|| tell(story, *fault, skip)) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(panic) => {
                        failed.push(format!(
                            "{}: {fault:?} at call {skip}: {}",
                            story.name,
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
    println!("{} tellings in {:.1?}", told.load(Ordering::Relaxed), begun.elapsed());
    assert_eq!(failed, Vec::<String>::new());
}
