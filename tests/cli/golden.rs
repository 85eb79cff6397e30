//! Help texts of all commands, and a check that every golden file belongs to a test.

use std::process::{Command, Stdio};

use crate::harness::{binary, golden};

/// All golden files except those of help texts.
const FILES: &[&str] = &[
    "firewall.txt",
    "happy_path.txt",
    "heartbeat.txt",
    "refusals/bootstrap.txt",
    "refusals/changes_nothing.txt",
    "refusals/charm_path_not_utf8.txt",
    "refusals/controller.txt",
    "refusals/demo.txt",
    "refusals/firewall.txt",
    "refusals/garbage.txt",
    "refusals/hook_limits.txt",
    "refusals/join_refused.txt",
    "refusals/join_used.txt",
    "refusals/machine.txt",
    "refusals/machine_ends.txt",
    "refusals/machine_leaves.txt",
    "refusals/not_bootstrapped.txt",
    "refusals/operator.txt",
    "refusals/operators.txt",
    "refusals/other_authority.txt",
    "refusals/status_output.txt",
    "refusals/trust_config.txt",
    "refusals/trust_data_dir.txt",
    "refusals/trust_node_configuration.txt",
    "refusals/trust_policy.txt",
    "refusals/trust_units_dir.txt",
    "refusals/up.txt",
    "refusals/up_closed_units_dir.txt",
    "refusals/up_empty_store.txt",
];

/// The help of one command, 100 columns wide.
fn help(program: &str, commands: &[String]) -> String {
    let mut command = Command::new(binary(program));
    command.env_clear().env("COLUMNS", "100").args(commands).arg("--help").stdin(Stdio::null());
    let output = command.output().expect("a program that runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Compares the help of a command and of all commands below it. Returns the names of their files.
fn check_help(program: &str, commands: &[String]) -> Vec<String> {
    let help = help(program, commands);
    let words = std::iter::once(program).chain(commands.iter().map(String::as_str));
    let name = format!("help/{}.txt", words.collect::<Vec<_>>().join("-"));
    golden::check_exact(&name, &help);
    let section = help.split_once("\nCommands:\n").map_or("", |(_, section)| section);
    let listed = section.lines().take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| {
        line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
    });
    let below = names.filter(|name| *name != "help").map(|name| [commands, &[name.to_owned()]].concat());
    let below = below.flat_map(|commands| check_help(program, &commands));
    std::iter::once(name).chain(below).collect()
}

#[test]
fn every_golden_file_belongs_to_a_test_and_help_is_unchanged() {
    let mut expected: Vec<String> = FILES.iter().map(|file| (*file).to_owned()).collect();
    for program in ["juju", "hirtectl", "portcullis"] {
        let files = check_help(program, &[]);
        assert!(files.len() > 8, "{program} lists its commands: {files:?}");
        expected.extend(files);
    }
    expected.sort();
    assert_eq!(golden::files_below(""), expected);
}
