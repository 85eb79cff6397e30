//! Units on a machine: real programs, hooks and processes, with one list of scenarios for Apache
//! ZooKeeper and the embedded keeper. The unit tests of the workflow cover its single steps.

// Clippy does not recognize the scenarios as tests.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "../harness/mod.rs"]
mod harness;
mod isolation;
mod killed;
mod killed_up;
mod life;
mod many_units;
mod misbehaving;
// Shared with the disk tests; only part of it is used here.
#[allow(dead_code)]
#[path = "../disk/mounts.rs"]
mod mounts;
// Shared with the CLI tests; only part of it is used here.
#[allow(dead_code)]
#[path = "../cli/operator.rs"]
mod operator;
mod restored;
mod strace;
mod world;

use harness::Store;
use harness::scenario::{Scenario, run, scenarios};

use isolation::{
    hook_cannot_access_another_environment, hook_cannot_access_another_machine,
    hook_cannot_access_other_units, secrets_appear_only_in_their_files,
};
use life::{
    failed_stop_hook_waits_for_the_operator, files_of_root_units_are_given_to_their_new_users,
    fixture_charms_work, killed_agents_run_each_hook_once, operator_resolves_failed_hooks,
    output_after_a_stop_request_is_logged, recreated_environment_leaves_old_units_alone,
    stop_hook_runs_as_the_new_hook_user,
};
use misbehaving::{
    deeply_nested_directories_are_removed_with_their_unit, failing_hooks_affect_only_their_unit,
    full_disk_does_not_prevent_the_end_of_a_hook, full_disk_puts_a_unit_into_an_error_state,
    hook_log_is_limited_to_a_megabyte, hook_that_kills_its_agent_is_given_up, log_reader_program_is_optional,
    missing_control_groups_are_logged, mounts_in_a_unit_directory_are_not_removed,
    process_with_cleared_environment_ends_with_its_unit, processes_that_keep_forking_end_with_their_unit,
    unit_removed_during_a_hook, unusable_units_directory_is_a_machine_problem,
};

const LIFE: &[Scenario] = scenarios![
    fixture_charms_work,
    operator_resolves_failed_hooks,
    failed_stop_hook_waits_for_the_operator,
    killed_agents_run_each_hook_once,
    output_after_a_stop_request_is_logged,
    files_of_root_units_are_given_to_their_new_users,
    stop_hook_runs_as_the_new_hook_user,
    recreated_environment_leaves_old_units_alone,
];

const ISOLATION: &[Scenario] = scenarios![
    hook_cannot_access_other_units,
    hook_cannot_access_another_machine,
    hook_cannot_access_another_environment,
    secrets_appear_only_in_their_files,
];

const MISBEHAVING: &[Scenario] = scenarios![
    failing_hooks_affect_only_their_unit,
    hook_that_kills_its_agent_is_given_up,
    deeply_nested_directories_are_removed_with_their_unit,
    mounts_in_a_unit_directory_are_not_removed,
    unit_removed_during_a_hook,
    hook_log_is_limited_to_a_megabyte,
    full_disk_puts_a_unit_into_an_error_state,
    full_disk_does_not_prevent_the_end_of_a_hook,
    log_reader_program_is_optional,
    process_with_cleared_environment_ends_with_its_unit,
    processes_that_keep_forking_end_with_their_unit,
    missing_control_groups_are_logged,
    unusable_units_directory_is_a_machine_problem,
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
fn isolation_on_zookeeper() {
    run(&Store::zookeeper(), ISOLATION);
}

#[test]
fn isolation_on_the_keeper() {
    run(&Store::keeper(), ISOLATION);
}

#[test]
fn misbehaving_hooks_on_zookeeper() {
    run(&Store::zookeeper(), MISBEHAVING);
}

#[test]
fn misbehaving_hooks_on_the_keeper() {
    run(&Store::keeper(), MISBEHAVING);
}
