//! Units on a machine: the real programs, real hooks and real processes, against Apache ZooKeeper and against the
//! embedded keeper from one list of scenarios. What a workflow does step by step is tested where it is decided.

// Scenarios are tests, though the lint cannot see it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod bad;
mod guards;
#[path = "../harness/mod.rs"]
mod harness;
mod killed;
mod killed_up;
mod life;
mod many_units;
// Shared with the tests of disks; not all of it is needed here.
#[allow(dead_code)]
#[path = "../disk/mounts.rs"]
mod mounts;
// Shared with the tests of the programs; not all of it is needed here.
#[allow(dead_code)]
#[path = "../cli/operator.rs"]
mod operator;
mod restored;
mod steps;
mod world;

use harness::Store;
use harness::scenario::{Scenario, run, scenarios};

use bad::{
    a_daemon_that_is_alone_keeps_logs_itself, a_full_disk_is_a_clear_state,
    a_full_disk_keeps_no_hook_from_being_ended, a_gigabyte_of_output_is_a_megabyte_of_log,
    bad_hooks_are_clear_states_and_nobody_elses_trouble, directories_without_end_go_with_their_unit,
    hooks_that_kill_their_machines_agent, removed_in_the_middle_of_a_hook,
    units_without_a_place_are_a_problem, what_forgets_where_it_came_from_ends_with_its_unit,
    what_is_mounted_is_not_removed, what_never_holds_still_ends_with_its_unit,
    where_there_are_no_groups_it_is_said,
};
use guards::{
    a_hook_gets_at_nothing_of_another_environment, a_hook_gets_at_nothing_of_another_machine,
    a_hook_gets_at_nothing_that_is_not_its_own, secrets_are_in_their_files_and_nowhere_else,
};
use life::{
    a_unit_that_cannot_stop_waits_for_a_decision, agents_that_are_killed_do_everything_once,
    an_environment_made_anew_leaves_anothers_units_alone, charms_do_what_they_say, errors_are_resolved,
    last_words_are_heard, units_are_handed_over_for_their_last_hook,
    units_are_handed_over_to_users_of_their_own,
};

const LIFE: &[Scenario] = scenarios![
    charms_do_what_they_say,
    errors_are_resolved,
    a_unit_that_cannot_stop_waits_for_a_decision,
    agents_that_are_killed_do_everything_once,
    last_words_are_heard,
    units_are_handed_over_to_users_of_their_own,
    units_are_handed_over_for_their_last_hook,
    an_environment_made_anew_leaves_anothers_units_alone,
];

const GUARDS: &[Scenario] = scenarios![
    a_hook_gets_at_nothing_that_is_not_its_own,
    a_hook_gets_at_nothing_of_another_machine,
    a_hook_gets_at_nothing_of_another_environment,
    secrets_are_in_their_files_and_nowhere_else,
];

const BAD: &[Scenario] = scenarios![
    bad_hooks_are_clear_states_and_nobody_elses_trouble,
    hooks_that_kill_their_machines_agent,
    directories_without_end_go_with_their_unit,
    what_is_mounted_is_not_removed,
    removed_in_the_middle_of_a_hook,
    a_gigabyte_of_output_is_a_megabyte_of_log,
    a_full_disk_is_a_clear_state,
    a_full_disk_keeps_no_hook_from_being_ended,
    a_daemon_that_is_alone_keeps_logs_itself,
    what_forgets_where_it_came_from_ends_with_its_unit,
    what_never_holds_still_ends_with_its_unit,
    where_there_are_no_groups_it_is_said,
    units_without_a_place_are_a_problem,
];

#[test]
fn on_zookeeper() {
    run(&Store::zookeeper(), LIFE);
}

#[test]
fn on_the_keeper() {
    run(&Store::keeper(), LIFE);
}

#[test]
fn guards_on_zookeeper() {
    run(&Store::zookeeper(), GUARDS);
}

#[test]
fn guards_on_the_keeper() {
    run(&Store::keeper(), GUARDS);
}

#[test]
fn bad_hooks_on_zookeeper() {
    run(&Store::zookeeper(), BAD);
}

#[test]
fn bad_hooks_on_the_keeper() {
    run(&Store::keeper(), BAD);
}
