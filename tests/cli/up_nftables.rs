//! `portcullis up --firewall nftables`: a port is refused, then open after `expose`, then refused
//! again after `unexpose`. Runs in a network namespace, with a neighbour that connects. Needs root,
//! `ip`, `nft` and `nsenter`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::daemon::{DEADLINE, Daemon};
use crate::harness::{binary, wait_for};
use crate::netns::{Attempt, Net, SERVER};
use crate::operator::{Operator, fixture_charm, output_of};

/// Runs the command in the machine's network namespace.
fn inside(net: &Net, command: &Command) -> Command {
    let mut inside = Command::new("nsenter");
    inside.arg(format!("--net=/run/netns/{}", net.nft_command()[3]));
    inside.arg(command.get_program()).args(command.get_args());
    inside.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    inside.current_dir(command.get_current_dir().expect("a home"));
    inside
}

#[test]
fn up_with_nftables_opens_and_closes_a_port() {
    // Hook tools are found beside the programs.
    binary("open-port");
    let (operator, net) = (Operator::with_store(""), Net::new());
    let juju = |args: &[&str]| {
        let mut command = operator.command("juju");
        let output = output_of(&mut inside(&net, command.env_remove("JUJU_ZOOKEEPER").args(args)));
        assert_eq!(output.code, 0, "juju {args:?}: {output:?}");
        output.stdout
    };
    let mut up = operator.command("portcullis");
    up.args(["up", "--listen", "127.0.0.1:0", "--firewall", "nftables", "--units-dir", "units"]);
    let daemon = Daemon::start(&mut inside(&net, &up));
    juju(&["deploy", &fixture_charm("hello")]);
    let port = operator.home().join("units/units/unit-0000000000/charm/port");
    let port = wait_for("a port", DEADLINE, || fs::read_to_string(&port).ok()?.parse().ok());
    let to = SocketAddr::new(SERVER.parse().unwrap(), port);
    let becomes = |wanted: Attempt| {
        wait_for(&format!("{wanted:?}"), DEADLINE, || (net.attempt(to) == wanted).then_some(()));
        assert_eq!(net.attempt_from_server(to), Attempt::Connected, "the control: the port has a listener");
    };
    becomes(Attempt::Refused);
    juju(&["expose", "hello"]);
    becomes(Attempt::Connected);
    wait_for("the page", DEADLINE, || {
        let mut stream = net.connect(to).ok()?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
        let mut page = String::new();
        stream.read_to_string(&mut page).ok()?;
        page.ends_with("\r\n\r\nHello world, from hello/0.\n").then_some(())
    });
    wait_for("a status with nothing to say", DEADLINE, || {
        let status: Value = serde_json::from_str(&juju(&["status", "--format", "json"])).ok()?;
        let unit = &status["services"]["hello"]["units"]["hello/0"];
        let calm = unit.get("firewall").is_none() && status["machines"]["0"].get("problem").is_none();
        (calm && unit["open-ports"] == serde_json::json!([format!("{port}/tcp")])).then_some(())
    });
    juju(&["unexpose", "hello"]);
    becomes(Attempt::Refused);
    juju(&["destroy-service", "hello"]);
    wait_for("a machine without units", DEADLINE, || {
        fs::read_dir(operator.home().join("units/runs")).ok()?.next().is_none().then_some(())
    });
    assert_eq!(daemon.stop("-TERM"), Some(0));
}
