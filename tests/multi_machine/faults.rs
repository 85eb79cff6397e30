//! Deploys, exposes and unexposes services on three machines and checks the connections, while
//! processes are killed and links are down.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::ensemble::Ensemble;
use crate::harness::wait_for;
use crate::net::{Attempt, MACHINES, Net};
use crate::world::{DEADLINE, Daemon, World};

/// Tries to connect to ports that must stay closed, for the duration of the test.
#[derive(Default)]
struct Prober {
    done: AtomicBool,
    attempts: AtomicUsize,
    connected: AtomicUsize,
}

impl Prober {
    fn work(&self, net: &Net, addrs: &[SocketAddr]) {
        while !self.done.load(Ordering::Relaxed) {
            for addr in addrs {
                self.attempts.fetch_add(1, Ordering::Relaxed);
                if net.attempt(*addr) == Attempt::Connected {
                    self.connected.fetch_add(1, Ordering::Relaxed);
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Stops the connection attempts on drop, also if the test fails.
struct Done<'a>(&'a Prober);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::Relaxed);
    }
}

/// Runs alone, because three ZooKeeper servers use every core and the test measures the time in
/// which sessions expire.
#[test]
fn alone_ports_are_correct_while_processes_are_killed() {
    let net = Net::new();
    let mut ensemble = Ensemble::start(&net);
    let world = World::new(&net);
    let mut agents: Vec<Daemon> = (0..MACHINES).map(|machine| world.agent(machine)).collect();
    world.deploy_everywhere("hello");
    world.deploy_everywhere("guestbook");
    let addrs = |service| (0..MACHINES).map(|machine| world.port_addr(service, machine)).collect::<Vec<_>>();
    let (hello, books) = (addrs("hello"), addrs("guestbook"));
    let mut controllers = vec![world.controller("controller-1"), world.controller("controller-2")];
    world.is_calm();
    for addr in hello.iter().chain(&books) {
        world.becomes(*addr, Attempt::Refused);
    }
    for (machine, addr) in hello.iter().chain(&books).enumerate() {
        // Control: the port has a listener, and the machine itself can connect to it.
        assert_eq!(net.attempt_from(machine % MACHINES, *addr), Attempt::Connected);
    }
    let prober = Prober::default();
    std::thread::scope(|scope| {
        scope.spawn(|| prober.work(&net, &books));
        let _done = Done(&prober);
        world.does(&["expose", "hello"]);
        all_serve(&world, &hello);
        a_controller_and_an_agent_are_killed(&world, &hello, &mut controllers, &mut agents);
        the_store_loses_its_leader(&world, &hello, &mut ensemble);
        a_machine_is_cut_off(&world, &hello);
        a_machine_misses_the_end(&world, &hello);
        // No other agent has ended, and no hook ran twice.
        assert!(agents.iter_mut().all(Daemon::runs));
        let hooks = ["install", "start", "exposed", "unexposed", "exposed", "unexposed", "exposed"];
        assert_eq!(agents[1].hooks("hello/1"), hooks);
    });
    let (attempts, connected) = (prober.attempts.into_inner(), prober.connected.into_inner());
    assert!(attempts > 100 && connected == 0, "{connected} of {attempts} came through");
    // Control: the ports had listeners all the time and only needed to be exposed.
    world.does(&["expose", "guestbook"]);
    for addr in books {
        world.becomes(addr, Attempt::Connected);
    }
    world.does(&["destroy-service", "guestbook"]);
    for machine in 0..MACHINES {
        wait_for("a machine without units", DEADLINE, || {
            world.charm_dir("guestbook", machine).is_none().then_some(())
        });
    }
}

fn all_serve(world: &World<'_>, addrs: &[SocketAddr]) {
    for (machine, addr) in addrs.iter().enumerate() {
        world.page(None, *addr, &format!("\r\n\r\nHello world, from hello/{machine}.\n"));
    }
    // Also from one machine to another.
    assert_eq!(world.net.attempt_from(0, addrs[1]), Attempt::Connected);
}

fn a_controller_and_an_agent_are_killed(
    world: &World<'_>,
    addrs: &[SocketAddr],
    controllers: &mut Vec<Daemon>,
    agents: &mut [Daemon],
) {
    let leader = wait_for("a controller that leads", DEADLINE, || {
        controllers.iter().position(|controller| controller.has_said("leading"))
    });
    let mut killed = controllers.remove(leader);
    killed.kill9();
    agents[0].kill9();
    world.does(&["unexpose", "hello"]);
    for addr in &addrs[1..] {
        world.becomes(*addr, Attempt::Refused);
    }
    // The first machine has no agent: its open port stays open.
    assert_eq!(world.net.attempt(addrs[0]), Attempt::Connected);
    agents[0] = world.agent(0);
    world.becomes(addrs[0], Attempt::Refused);
    controllers[0].says("leading");
    world.is_calm();
}

fn the_store_loses_its_leader(world: &World<'_>, addrs: &[SocketAddr], ensemble: &mut Ensemble<'_>) {
    let killed = ensemble.kill_leader();
    world.does_in_the_end(&["expose", "hello"]);
    all_serve(world, addrs);
    ensemble.start_member(killed);
    ensemble.is_whole();
    world.is_calm();
}

fn a_machine_is_cut_off(world: &World<'_>, addrs: &[SocketAddr]) {
    world.net.pull(1);
    world.does(&["unexpose", "hello"]);
    for machine in [0, 2] {
        world.becomes(addrs[machine], Attempt::Refused);
    }
    wait_for("a machine that is down", DEADLINE, || {
        let status = world.status();
        let unit = &status["services"]["hello"]["units"]["hello/1"]["agent-state"];
        (status["machines"]["1"]["agent-state"] == "down" && *unit == "down").then_some(())
    });
    let status = world.status();
    for machine in ["0", "2"] {
        assert_eq!(status["machines"][machine]["agent-state"], "running");
    }
    assert_eq!(world.net.attempt(addrs[1]), Attempt::TimedOut);
    // The disconnected machine cannot read the change and keeps its rules.
    let port = addrs[1].port().to_string();
    assert!(world.rules(1).contains(&port), "{}", world.rules(1));
    world.net.plug(1);
    world.becomes(addrs[1], Attempt::Refused);
    world.page(Some(1), addrs[1], "\r\n\r\nHello from hello/1.\n");
    assert!(!world.rules(1).contains(&port), "{}", world.rules(1));
    world.is_calm();
}

/// The service stays exposed until it is destroyed, which happens while a machine is disconnected.
fn a_machine_misses_the_end(world: &World<'_>, addrs: &[SocketAddr]) {
    world.does(&["expose", "hello"]);
    all_serve(world, addrs);
    world.net.pull(2);
    world.does(&["destroy-service", "hello"]);
    for (machine, addr) in addrs.iter().enumerate().take(2) {
        world.becomes(*addr, Attempt::Refused);
        wait_for("an end", DEADLINE, || world.charm_dir("hello", machine).is_none().then_some(()));
    }
    assert!(world.charm_dir("hello", 2).is_some());
    assert_eq!(world.net.attempt_from(2, addrs[2]), Attempt::Connected, "its server goes on meanwhile");
    world.net.plug(2);
    wait_for("an end", DEADLINE, || world.charm_dir("hello", 2).is_none().then_some(()));
    assert_eq!(world.net.attempt_from(2, addrs[2]), Attempt::Refused, "nobody listens any more");
    let port = addrs[2].port().to_string();
    wait_for("a closed port", DEADLINE, || (!world.rules(2).contains(&port)).then_some(()));
}
