//! Everyday commands of an operator, with their complete output.

use std::fs;
use std::process::Stdio;

use crate::harness::golden;
use crate::harness::scenario::{Site, on_both_stores};
use crate::operator::{Operator, Transcript, fixture_charm, output_of};

on_both_stores![everyday_commands_print_the_golden_text, status_is_written_to_stdout_or_a_file,];

fn everyday_commands_print_the_golden_text(site: &Site) {
    let operator = Operator::at(site);
    let mut told = Transcript::of(&operator);
    let (wordpress, mysql) = (fixture_charm("wordpress"), fixture_charm("mysql"));
    told.juju(&["bootstrap"]);
    told.juju(&["status"]);
    told.juju(&["deploy", &wordpress]);
    told.juju(&["deploy", &mysql, "db", "-n", "2"]);
    told.juju(&["status"]);
    told.juju(&["expose", "wordpress"]);
    told.juju(&["expose", "wordpress"]);
    told.juju(&["status", "wordpress"]);
    told.juju(&["expose", "wordpress", "--to", "192.0.2.7/24", "2001:db8::/32"]);
    told.juju(&["expose", "wordpress", "--to", "2001:db8::/32", "--to", "192.0.2.0/24"]);
    told.juju(&["expose", "wordpress", "--to", "192.0.2.0/24", "2001:db8::/32"]);
    told.juju(&["expose", "wordpress", "--to", "everyone"]);
    told.juju(&["status", "wordpress"]);
    told.juju(&["unexpose", "wordpress"]);
    told.juju(&["unexpose", "wordpress"]);
    told.juju(&["add-unit", "wordpress"]);
    told.juju(&["add-unit", "wordpress", "-n", "2", "--to", "0"]);
    told.juju(&["add-machine", "--instance-id", "i-0abc"]);
    told.juju(&["add-machine"]);
    told.juju(&["status", "--format", "tabular"]);
    for format in ["json", "dot", "svg"] {
        told.juju(&["status", "--format", format]);
    }
    told.juju(&["status", "nothing", "no/1"]);
    told.juju(&["terminate-machine", "0"]);
    told.juju(&["remove-unit", "db/0", "db/1"]);
    told.juju(&["add-unit", "db", "--to", "1"]);
    told.juju(&["status", "d*"]);
    told.juju(&["destroy-service", "db"]);
    told.juju(&["destroy-service", "wordpress"]);
    told.juju(&["terminate-machine", "0", "1", "2", "3", "4", "5"]);
    told.juju(&["status"]);
    told.juju(&["deploy", &wordpress]);
    told.juju(&["status", "*/*"]);
    told.is("happy_path.txt");
}

fn status_is_written_to_stdout_or_a_file(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["deploy", &fixture_charm("wordpress")]);
    let shown = operator.does(&["status"]);
    assert_eq!(shown.stderr, "");

    let silent = operator.does(&["status", "--output", "status.yaml"]);
    assert_eq!((silent.stdout.as_str(), silent.stderr.as_str()), ("", ""));
    assert_eq!(fs::read_to_string(operator.home().join("status.yaml")).unwrap(), shown.stdout);
    operator.is_refused(&["status", "--output", "no/such/dir/file"], 1, "cannot write no/such/dir/file");
    golden::refusals("status_output");

    let parsed = operator.status();
    assert_eq!(parsed["services"]["wordpress"]["units"]["wordpress/0"]["machine"], 0);

    // A closed stdout is not an error.
    let mut child = operator
        .command("juju")
        .arg("status")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("juju starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("juju ends");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));

    for shell in ["bash", "zsh", "fish"] {
        assert!(operator.does(&["completions", shell]).stdout.contains("destroy-service"), "{shell}");
    }
    assert!(operator.does(&["man"]).stdout.starts_with(".ie"));
    operator.does(&["man", "--output", "man"]);
    assert!(operator.home().join("man/juju-expose.1").is_file());
    let help = output_of(operator.command("juju").arg("--help"));
    assert!(help.code == 0 && help.stdout.contains("Examples:"), "{help:?}");
}
