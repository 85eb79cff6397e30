//! The page about commands and flags is the programs' own help. Only the text is compared here;
//! whether it is true is for the tests of each command.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use crate::harness::binary;
use crate::page::{root, source};

const PAGE: &str = "docs/reference/cli.md";

const HEAD: &str = "\
# Commands and flags

This page is generated from the programs' own help; `BLESS=1 cargo nextest run --test docs help`
writes it again.
";

#[test]
fn the_page_about_commands_is_the_help_of_the_programs() {
    let mut page = HEAD.to_owned();
    for program in ["juju", "hirtectl", "portcullis", "open-port", "close-port", "opened-ports"] {
        add(&[program], &mut page);
    }
    if std::env::var_os("BLESS").is_some() {
        fs::write(root().join(PAGE), &page).unwrap();
    }
    let differs = page.lines().zip(source(PAGE).lines().map(str::to_owned)).find(|(made, kept)| made != kept);
    assert!(page == source(PAGE), "{PAGE} differs, first in {differs:?}; BLESS=1 writes it again");
}

/// Adds the help of a command, and of all its own commands.
fn add(command: &[&str], page: &mut String) {
    let help = help(command);
    let marks = "#".repeat(command.len() + 1);
    let (name, text) = (command.join(" "), help.trim_end());
    write!(page, "\n{marks} {name}\n\n<!-- output -->\n```text\n").unwrap();
    for line in text.lines() {
        writeln!(page, "{}", line.trim_end()).unwrap();
    }
    page.push_str("```\n");
    let listed = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap());
    for line in listed.lines() {
        // Lines that go on with a description are further in.
        let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '));
        if let Some(name) = name.and_then(|rest| rest.split(' ').next()).filter(|name| *name != "help") {
            add(&[command, &[name]].concat(), page);
        }
    }
}

fn help(command: &[&str]) -> String {
    let mut process = Command::new(binary(command[0]));
    process.args(&command[1..]).arg("--help").env_clear().env("COLUMNS", "100").env("NO_COLOR", "1");
    let output = process.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}
