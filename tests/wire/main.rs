//! Tests of the wire protocol, byte for byte. The same code runs against Apache ZooKeeper and
//! against the keeper; where the two differ, the keeper is wrong.

#[path = "../harness/mod.rs"]
mod harness;

mod abuse;
mod acls;
mod files;
mod four_letter;
mod frames;
mod limits;
mod operations;
mod restarts;
mod sessions;
mod tls;
mod watches;

use harness::scenario::run;
use harness::{Kind, Options, Store};

/// The digest of `super:secret`, for the tests of the super user.
pub(crate) const SUPER: &str = "super:lK75jTNcA+U9vtVEw5vB51mj/w4=";

fn store(kind: Kind) -> Store {
    Store::start(kind, Options { super_digest: Some(SUPER.to_owned()), ..Options::default() })
}

fn all(kind: Kind) {
    let scenarios =
        [sessions::ALL, four_letter::ALL, frames::ALL, operations::ALL, watches::ALL, acls::ALL].concat();
    run(&store(kind), &scenarios);
}

#[test]
fn zookeeper_follows_the_wire_protocol() {
    all(Kind::ZooKeeper);
}

#[test]
fn keeper_follows_the_wire_protocol() {
    all(Kind::Keeper);
}

#[test]
fn zookeeper_restores_sessions_after_a_restart() {
    restarts::sessions_survive_a_restart(store(Kind::ZooKeeper));
}

#[test]
fn keeper_restores_sessions_after_a_restart() {
    restarts::sessions_survive_a_restart(store(Kind::Keeper));
}

#[test]
fn zookeeper_expires_sessions_and_nodes() {
    run(&store(Kind::ZooKeeper), sessions::SLOW);
}

#[test]
fn keeper_expires_sessions_and_nodes() {
    run(&store(Kind::Keeper), sessions::SLOW);
}

#[test]
fn keeper_enforces_its_limits() {
    limits::connections_beyond_the_limit_are_closed_and_counted();
    limits::client_that_does_not_read_delays_only_itself();
    limits::full_tree_refuses_growth_and_serves_other_requests();
}

#[test]
fn keeper_bounds_its_buffers() {
    limits::unread_replies_of_all_clients_are_bounded();
}

#[test]
fn keeper_evicts_unauthenticated_clients() {
    limits::new_client_evicts_the_oldest_unauthenticated_one();
    limits::unauthenticated_client_is_closed_after_the_timeout();
}

#[test]
fn keeper_withstands_hostile_clients() {
    run(&store(Kind::Keeper), abuse::ALL);
}

#[test]
fn keeper_refusals_are_logged() {
    abuse::refusals_are_logged_once_with_identity_and_path();
}

#[test]
fn keeper_works_within_the_limit_of_open_files() {
    files::limit_of_open_files_bounds_the_connections();
    files::keeper_without_a_free_descriptor_keeps_serving();
}

#[test]
fn keeper_serves_and_checks_tls_clients() {
    tls::protocol_is_the_same_over_tls();
    tls::clients_without_a_trusted_certificate_are_refused();
    tls::client_refuses_a_keeper_of_another_authority();
    tls::plain_bytes_on_the_tls_listener_close_the_connection();
    tls::replaced_certificates_are_used_without_a_restart();
}

#[test]
fn keeper_handles_the_end_of_a_tls_stream() {
    tls::close_notify_behind_a_request_is_handled_after_its_reply();
}

#[test]
fn keeper_handles_a_broken_tls_stream() {
    tls::request_before_garbage_is_handled();
}

#[test]
fn keeper_closes_tls_streams_when_it_stops() {
    tls::stopping_keeper_sends_close_notify();
}
