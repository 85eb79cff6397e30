//! Losses while jobs run, with three nodes on machines of their own: every caller gets exactly one
//! answer, no job is left, and the end state is right.

use std::time::Duration;

use portcullis::fleet::dbus::errors::OFFLINE;

use crate::client::{Answer, Client, eventually};
use crate::machine::Machine;
use crate::world::{NODES, World};

const SLOW: &str = "slow.service";

fn result(text: &str) -> Answer {
    Answer::Result(text.to_owned())
}

/// Starts the slow unit of a node in another task, and waits until systemd starts it.
async fn slow_start(client: &Client, world: &World, node: &'static str) -> tokio::task::JoinHandle<Answer> {
    let caller = client.clone();
    let answer = tokio::spawn(async move { caller.job(node, "StartUnit", SLOW, "replace").await });
    let machine = world.node(node);
    eventually("slow start", || (machine.property(SLOW, "ActiveState") == "activating").then_some(())).await;
    answer
}

fn kill(machine: &Machine, service: &str, signal: &str) {
    // systemd may be about to start the service again.
    let _ = machine.try_run(&["systemctl", "kill", "--signal", signal, service]);
}

/// Checks that the fleet works: every node starts and stops a unit, and no job is left.
async fn works(world: &World) {
    let client = world.client().await;
    for node in NODES {
        client.until(node, "online").await;
        // The last disturbance may have left a job of the unit in systemd.
        world.node(node).run(&["systemctl", "stop", SLOW]);
        assert_eq!(client.job(node, "RestartUnit", "quick.service", "replace").await, result("done"));
        assert_eq!(world.node(node).property("quick.service", "ActiveState"), "active");
        assert_eq!(client.job(node, "StopUnit", "quick.service", "replace").await, result("done"));
        assert_eq!(world.node(node).property("quick.service", "ActiveState"), "inactive");
    }
    client.all_jobs_have_ended_once().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_lost_node_end() {
    let mut world = World::start().await;
    let client = world.client().await;

    // A killed agent is replaced by its successor; systemd continues the job, and its result is
    // reported or the job has ended as cancelled.
    let answer = slow_start(&client, &world, "n1").await;
    kill(world.node("n1"), "agent.service", "KILL");
    std::fs::write(world.node("n1").file("go"), "").unwrap();
    let answer = answer.await.unwrap();
    assert!([result("done"), result("cancelled"), result("failed")].contains(&answer), "{answer:?}");
    let machine = world.node("n1");
    eventually("a started unit", || (machine.property(SLOW, "ActiveState") == "active").then_some(())).await;

    // A stopped agent is silent.
    let answer = slow_start(&client, &world, "n2").await;
    kill(world.node("n2"), "agent.service", "STOP");
    client.until("n2", "offline").await;
    let answer = answer.await.unwrap();
    assert!(matches!(answer, Answer::Result(_)), "{answer:?}");
    let refused = client.job("n2", "StartUnit", "quick.service", "replace").await;
    assert_eq!(refused, Answer::Refused(OFFLINE.to_owned()));
    kill(world.node("n2"), "agent.service", "CONT");

    // So is a node whose link is cut.
    let answer = slow_start(&client, &world, "n3").await;
    world.node("n3").cut();
    client.until("n3", "offline").await;
    let answer = answer.await.unwrap();
    assert!(matches!(answer, Answer::Result(_)), "{answer:?}");
    let refused = client.job("n3", "StartUnit", "quick.service", "replace").await;
    assert_eq!(refused, Answer::Refused(OFFLINE.to_owned()));
    world.node("n3").heal();
    works(&world).await;

    let answer = slow_start(&client, &world, "n3").await;
    world.nodes[2].reboot();
    let answer = answer.await.unwrap();
    assert!(matches!(answer, Answer::Result(_)), "{answer:?}");
    works(&world).await;
    client.all_jobs_have_ended_once().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_ends_touches_no_unit() {
    let world = World::start().await;
    let client = world.client().await;
    for node in NODES {
        assert_eq!(client.job(node, "StartUnit", "quick.service", "replace").await, result("done"));
    }
    let pids = || NODES.map(|node| world.node(node).property("quick.service", "MainPID"));
    let before = pids();

    // SIGTERM: every job ends with a signal before the manager exits.
    let answer = slow_start(&client, &world, "n1").await;
    kill(&world.manager, "manager.service", "TERM");
    assert_eq!(answer.await.unwrap(), result("cancelled"));
    client.until("n1", "online").await;
    world.node("n1").run(&["systemctl", "stop", SLOW]);

    // SIGKILL: the bus reports the end of the manager.
    for node in NODES {
        client.until(node, "online").await;
    }
    let answer = slow_start(&client, &world, "n1").await;
    kill(&world.manager, "manager.service", "KILL");
    assert_eq!(answer.await.unwrap(), Answer::ManagerEnded);
    client.until("n1", "online").await;
    // systemd goes on with the job.
    assert_eq!(world.node("n1").property(SLOW, "ActiveState"), "activating");
    std::fs::write(world.node("n1").file("go"), "").unwrap();
    let machine = world.node("n1");
    eventually("a started unit", || (machine.property(SLOW, "ActiveState") == "active").then_some(())).await;
    assert_eq!(pids(), before);
    works(&world).await;
}

/// A sequence of numbers that looks random and is the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn one_of(&mut self, all: &[&'static str]) -> &'static str {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }

    /// Waits for the duration of a disturbance, or until the next one.
    async fn pause(&mut self, length: Length) {
        let ms = match length {
            Length::Short => self.below(1_000),
            Length::Long => 6_000 + self.below(3_000),
        };
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

#[derive(Clone, Copy)]
enum Length {
    Short,
    /// The node may be offline before the end, or may not.
    Long,
}

#[derive(Clone, Copy)]
enum Disturbance {
    CutLink(Length),
    StopAgent(Length),
    KillAgent,
    KillManager,
    TerminateManager,
    Reboot,
}

/// Disturbances of every run. Random ones follow.
const FIRST: [Disturbance; 7] = [
    Disturbance::CutLink(Length::Long),
    Disturbance::KillManager,
    Disturbance::StopAgent(Length::Long),
    Disturbance::TerminateManager,
    Disturbance::Reboot,
    Disturbance::CutLink(Length::Long),
    Disturbance::StopAgent(Length::Long),
];
const RANDOM: [Disturbance; 5] = [
    Disturbance::CutLink(Length::Short),
    Disturbance::StopAgent(Length::Short),
    Disturbance::KillAgent,
    Disturbance::KillAgent,
    Disturbance::KillManager,
];

impl Disturbance {
    async fn execute(self, world: &mut World, numbers: &mut Numbers) {
        let at = usize::try_from(numbers.below(NODES.len() as u64)).unwrap();
        let node = &mut world.nodes[at];
        match self {
            Self::CutLink(length) => {
                node.cut();
                numbers.pause(length).await;
                node.heal();
            }
            Self::StopAgent(length) => {
                kill(node, "agent.service", "STOP");
                numbers.pause(length).await;
                kill(node, "agent.service", "CONT");
            }
            Self::KillAgent => kill(node, "agent.service", "KILL"),
            Self::KillManager => kill(&world.manager, "manager.service", "KILL"),
            Self::TerminateManager => kill(&world.manager, "manager.service", "TERM"),
            Self::Reboot => node.reboot(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_flaps_lose_no_answer() {
    let mut world = World::start().await;
    let client = world.client().await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let callers: Vec<_> = (0..9)
        .map(|number| {
            let (client, stopped) = (client.clone(), stopped.clone());
            tokio::spawn(async move {
                let mut numbers = Numbers(0x9E37_79B9 + number);
                let mut answers = Vec::new();
                while !*stopped.borrow() {
                    let node = numbers.one_of(&NODES);
                    let unit = numbers.one_of(&["quick.service", "templated@1.service", "failing.service"]);
                    let member = numbers.one_of(&["StartUnit", "StopUnit", "RestartUnit"]);
                    let mode = numbers.one_of(&["replace", "fail"]);
                    answers.push(client.job(node, member, unit, mode).await);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                answers
            })
        })
        .collect();
    let mut numbers = Numbers(0x2545_F491);
    for number in 0..20 {
        let random = RANDOM[usize::try_from(numbers.below(RANDOM.len() as u64)).unwrap()];
        let disturbance = FIRST.get(number).copied().unwrap_or(random);
        disturbance.execute(&mut world, &mut numbers).await;
        numbers.pause(Length::Short).await;
    }
    stop.send_replace(true);
    let mut answers = Vec::new();
    for caller in callers {
        // A call that has no answer panics there.
        answers.extend(caller.await.unwrap());
    }
    assert!(answers.contains(&result("done")) && answers.contains(&result("failed")), "{answers:?}");
    assert!(client.times_offline() > 0, "no node was reported as offline");
    works(&world).await;
    client.all_jobs_have_ended_once().await;
}

/// Fifty callers of one slow unit: each gets one job with one end, or one refusal.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_callers_of_one_unit_get_an_answer_each() {
    let world = World::start().await;
    for mode in ["replace", "fail"] {
        let client = world.client().await;
        let first = slow_start(&client, &world, "n1").await;
        let mut callers = Vec::new();
        for _ in 0..50 {
            let client = world.client().await;
            callers.push(tokio::spawn(async move {
                let answer = client.job("n1", "StartUnit", SLOW, mode).await;
                (client, answer)
            }));
        }
        // All but one have been answered, or are in the queue.
        eventually("answers", || (callers.iter().filter(|c| c.is_finished()).count() == 49).then_some(()))
            .await;
        std::fs::write(world.node("n1").file("go"), "").unwrap();
        assert_eq!(first.await.unwrap(), result("done"));
        let mut answers = Vec::new();
        for caller in callers {
            let (client, answer) = caller.await.unwrap();
            client.all_jobs_have_ended_once().await;
            answers.push(answer);
        }
        let expected = match mode {
            "replace" => result("cancelled"),
            _ => Answer::Refused("org.freedesktop.systemd1.TransactionIsDestructive".to_owned()),
        };
        assert_eq!(answers.iter().filter(|answer| **answer == expected).count(), 49, "{answers:?}");
        assert_eq!(answers.iter().filter(|answer| **answer == result("done")).count(), 1, "{answers:?}");
        client.all_jobs_have_ended_once().await;
        std::fs::remove_file(world.node("n1").file("go")).unwrap();
        assert_eq!(client.job("n1", "StopUnit", SLOW, "replace").await, result("done"));
    }
}
