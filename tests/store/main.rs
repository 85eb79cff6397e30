//! The public interface of the store: one suite for every tree, so that the store in memory and
//! those over the wire behave the same; and the failures of connections.

// A test panics when something is wrong; that is its job.
#![allow(clippy::unwrap_used)]

#[path = "../harness/mod.rs"]
mod harness;

mod charms;
mod contract;
mod joining;
mod lost;
mod machines;
mod operations;
mod races;
mod rights;
mod wire;

use harness::Store;
use portcullis::store::{Address, Credential, MemoryStore, MemoryTree, Tree, ZkTree};
use std::future::Future;

/// A store that a scenario can connect to with any identity.
trait Backend {
    type Tree: Tree + 'static;

    async fn connect(&self, credential: Option<&Credential>) -> Self::Tree;

    /// Ends the session before it returns.
    async fn close(&self, tree: Self::Tree);
}

impl Backend for MemoryStore {
    type Tree = MemoryTree;

    async fn connect(&self, credential: Option<&Credential>) -> MemoryTree {
        MemoryStore::connect(self, credential)
    }

    async fn close(&self, tree: MemoryTree) {
        drop(tree);
    }
}

impl Backend for Address {
    type Tree = ZkTree;

    async fn connect(&self, credential: Option<&Credential>) -> ZkTree {
        ZkTree::connect(self, credential).await.unwrap()
    }

    async fn close(&self, tree: ZkTree) {
        tree.close().await;
    }
}

/// Generates one test per scenario and tree: `memory::NAME`, `zookeeper::NAME` and `keeper::NAME`.
macro_rules! on_every_tree {
    ($($module:ident::$name:ident),+ $(,)?) => {
        mod memory {
            $(#[test] fn $name() { super::block_on(super::$module::$name(&super::MemoryStore::default())); })+
        }
        mod zookeeper {
            $(#[test] fn $name() { super::on_server!(ZooKeeper, $module::$name); })+
        }
        mod keeper {
            $(#[test] fn $name() { super::on_server!(Keeper, $module::$name); })+
        }
    };
}

/// Runs a scenario in an empty chroot of a new server.
macro_rules! on_server {
    ($kind:ident, $module:ident::$name:ident) => {
        let server = $crate::harness::Store::start($crate::harness::Kind::$kind, Default::default());
        $crate::block_on($crate::$module::$name(&$crate::site(&server, stringify!($name))));
    };
}
use on_server;

on_every_tree![
    contract::absent_znodes_are_reported,
    contract::versions_guard_every_change,
    contract::a_multi_is_all_or_nothing,
    contract::rights_are_enforced,
    contract::rights_are_replaced_only_with_permission,
    contract::many_reads_are_answered_in_order,
    contract::ephemerals_end_with_their_session,
    contract::a_feed_reports_its_subtree_only,
    contract::oversized_writes_are_refused_before_sending,
    operations::bootstrap_creates_a_complete_environment_once,
    operations::bootstrap_refuses_a_root_with_foreign_znodes,
    operations::opening_needs_bootstrap_and_the_right_credentials,
    operations::deploy_creates_service_units_and_machines,
    operations::a_service_name_is_unique,
    operations::placement_takes_the_lowest_empty_machine,
    operations::units_are_added_and_removed,
    operations::numbers_are_never_reused,
    operations::flags_change_once,
    operations::machines_in_use_are_not_terminated,
    operations::unknown_names_are_refused_and_nothing_is_created,
    operations::corrupt_znodes_are_named_and_never_read_as_empty,
    operations::concurrent_deployments_do_not_collide,
    operations::destroying_a_large_service_takes_several_steps,
    operations::ports_are_kept_in_order_without_duplicates,
    operations::concurrent_port_changes_are_both_kept,
    machines::names_of_machines_are_unique_until_they_are_terminated,
    machines::the_index_of_names_is_created_on_first_use,
    machines::no_address_of_a_machine_is_the_name_of_another,
    machines::a_machine_reports_its_host_and_no_other_one,
    machines::a_machine_whose_agent_is_down_is_terminated_by_force_only,
    machines::only_the_terminated_machine_reads_its_tombstone,
    joining::an_offer_is_used_once_and_its_secret_is_gone_then,
    joining::an_offer_at_launch_is_the_same_until_it_is_used,
    joining::the_controller_deletes_offers_that_have_expired,
    joining::an_added_operator_reads_its_entry_until_it_is_removed,
    charms::a_charm_is_stored_once_and_found_by_its_hash,
    charms::an_incomplete_charm_is_completed,
    charms::a_modified_charm_is_refused,
    charms::the_hash_of_a_charm_grants_reading_it,
    charms::a_charm_is_removed_with_its_last_service,
    rights::a_unit_writes_its_own_ports_and_nothing_else,
    rights::a_machine_reads_its_own_units_only,
    rights::a_machine_reads_the_flags_of_its_units_services,
    rights::a_machine_reports_on_itself,
    rights::a_machine_writes_the_state_of_its_units,
    rights::the_controller_reads_all_and_writes_machine_records,
    rights::other_identities_have_no_rights,
    rights::znodes_that_a_machine_hides_do_not_hide_others,
    rights::hidden_znodes_are_removed_with_their_machine,
    operations::a_removed_unit_has_no_open_ports,
];

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
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
