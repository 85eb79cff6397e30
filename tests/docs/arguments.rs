//! Commands that no test can run here (several machines, EC2, the whole host) and commands within
//! sentences: the programs' own parser accepts their arguments. Values that only a store can check
//! are not checked.

use std::process::Command as Process;

use crate::harness::binary;
use crate::page::{Page, source};

const PROGRAMS: [&str; 6] = ["juju", "hirtectl", "portcullis", "open-port", "close-port", "opened-ports"];

/// Every block that is not run gives its reason, or is marked as output.
#[test]
fn blocks_that_are_not_run_give_a_reason() {
    for page in Page::all() {
        for block in page.blocks.iter().filter(|block| block.language == "text") {
            let comment = block.comment.as_deref().unwrap_or_default();
            let reason = comment.strip_prefix("not run: ").is_some_and(|reason| reason.len() > 10);
            assert!(comment == "output" || reason, "{}:{}: no comment", page.path, block.line);
        }
        for block in &page.blocks {
            let known = ["sh", "console", "text", "json", "yaml", "mermaid"];
            let is_known = known.contains(&block.language.as_str());
            assert!(is_known, "{}:{}: '{}'", page.path, block.line, block.language);
            // The only page whose sessions on several machines are run: tests/fleet/tutorial.rs.
            let is_run = page.path == "docs/tutorials/three-machines.md";
            assert!(block.language != "console" || is_run, "{}:{}: not run", page.path, block.line);
        }
    }
}

#[test]
fn arguments_of_commands_that_are_not_run_exist() {
    let mut checked = 0;
    for page in Page::all() {
        for block in page.blocks.iter().filter(|block| block.language == "text") {
            if block.comment.as_deref() != Some("output") {
                for command in block.commands() {
                    checked += check(&format!("{}:{}", page.path, command.line), &command.text);
                }
            }
        }
    }
    assert!(checked > 30, "only {checked} commands found");
}

#[test]
fn arguments_of_commands_in_sentences_exist() {
    let mut checked = 0;
    for page in Page::all().iter().filter(|page| page.path != "docs/reference/cli.md") {
        let prose = page.text.split("```").step_by(2);
        let joined: Vec<String> = prose.map(|text| text.replace('\n', " ")).collect();
        for text in joined {
            for code in text.split('`').skip(1).step_by(2) {
                // Optional parts are shown in brackets.
                checked += check(&page.path, &code.replace(['[', ']'], ""));
            }
        }
    }
    assert!(checked > 60, "only {checked} commands found");
}

#[test]
fn unknown_commands_and_flags_are_found() {
    for line in [
        "juju frobnicate",
        "juju deploy --frob x",
        "ENV=x portcullis up --frob",
        "a && juju status --xml",
        "cargo frob",
    ] {
        let found = std::panic::catch_unwind(|| check("here", line));
        assert!(found.is_err(), "{line}");
    }
    assert_eq!(check("here", "juju -e prod status 'a b' # text | more"), 1);
}

/// Checks each command of ours in a line, and returns their number.
fn check(place: &str, line: &str) -> usize {
    let mut checked = 0;
    for simple in simple_commands(line) {
        let words = simple.iter().map(String::as_str).skip_while(|word| is_prefix(word));
        let words: Vec<&str> = words.collect();
        let Some((program, arguments)) = words.split_first() else { continue };
        if let ("cargo", Some(command)) = (*program, arguments.first()) {
            let known = ["build", "check", "fuzz", "install", "nextest"].contains(command);
            let aliases = source(".cargo/config.toml");
            let alias = aliases.lines().any(|alias| alias.starts_with(&format!("{command} = ")));
            assert!(known || alias, "{place}: {line}");
        }
        if !PROGRAMS.contains(program) {
            continue;
        }
        // The parser reports unknown arguments before it prints its help.
        let mut process = Process::new(binary(program));
        let output = process.args(arguments).arg("--help").env_clear().output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{place}: {line}\n{printed}");
        checked += 1;
    }
    checked
}

/// Words that may precede a program: another program that runs it, and variables.
fn is_prefix(word: &str) -> bool {
    let variable = word.split_once('=').is_some_and(|(name, _)| !name.starts_with('-'));
    ["sudo", "ssh", "eval"].contains(&word) || word.contains('@') || variable
}

/// The words of each simple command of a line, without quotes, redirections and comments.
fn simple_commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let (mut word, mut quote) = (String::new(), None);
    for c in line.replace("\\\n", " ").chars().chain([' ']) {
        match (c, quote) {
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (c, Some(_)) => word.push(c),
            ('#', None) if word.is_empty() => break,
            ('&' | '|' | ';' | '>' | '<' | '(' | ')' | ' ' | '\n', None) => {
                if !word.is_empty() {
                    commands.last_mut().unwrap().push(std::mem::take(&mut word));
                }
                if c != ' ' {
                    commands.push(Vec::new());
                }
            }
            (c, None) => word.push(c),
        }
    }
    commands
}
