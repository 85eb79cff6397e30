//! The documentation is correct: its commands run, their arguments exist, and what it repeats is
//! the same as its source. The behaviour of the programs beyond what a page shows is tested
//! elsewhere.

// Scenarios are tests, though the lint cannot see it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod arguments;
#[path = "../harness/mod.rs"]
mod harness;
mod help;
mod page;
mod prose;
mod session;

use page::Page;

/// One test for each page with commands, so that a failure names its page.
macro_rules! pages {
    ($($name:ident => $path:literal,)*) => {
        const RUN: &[&str] = &[$($path),*];
        $(#[test]
        fn $name() {
            session::run(&Page::read($path));
        })*
    };
}

pages! {
    readme_commands_run => "README.md",
    one_machine_commands_run => "docs/tutorials/one-machine.md",
    three_machines_commands_run => "docs/tutorials/three-machines.md",
    ec2_tutorial_commands_run => "docs/tutorials/ec2.md",
    first_charm_commands_run => "docs/tutorials/first-charm.md",
    systemd_commands_run => "docs/how-to/systemd.md",
    tls_commands_run => "docs/how-to/tls.md",
    firewall_commands_run => "docs/how-to/firewall.md",
    backup_and_restore_commands_run => "docs/how-to/backup-restore.md",
    dead_machine_commands_run => "docs/how-to/dead-machine.md",
    remove_everything_commands_run => "docs/how-to/remove-everything.md",
    monitoring_commands_run => "docs/how-to/monitoring.md",
    exit_codes_commands_run => "docs/reference/exit-codes.md",
}

#[test]
fn every_page_with_commands_is_run() {
    let pages = Page::all();
    let with_commands: Vec<_> =
        pages.iter().filter(|page| !page.commands().is_empty()).map(|page| page.path.as_str()).collect();
    let mut run = RUN.to_vec();
    run.sort_unstable();
    assert_eq!(with_commands, run);
}

/// Readers copy the policy from the page; the driver's tests check the file.
#[test]
fn the_iam_policy_on_the_page_is_the_one_in_the_file() {
    let page = Page::read("docs/reference/ec2.md");
    let policy = &page.blocks.iter().find(|block| block.language == "json").unwrap().text;
    let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(parse(policy), parse(&page::source("fixtures/ec2/iam-policy.json")));
}
