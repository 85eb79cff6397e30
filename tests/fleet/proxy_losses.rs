//! Proxy services between machines that are rebooted or lose their links.

use std::fs;
use std::time::Duration;

use crate::client::{Client, eventually};
use crate::machine::Machine;
use crate::world::{NODES, World, service};

const PROXY: &str = "hirte-proxy@n2_db.service";
const DEP: &str = "hirte-dep@db.service";
const SLEEP: &str = "[Service]\nExecStart=/bin/sleep infinity\n";

/// The manager, and three nodes with the unit files of `portcullis install agent`. n1 and n3 have
/// `need-db.service`, n2 has `db.service`, which stops when nothing needs it.
async fn start() -> (World, Client) {
    let world = World::without_agents("--allow-plain-tcp", |_| {});
    for name in NODES {
        let machine = world.node(name);
        machine.run(&["portcullis", "install", "agent"]);
        machine.run(&["systemctl", "reload", "dbus.service"]);
        let to = world.manager.address();
        let agent = format!("portcullis agent --name {name} --manager {to}:842 --allow-plain-tcp");
        machine.install("portcullis-agent.service", &service(&agent));
    }
    write(world.node("n2"), "db.service", &format!("[Unit]\nStopWhenUnneeded=yes\n{SLEEP}"));
    for name in ["n1", "n3"] {
        let source =
            format!("[Unit]\nBindsTo={PROXY}\nAfter={PROXY}\n{SLEEP}[Install]\nWantedBy=multi-user.target\n");
        write(world.node(name), "need-db.service", &source);
    }
    let client = world.client().await;
    for name in NODES {
        client.until(name, "online").await;
    }
    (world, client)
}

fn write(machine: &Machine, unit: &str, text: &str) {
    fs::write(format!("/proc/{}/root/etc/systemd/system/{unit}", machine.systemd()), text).unwrap();
    machine.run(&["systemctl", "daemon-reload"]);
}

async fn until(machine: &Machine, unit: &str, state: &str) {
    let what = format!("{unit} to be {state}");
    eventually(&what, || (machine.property(unit, "ActiveState") == state).then_some(())).await;
}

/// The state of each proxy that the manager knows: its node and its state.
async fn listed(client: &Client) -> Vec<(String, String)> {
    type Row = (String, String, String, String, String, u64, String);
    let reply = client.call(crate::client::MANAGER, "ListProxies", &()).await;
    let rows: Vec<Row> = reply.map(|reply| reply.body().deserialize().unwrap()).unwrap_or_default();
    rows.into_iter().map(|row| (row.0, row.4)).collect()
}

async fn until_listed(client: &Client, expected: &[(&str, &str)]) {
    let expected: Vec<_> =
        expected.iter().map(|(node, state)| ((*node).to_owned(), (*state).to_owned())).collect();
    let end = std::time::Instant::now() + crate::harness::HANG;
    while listed(client).await != expected {
        assert!(std::time::Instant::now() < end, "{:?}", listed(client).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_links_and_reboots_change_nothing() {
    let (mut world, client) = start().await;
    world.node("n1").run(&["systemctl", "enable", "--now", "need-db.service"]);
    let pid = world.node("n2").property("db.service", "MainPID");
    assert_ne!(pid, "0");

    // A cut link, of the source and of the target.
    for name in ["n1", "n2"] {
        world.node(name).cut();
        client.until(name, "offline").await;
        world.node(name).heal();
        client.until(name, "online").await;
        until_listed(&client, &[("n1", "active")]).await;
        assert_eq!(world.node("n1").property("need-db.service", "ActiveState"), "active");
    }
    assert_eq!(world.node("n2").property("db.service", "MainPID"), pid);

    // A reboot of the source.
    world.nodes[0].reboot();
    client.until("n1", "online").await;
    until(world.node("n1"), "need-db.service", "active").await;
    until_listed(&client, &[("n1", "active")]).await;
    assert_eq!(world.node("n2").property("db.service", "MainPID"), pid, "the target runs on");

    // A reboot of the target: it is started again, and the source runs on.
    let source = world.node("n1").property("need-db.service", "MainPID");
    world.nodes[1].reboot();
    client.until("n2", "online").await;
    until(world.node("n2"), "db.service", "active").await;
    until(world.node("n2"), DEP, "active").await;
    assert_eq!(world.node("n1").property("need-db.service", "MainPID"), source);

    // A target that stops while its source is cut off.
    world.node("n1").cut();
    client.until("n1", "offline").await;
    world.node("n2").run(&["systemctl", "stop", "db.service"]);
    world.node("n1").heal();
    until(world.node("n1"), PROXY, "inactive").await;
    until(world.node("n1"), "need-db.service", "inactive").await;
    until(world.node("n2"), DEP, "inactive").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_flaps_leave_no_dep_behind() {
    let (world, client) = start().await;
    // A sequence of numbers that looks random and is the same in every run.
    let mut seed = 0x9e37_79b9_u64;
    let mut below = |limit: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % limit
    };
    for _ in 0..20 {
        let cut = NODES[usize::try_from(below(3)).unwrap()];
        world.node(cut).cut();
        for name in ["n1", "n3"] {
            let action = ["start", "stop", "restart"][usize::try_from(below(3)).unwrap()];
            world.node(name).run(&["systemctl", "--no-block", action, "need-db.service"]);
        }
        tokio::time::sleep(Duration::from_millis(below(1_500))).await;
        world.node(cut).heal();
        tokio::time::sleep(Duration::from_millis(below(500))).await;
    }
    for name in NODES {
        client.until(name, "online").await;
    }
    // One source runs and one does not, whatever happened before.
    world.node("n3").run(&["systemctl", "stop", "need-db.service"]);
    world.node("n1").run(&["systemctl", "restart", "need-db.service"]);
    until(world.node("n1"), "need-db.service", "active").await;
    until(world.node("n2"), DEP, "active").await;
    until(world.node("n3"), PROXY, "inactive").await;
    let active = ("n1".to_owned(), "active".to_owned());
    let end = std::time::Instant::now() + crate::harness::HANG;
    loop {
        let current: Vec<_> = listed(&client).await;
        let current: Vec<_> = current
            .into_iter()
            .filter(|(_, state)| ["active", "waiting"].contains(&state.as_str()))
            .collect();
        if current == [active.clone()] {
            break;
        }
        assert!(std::time::Instant::now() < end, "{current:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    world.node("n1").run(&["systemctl", "stop", "need-db.service"]);
    until(world.node("n2"), DEP, "inactive").await;
    until(world.node("n2"), "db.service", "inactive").await;
    client.all_jobs_have_ended_once().await;
}
