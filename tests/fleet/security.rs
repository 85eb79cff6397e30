//! Peers of a manager on another machine that it must refuse, each with one that it must accept.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use portcullis::fleet::dbus::errors::{INVALID_ARGS, LIMITS_EXCEEDED, NO_SUCH_NODE, NO_SUCH_UNIT};
use portcullis::net::tls::authority::{Authority, MACHINE_LIFETIME, Names, Validity};
use portcullis::net::tls::key::PrivateKey;
use portcullis::runtime::clock::wall_ms;
use zbus::OwnedObjectPath;

use crate::client::{Answer, MANAGER};
use crate::machine::Machine;
use crate::world::World;

fn authority() -> Authority {
    Authority::create("test", &PrivateKey::generate().unwrap(), wall_ms()).unwrap()
}

/// Writes a certificate for a name, and its key, to the directory of a machine.
fn issue(machine: &Machine, authority: &Authority, file: &str, name: &str) {
    issue_for(machine, authority, file, name, Validity::starting(wall_ms(), MACHINE_LIFETIME));
}

fn issue_for(machine: &Machine, authority: &Authority, file: &str, name: &str, validity: Validity) {
    let key = PrivateKey::generate().unwrap();
    let chain = authority.issue_for(&key, &Names::of([name]), validity).unwrap();
    fs::write(machine.file(&format!("{file}.pem")), chain).unwrap();
    let path = machine.file(&format!("{file}.key"));
    fs::write(&path, key.expose()).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(path, mode).unwrap();
}

/// Boots the machines with a manager that requires TLS.
fn with_tls(authority: &Authority) -> World {
    let options = "--tls-cert /run/node/own.pem --tls-key /run/node/own.key --client-ca /run/node/ca.pem";
    let world = World::without_agents(options, |manager| {
        fs::write(manager.file("ca.pem"), authority.certificate()).unwrap();
        issue(manager, authority, "own", "manager");
    });
    for node in &world.nodes {
        fs::write(node.file("ca.pem"), authority.certificate()).unwrap();
    }
    world
}

fn tls_options(file: &str) -> String {
    format!(
        "--tls-cert /run/node/{file}.pem --tls-key /run/node/{file}.key --ca-file /run/node/ca.pem \
         --manager-name manager"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_decide_which_agent_may_register() {
    let authority = authority();
    let world = with_tls(&authority);
    let client = world.client().await;
    let node = world.node("n2");
    issue(node, &self::authority(), "stranger", "n2");
    let past = Validity { from_ms: wall_ms() - 7_200_000, until_ms: wall_ms() - 3_600_000 };
    issue_for(node, &authority, "expired", "n2", past);
    issue(node, &authority, "another", "n1");
    issue(node, &authority, "good", "n2");
    let manager = format!("{}:842", world.manager.address());
    for options in [
        tls_options("stranger"),
        tls_options("expired"),
        tls_options("another"),
        "--allow-plain-tcp".to_owned(),
    ] {
        // The agent tries again and again; it is ended after a few attempts.
        let agent =
            ["timeout", "-s", "KILL", "3", "portcullis", "agent", "--name", "n2", "--manager", &manager];
        let options: Vec<&str> = options.split_whitespace().collect();
        let output = node.try_run(&[&agent[..], &options].concat());
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(printed.contains("WARN"), "{options:?}: {printed}");
        assert!(client.nodes().await.contains(&("n2".to_owned(), "offline".to_owned())), "{options:?}");
    }
    world.start_agent("n2", &tls_options("good"));
    client.until("n2", "online").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_peers_are_closed_and_delay_no_other() {
    let authority = authority();
    let world = with_tls(&authority);
    let client = world.client().await;
    for name in ["n1", "n2"] {
        issue(world.node(name), &authority, "good", name);
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fleet/peer.py");
    let peer = |case: &str| {
        let mut command = world.network.command("python3");
        command.args([script, case, &world.manager.address()]).arg(world.node("n2").file(""));
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut silent = peer("silent");
    let mut lines = BufReader::new(silent.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "open");
    world.start_agent("n1", &tls_options("good"));
    client.until("n1", "online").await;
    assert_eq!(lines.next().unwrap().unwrap(), "closed 200");
    assert!(silent.wait().unwrap().success());
    for (case, expected) in
        [("plain", "closed\n"), ("no-certificate", "closed\n"), ("huge", "closed\n"), ("large", "refused\n")]
    {
        let output = peer(case).wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{case}");
    }
    assert!(client.nodes().await.contains(&("n1".to_owned(), "online".to_owned())));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_name_and_ten_thousand_subscriptions_are_answered() {
    let world = World::start().await;
    let client = world.client().await;
    let characters = (1..=127_u8).map(char::from).chain(['ü', '\u{2028}', '🦀']);
    let names = characters.map(|c| format!("a{c}b.service")).chain([format!("{}.service", "x".repeat(292))]);
    for name in names {
        let answer = client.job("n1", "StartUnit", &name, "replace").await;
        let refused = match &answer {
            Answer::Refused(error) => [NO_SUCH_UNIT, INVALID_ARGS].contains(&error.as_str()),
            _ => false,
        };
        assert!(refused, "{name:?}: {answer:?}");
        let node = client.call(MANAGER, "GetNode", &name).await;
        assert!(
            node.is_err_and(|error| [NO_SUCH_NODE, INVALID_ARGS].contains(&error.name.as_str())),
            "{name:?}"
        );
    }
    let reply = client.call(MANAGER, "CreateMonitor", &()).await.unwrap();
    let monitor: OwnedObjectPath = reply.body().deserialize().unwrap();
    let mut accepted = 0;
    for number in 0..10_000 {
        let unit = format!("unit{number}.service");
        match client.call(monitor.as_str(), "Subscribe", &("n1", unit.as_str())).await {
            Ok(_) => accepted += 1,
            Err(error) => assert_eq!(error.name, LIMITS_EXCEEDED, "{number}"),
        }
    }
    assert!(accepted > 100, "only {accepted} subscriptions were accepted");
    // A sensible call is still answered.
    let answer = client.job("n1", "StartUnit", "quick.service", "replace").await;
    assert_eq!(answer, Answer::Result("done".to_owned()));
    client.all_jobs_have_ended_once().await;
}
