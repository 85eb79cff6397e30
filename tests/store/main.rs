//! The store as its users see it: one suite for every tree, so that a simulation in process and a store over the wire
//! cannot drift apart; and what only a wire can do, which is fail.

// A test panics when something is wrong; that is its job.
#![allow(clippy::unwrap_used)]

// Its macro for scenarios is for those that need no runtime.
#[path = "../harness/mod.rs"]
mod harness;

mod charms;
mod contract;
mod lost;
mod operations;
mod races;
mod rights;
mod wire;

use harness::{Kind, Store};
use portcullis::store::{Address, Credential, MemoryStore, MemoryTree, Tree, ZkTree};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;

/// A place where a scenario can connect as whomever it likes.
trait Place {
    type Tree: Tree + 'static;

    async fn connect(&self, credential: Option<&Credential>) -> Self::Tree;

    /// Ends the session before it returns.
    async fn close(&self, tree: Self::Tree);
}

impl Place for MemoryStore {
    type Tree = MemoryTree;

    async fn connect(&self, credential: Option<&Credential>) -> MemoryTree {
        MemoryStore::connect(self, credential)
    }

    async fn close(&self, tree: MemoryTree) {
        drop(tree);
    }
}

impl Place for Address {
    type Tree = ZkTree;

    async fn connect(&self, credential: Option<&Credential>) -> ZkTree {
        ZkTree::connect(self, credential).await.unwrap()
    }

    async fn close(&self, tree: ZkTree) {
        tree.close().await;
    }
}

type Scenario<P> = (&'static str, for<'a> fn(&'a P) -> Pin<Box<dyn Future<Output = ()> + 'a>>);

/// Async functions of a place, with their names.
macro_rules! list {
    ($place:ty: $($module:ident::$name:ident),* $(,)?) => {
        vec![$((stringify!($name), (|place| Box::pin($module::$name(place))) as for<'a> fn(&'a $place) -> Pin<Box<dyn Future<Output = ()> + 'a>>)),*]
    };
}

fn scenarios<P: Place>() -> Vec<Scenario<P>> {
    list![P:
        contract::what_is_absent_is_said_to_be,
        contract::versions_guard_every_change,
        contract::a_multi_is_all_or_nothing,
        contract::rights_are_enforced,
        contract::rights_can_be_replaced_by_who_may,
        contract::many_reads_come_back_in_order,
        contract::ephemerals_end_with_their_session,
        contract::a_feed_sees_its_subtree_only,
        contract::oversized_writes_are_refused_here,
        operations::bootstrap_makes_a_whole_environment_once,
        operations::bootstrap_keeps_off_what_is_not_ours,
        operations::opening_needs_bootstrap_and_the_right_credentials,
        operations::deploy_makes_service_units_and_machines,
        operations::a_name_is_taken_once,
        operations::placement_takes_the_lowest_empty_machine,
        operations::units_are_added_and_removed,
        operations::numbers_are_never_used_again,
        operations::flags_change_once,
        operations::machines_in_use_stay,
        operations::unknown_names_are_refused_and_nothing_is_made,
        operations::garbage_is_named_and_never_empty,
        operations::many_deployers_do_not_collide,
        operations::destroying_a_large_service_takes_several_steps,
        operations::ports_are_kept_in_order_and_once,
        operations::concurrent_port_writers_both_win,
        charms::a_charm_is_stored_once_and_found_by_its_hash,
        charms::a_charm_half_stored_is_finished,
        charms::a_charm_that_was_changed_is_refused,
        charms::who_knows_the_hash_may_read_the_charm,
        charms::a_charm_goes_with_the_last_service_made_of_it,
        rights::a_unit_writes_its_own_ports_and_nothing_else,
        rights::a_machine_sees_its_own_units,
        rights::a_unit_opens_its_services_flag_to_its_machine,
        rights::a_machine_reports_on_itself,
        rights::a_machine_writes_the_state_of_its_units,
        rights::the_controller_reads_all_and_writes_what_providers_say,
        rights::nobody_else_sees_anything,
        rights::what_a_machine_keeps_to_itself_hides_nothing_else,
        rights::what_a_machine_hides_goes_with_it,
        operations::a_unit_that_is_gone_has_nothing_open,
    ]
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Runs every scenario at a place of its own, also after one has failed.
fn run_all<P: Place>(mut place: impl FnMut(&'static str) -> P) {
    let mut failed = Vec::new();
    for (name, scenario) in scenarios::<P>() {
        let place = place(name);
        if catch_unwind(AssertUnwindSafe(|| block_on(scenario(&place)))).is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// A chroot on a server.
fn address_of(store: &Store, name: &str) -> Address {
    format!("{}/{name}", store.addr()).parse().unwrap()
}

/// An empty chroot of its own on a server.
fn site(store: &Store, name: &str) -> Address {
    let chroot = format!("/{name}");
    harness::wire::Client::connect(store.addr()).create(&chroot, b"", harness::wire::Create::Persistent);
    address_of(store, name)
}

#[test]
fn memory() {
    run_all(|_| MemoryStore::default());
}

#[test]
fn zookeeper() {
    let store = Store::start(Kind::ZooKeeper, harness::Options::default());
    run_all(|name| site(&store, name));
}

#[test]
fn keeper() {
    let store = Store::start(Kind::Keeper, harness::Options::default());
    run_all(|name| site(&store, name));
}
