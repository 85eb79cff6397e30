//! Refused commands: one line of error each, and no partial change.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{golden, ports};
use crate::operator::{Operator, Transcript, fixture_charm};

on_both_stores![refused_commands_print_the_golden_text, refused_commands_change_nothing,];

fn refused_commands_print_the_golden_text(site: &Site) {
    let operator = Operator::at(site);
    let wordpress = fixture_charm("wordpress");
    let mut told = Transcript::of(&operator);
    told.juju(&["status"]);
    told.juju(&["deploy", &wordpress]);
    told.juju(&["bootstrap"]);
    told.juju(&["deploy", &wordpress]);

    let long = "a".repeat(300);
    told.juju(&["deploy", &wordpress]);
    told.juju(&["expose", "foobar"]);
    told.juju(&["unexpose", "foobar"]);
    told.juju(&["destroy-service", "foobar"]);
    told.juju(&["add-unit", "foobar"]);
    told.juju(&["remove-unit", "foobar/0"]);
    told.juju(&["hook-env", "foobar/0"]);
    told.juju(&["terminate-machine", "99"]);
    told.juju(&["terminate-machine", "one"]);
    told.juju(&["deploy", &wordpress, "blog", "--to", "99"]);
    told.juju(&["deploy", &wordpress, "blog", "-n", "100000"]);
    for name in ["a/b", "a b", "", "a\u{1b}[2J\n", &long, "..", "-a-1"] {
        told.juju(&["deploy", &wordpress, "--", name]);
    }
    told.juju(&["expose", "a/b"]);
    told.juju(&["remove-unit", "wordpress"]);
    told.juju(&["add-machine", "--instance-id", "i 0"]);
    operator.does(&["add-machine", "--name", "web", "--address", "192.0.2.7"]);
    told.juju(&["add-machine", "--name", "web"]);
    for name in ["Web", "web_1", "7", "keeper", "machine-1", "-", ".."] {
        told.juju(&["add-machine", &format!("--name={name}")]);
    }
    for address in ["192.0.2.7:22", "0.0.0.0", "a b"] {
        told.juju(&["add-machine", "--address", address]);
    }
    told.juju(&["-e", "../x", "status"]);
    told.juju(&["--zookeeper", "a b", "status"]);
    told.juju(&["--zookeeper", "127.0.0.1:99999", "status"]);

    let empty = operator.home().join("empty");
    fs::create_dir(&empty).unwrap();
    told.juju(&["deploy", empty.to_str().unwrap()]);
    told.juju(&["deploy", "no-such-directory"]);
    told.juju(&["deploy", &operator.charm("bad", "name: Bad Name\nsummary: [1]\nrevision: x\n")]);
    told.juju(&["deploy", &operator.charm("list", "- a\n")]);
    told.juju(&["deploy", &operator.charm("huge", &"x".repeat(70_000))]);

    told.juju(&[]);
    told.juju(&["expose"]);
    told.juju(&["frobnicate"]);
    told.juju(&["status", "--format", "xml"]);
    told.juju(&["add-unit", "wordpress", "-n", "0"]);
    told.is("refusals/operator.txt");
}

fn refused_commands_change_nothing(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let wordpress = fixture_charm("wordpress");
    operator.does(&["deploy", &wordpress, "-n", "2"]);
    let before = operator.status();
    operator.is_refused(&["deploy", &wordpress], 1, "Service 'wordpress' already exists");
    operator.is_refused(&["deploy", &wordpress, "blog", "--to", "7"], 1, "Machine 7 was not found");
    operator.is_refused(
        &["remove-unit", "wordpress/0", "wordpress/9"],
        1,
        "Unit 'wordpress/9' was not found",
    );
    operator.is_refused(&["terminate-machine", "0"], 1, "Resources are currently assigned to machine 0");
    operator.does(&["add-machine"]);
    operator.is_refused(&["terminate-machine", "2", "0"], 1, "Resources are currently assigned to machine 0");
    operator.does(&["terminate-machine", "2"]);
    assert_eq!(operator.status(), before);

    let nobody = format!("127.0.0.1:{}", ports::free());
    operator.is_refused(
        &["--zookeeper", &nobody, "status"],
        1,
        &format!("cannot reach the store at {nobody}"),
    );

    let stranger = Operator::at(site);
    stranger.is_refused(&["status"], 1, "no credentials for environment 'local'");
    let below = format!("{}/sub", site.connect_string());
    let refusal = format!("only the owner of the store at {below} may create an environment there");
    stranger.is_refused(&["--zookeeper", &below, "bootstrap"], 1, &refusal);
    assert!(!stranger.config("local.json").exists(), "credentials for nothing");
    fs::create_dir_all(stranger.config("")).unwrap();
    let file = stranger.config("local.json");
    let auth = format!("{{\"zookeeper\": \"{}\", \"auth\": \"operator:guessed\"}}", site.connect_string());
    fs::write(&file, auth).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let refused = stranger.is_refused(&["status"], 1, "local.json can be read by others (mode 644)");
    assert!(refused.stderr.contains("hint: chmod 600 "), "{refused:?}");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let refused = stranger.is_refused(&["expose", "wordpress"], 1, "the store refuses these credentials");
    assert!(refused.stderr.contains("local.json") && !refused.stderr.contains("guessed"), "{refused:?}");
    fs::write(&file, "garbage").unwrap();
    stranger.is_refused(&["status"], 1, "local.json is not an environment file");
    golden::refusals("changes_nothing");
    assert_eq!(operator.status(), before);
}
