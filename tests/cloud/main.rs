//! The whole product against LocalStack's EC2: the real `juju`, `open-port` and `portcullis` with
//! the embedded keeper, and a proxy before LocalStack that counts calls and can refuse them. Tests
//! of the driver alone belong in `provider/`. `SCENARIO=adopted cargo nextest run --test cloud`
//! runs the scenarios whose name contains that text.

#![cfg(feature = "ec2")]
// Scenarios are tests, which the lint does not detect; their durations are printed.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../../provider/tests/cloud/mod.rs"]
#[allow(dead_code, reason = "the driver's own tests use the rest")]
mod cloud;
mod controller;
mod drift;
#[path = "../harness/mod.rs"]
mod harness;
mod many;
#[path = "../cli/operator.rs"]
#[allow(dead_code, reason = "the tests of the command line use the rest")]
mod operator;
mod story;
mod trouble;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use cloud::localstack::LocalStack;
use cloud::warm_up;
use harness::Store;
use harness::wire::{Client, Create};
use world::World;

type Scenario = (&'static str, fn(&World));

macro_rules! scenarios {
    ($($file:ident :: $name:ident),* $(,)?) => { &[$((stringify!($name), $file::$name as fn(&World))),*] };
}

const SCENARIOS: &[Scenario] = scenarios![
    story::a_machine_is_launched_opened_shut_and_ended,
    story::an_adopted_instance_is_only_let_go,
    story::an_environment_can_be_made_anew_under_its_old_name,
    story::groups_of_a_lost_store_are_adopted_on_request,
    story::a_vpc_with_ipv6_is_opened_to_both_worlds,
    story::another_controller_takes_over_and_sweeps_what_is_left,
    drift::what_was_done_by_hand_is_put_right_or_left_alone,
    drift::an_instance_that_vanished_is_shown,
    drift::a_group_that_others_filled_is_shown_and_holds_up_nobody,
    trouble::what_keeps_ec2_away_is_shown_closes_nothing_and_is_waited_for,
    trouble::a_launch_that_is_refused_is_shown,
    trouble::an_end_that_is_refused_is_shown_and_leaves_nothing_open,
    trouble::a_dry_run_changes_nothing_and_says_so,
];

fn run(scenarios: &[Scenario]) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let localstack = LocalStack::start();
    runtime.block_on(warm_up(localstack.address));
    let store = Store::keeper();
    let only = std::env::var("SCENARIO").ok();
    let mut failed = Vec::new();
    let chosen = |(name, _): &&Scenario| only.as_ref().is_none_or(|only| name.contains(only));
    // The nodes of all scenarios are created first: the first scenario restricts the keeper's root.
    for (name, _) in scenarios.iter().filter(chosen) {
        Client::connect(store.addr()).create(&format!("/{name}"), b"", Create::Persistent);
    }
    for (name, scenario) in scenarios.iter().filter(chosen) {
        let began = Instant::now();
        let world = World::new(&store, name, runtime.handle().clone(), localstack.address);
        if catch_unwind(AssertUnwindSafe(|| scenario(&world))).is_err() {
            failed.push(*name);
        }
        println!("{name}: {:?}", began.elapsed());
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

#[test]
fn alone_all_scenarios_hold() {
    run(SCENARIOS);
}

#[test]
fn alone_a_thousand_machines_cost_a_converged_controller_nothing() {
    run(scenarios![many::a_thousand_machines_cost_a_converged_controller_nothing]);
}
