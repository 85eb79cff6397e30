//! Joining a machine with a token, and tokens that are refused.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use portcullis::machine::join_token::JoinToken;
use portcullis::store::Credential;
use serde_json::{Value, json};

use crate::controller::Controller;
use crate::faults::as_operator;
use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{golden, wait_for};
use crate::operator::{Operator, Output, output_of};
use crate::plain_machine::wait_for_state;

const DEADLINE: Duration = Duration::from_secs(60);

on_both_stores![
    a_host_joins_with_one_command_and_the_token_works_once,
    tokens_that_cannot_be_used_are_refused_with_the_reason,
    expired_offers_are_deleted_without_the_key_of_the_authority,
];

/// The token in the line that a command printed.
fn token_of(printed: &Output) -> String {
    let token = printed.stdout.trim_end().strip_prefix("portcullis join ");
    token.unwrap_or_else(|| panic!("no command in {printed:?}")).to_owned()
}

/// A host without any credentials.
fn join(host: &Operator, token: &str) -> Output {
    let mut shown = output_of(host.command("portcullis").args(["join", token]));
    shown.line = "portcullis join TOKEN".to_owned();
    shown
}

fn machine_file(host: &Operator, number: u32) -> PathBuf {
    host.config(&format!("local-machines/machine-{number:010}.json"))
}

fn a_host_joins_with_one_command_and_the_token_works_once(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let added = operator.does(&["add-machine", "--name", "web1"]);
    assert!(added.stderr.contains("Machine 0 was added.\n"), "{added:?}");
    let token = token_of(&added);
    let host = Operator::at(site);
    let joined = join(&host, &token);
    assert_eq!(joined.code, 0, "{joined:?}");
    assert!(joined.stderr.contains("Machine 0 has joined 'local'"), "{joined:?}");
    let file = machine_file(&host, 0);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let secret = token.parse::<JoinToken>().unwrap().credential.expose();
    assert!(!fs::read_to_string(&file).unwrap().contains(&secret), "the one-time secret is not kept");

    // The agent runs with the file alone; the host has no credentials of an operator.
    let agent = crate::plain_machine::agent(&host, "0", &["--address", "192.0.2.7"]);
    let shown = wait_for_state(&operator, "0", "running");
    assert_eq!((&shown["name"], &shown["dns-name"]), (&"web1".into(), &"192.0.2.7".into()));
    drop(agent);

    join(&host, &token).is_refusal(1, "this host is machine 0 already");
    let other = Operator::at(site);
    join(&other, &token).is_refusal(1, "the token for machine 0 was used before");
    assert!(!machine_file(&other, 0).exists(), "nothing is left");
    // Positive control: a new token for the same machine works on another host.
    let again = join(&other, &token_of(&operator.does(&["machine", "token", "0"])));
    assert_eq!(again.code, 0, "{again:?}");
    golden::refusals("join_used");
}

fn tokens_that_cannot_be_used_are_refused_with_the_reason(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let text = token_of(&operator.does(&["add-machine"]));
    let token: JoinToken = text.parse().unwrap();
    let host = Operator::at(site);

    join(&host, &text[..text.len() - 5]).is_refusal(2, "the token is damaged");
    join(&host, "hello").is_refusal(2, "the token is damaged");
    let forged = Credential::parse(&format!("{}:0123456789", token.credential.user())).unwrap();
    let forged = JoinToken { credential: forged, ..token.clone() };
    join(&host, &forged.expose()).is_refusal(1, "it is forged, has expired or was replaced by a newer one");
    let day_ms = 24 * 3_600_000;
    // The same as a clock that is a day ahead, and one that is a day behind.
    let expired = JoinToken { expires_ms: token.expires_ms - day_ms, ..token.clone() };
    join(&host, &expired.expose()).is_refusal(1, "the token has expired 23 h ago, by the clock of this");
    let early = JoinToken { expires_ms: token.expires_ms + day_ms, ..token };
    join(&host, &early.expose()).is_refusal(1, "the clock of this machine is wrong by 23 h");
    assert!(!machine_file(&host, 0).exists(), "nothing is left");
    let newer = token_of(&operator.does(&["machine", "token", "0"]));
    join(&host, &text).is_refusal(1, "it is forged, has expired or was replaced by a newer one");
    operator.is_refused(&["machine", "token", "7"], 1, "Machine 7 was not found");

    // Positive control, from stdin.
    let mut command = host.command("portcullis");
    let child = command.args(["join", "-"]).stdin(std::process::Stdio::piped());
    let mut child = child.stderr(std::process::Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), newer.as_bytes()).unwrap();
    let ended = wait_for("end of join", DEADLINE, || child.try_wait().unwrap());
    assert!(ended.success() && machine_file(&host, 0).exists());
    golden::refusals("join_refused");
}

fn expired_offers_are_deleted_without_the_key_of_the_authority(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine"]);
    operator.does(&["add-machine"]);
    fs::remove_file(operator.config("local-authority.json")).unwrap();
    let offer = |number: u32| site.path(&format!("/machines/machine-{number:010}/join"));
    let is_offered = |number| as_operator(&operator, site).get(&offer(number)).is_ok();
    let expire = || {
        operator.does(&["machine", "token", "0"]);
        let mut client = as_operator(&operator, site);
        let (data, stat) = client.get(&offer(0)).unwrap();
        let mut offered: Value = serde_json::from_slice(&data).unwrap();
        offered["expires"] = json!(1);
        client.set_if_version(&offer(0), offered.to_string().as_bytes(), stat.version).unwrap();
        client.close();
    };
    for command in [&["machine", "token", "1"][..], &["add-machine"]] {
        expire();
        operator.does(command);
        assert!(!is_offered(0) && is_offered(1), "after {command:?}");
    }
    expire();
    let controller = Controller::start(&operator, "controller.log");
    wait_for("deletion by the controller", DEADLINE, || (!is_offered(0)).then_some(()));
    assert!(is_offered(1));
    assert_eq!(controller.stop("-TERM"), Some(0));
}
