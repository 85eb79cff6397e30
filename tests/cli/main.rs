//! The real programs, run against Apache ZooKeeper and against the embedded keeper with one list of
//! scenarios. The store itself is tested elsewhere.

// Scenarios are tests, which the lint does not recognise.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod controller;
mod credentials;
mod daemon;
mod demo;
mod faults;
mod golden;
mod happy_path;
#[path = "../harness/mod.rs"]
mod harness;
mod heartbeat;
mod hook_users;
mod machine;
#[path = "../../provider/tests/netns/mod.rs"]
#[allow(dead_code)]
mod netns;
mod operator;
mod proxy;
mod refusals;
mod status_watch;
mod tls_store;
mod trust;
mod up_nftables;

use harness::Store;
use harness::scenario::{Scenario, run, scenarios};

use controller::{a_controller_with_invalid_settings_does_not_start, a_standby_controller_takes_over};
use credentials::{
    a_unit_can_open_only_its_own_ports, bootstrap_closes_the_root_of_a_keeper,
    bootstrap_uses_saved_credentials_without_a_tree, bootstrapping_twice_changes_nothing,
    concurrent_bootstraps_of_one_operator_succeed, of_two_operators_one_creates_the_environment,
};
use faults::{
    a_corrupt_znode_hides_nothing_else, a_lost_store_is_reported_in_time,
    repeating_a_command_after_a_lost_response_is_safe, status_reads_in_batches,
};
use happy_path::{everyday_commands_print_the_golden_text, status_is_written_to_stdout_or_a_file};
use refusals::{refused_commands_change_nothing, refused_commands_print_the_golden_text};
use status_watch::status_watch_shows_every_change;

const SCENARIOS: &[Scenario] = scenarios![
    everyday_commands_print_the_golden_text,
    status_is_written_to_stdout_or_a_file,
    status_watch_shows_every_change,
    refused_commands_print_the_golden_text,
    refused_commands_change_nothing,
    bootstrapping_twice_changes_nothing,
    bootstrap_uses_saved_credentials_without_a_tree,
    of_two_operators_one_creates_the_environment,
    concurrent_bootstraps_of_one_operator_succeed,
    a_unit_can_open_only_its_own_ports,
    a_corrupt_znode_hides_nothing_else,
    status_reads_in_batches,
    a_lost_store_is_reported_in_time,
    repeating_a_command_after_a_lost_response_is_safe,
    a_controller_with_invalid_settings_does_not_start,
    a_standby_controller_takes_over,
];

#[test]
fn on_zookeeper() {
    run(&Store::zookeeper(), SCENARIOS);
}

#[test]
fn on_the_keeper() {
    run(&Store::keeper(), SCENARIOS);
}

#[test]
fn the_root_of_a_keeper_is_closed() {
    bootstrap_closes_the_root_of_a_keeper(&Store::keeper());
}

#[test]
fn the_root_of_zookeeper_stays_open() {
    bootstrap_closes_the_root_of_a_keeper(&Store::zookeeper());
}
