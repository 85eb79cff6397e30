//! The programs as their users see them: the real binaries, run against Apache ZooKeeper and against the embedded keeper
//! from one list of scenarios. What the store does underneath is tested elsewhere.

// Scenarios are tests, though the lint cannot see it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod apart;
mod beating;
mod controller;
mod credentials;
mod daemon;
mod demo;
mod earnest;
mod faults;
#[path = "../harness/mod.rs"]
mod harness;
mod machine;
#[path = "../../provider/tests/netns/mod.rs"]
#[allow(dead_code)]
mod netns;
mod operator;
mod proxy;
mod refusals;
mod story;
mod trust;
mod watching;

use harness::Store;
use harness::scenario::{Scenario, run, scenarios};

use controller::{a_controller_refuses_to_start_in_the_dark, controllers_lead_and_take_over};
use credentials::{
    a_file_without_a_tree_is_taken_up, a_unit_can_open_its_ports_and_nothing_else,
    bootstrap_closes_the_root_of_a_keeper, bootstrapping_twice_is_harmless,
    two_operators_at_once_make_one_environment, two_processes_of_one_operator_agree,
};
use faults::{
    a_second_run_puts_it_right, a_store_that_goes_away_is_told_in_time,
    garbage_in_a_znode_hides_nothing_else, status_asks_in_batches,
};
use refusals::{refusals_change_nothing, what_is_wrong_is_said};
use story::{status_goes_where_it_should, the_whole_story};
use watching::whoever_watches_sees_every_change;

const SCENARIOS: &[Scenario] = scenarios![
    the_whole_story,
    status_goes_where_it_should,
    whoever_watches_sees_every_change,
    what_is_wrong_is_said,
    refusals_change_nothing,
    bootstrapping_twice_is_harmless,
    a_file_without_a_tree_is_taken_up,
    two_operators_at_once_make_one_environment,
    two_processes_of_one_operator_agree,
    a_unit_can_open_its_ports_and_nothing_else,
    garbage_in_a_znode_hides_nothing_else,
    status_asks_in_batches,
    a_store_that_goes_away_is_told_in_time,
    a_second_run_puts_it_right,
    a_controller_refuses_to_start_in_the_dark,
    controllers_lead_and_take_over,
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
fn keeper_root() {
    bootstrap_closes_the_root_of_a_keeper(&Store::keeper());
}

#[test]
fn zookeeper_root() {
    bootstrap_closes_the_root_of_a_keeper(&Store::zookeeper());
}
