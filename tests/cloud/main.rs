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
mod everyday;
mod failures;
#[path = "../harness/mod.rs"]
mod harness;
mod many;
#[path = "../cli/operator.rs"]
#[allow(dead_code, reason = "the tests of the command line use the rest")]
mod operator;
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
    everyday::machine_is_launched_opened_closed_and_terminated,
    everyday::adopted_instance_is_released_and_not_terminated,
    everyday::destroyed_environment_can_be_created_again,
    everyday::groups_of_a_lost_store_are_adopted_on_request,
    everyday::vpc_with_ipv6_is_opened_for_both_families,
    everyday::next_controller_removes_leftover_groups,
    drift::changes_by_hand_are_reverted_unless_foreign,
    drift::lost_instance_is_reported,
    drift::full_group_is_reported_and_affects_no_other,
    failures::ec2_failures_are_reported_and_close_nothing,
    failures::refused_launch_is_reported,
    failures::refused_termination_is_reported_with_ports_closed,
    failures::dry_run_changes_nothing_and_is_reported,
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
fn all_scenarios_pass() {
    run(SCENARIOS);
}

#[test]
fn hundreds_of_machines_need_no_writes_when_converged() {
    run(scenarios![many::hundreds_of_machines_need_no_writes_when_converged]);
}
