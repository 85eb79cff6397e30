//! Facts of the wire, byte for byte, each asked of Apache ZooKeeper and of the keeper by the same code. Where the two
//! differ, the keeper is wrong.

#[path = "../harness/mod.rs"]
mod harness;

mod abuse;
mod acls;
mod files;
mod frames;
mod limits;
mod operations;
mod restarts;
mod sessions;
mod tls;
mod watches;
mod words;

use harness::scenario::run;
use harness::{Kind, Options, Store};

/// `super:secret`, for the tests of what the super user may do.
pub(crate) const SUPER: &str = "super:lK75jTNcA+U9vtVEw5vB51mj/w4=";

fn store(kind: Kind) -> Store {
    Store::start(kind, Options { super_digest: Some(SUPER.to_owned()), ..Options::default() })
}

fn all(kind: Kind) {
    let scenarios =
        [sessions::ALL, words::ALL, frames::ALL, operations::ALL, watches::ALL, acls::ALL].concat();
    run(&store(kind), &scenarios);
}

#[test]
fn zookeeper_wire() {
    all(Kind::ZooKeeper);
}

#[test]
fn keeper_wire() {
    all(Kind::Keeper);
}

#[test]
fn zookeeper_restarts() {
    restarts::sessions_outlive_the_server(store(Kind::ZooKeeper));
}

#[test]
fn keeper_restarts() {
    restarts::sessions_outlive_the_server(store(Kind::Keeper));
}

#[test]
fn zookeeper_expiry() {
    run(&store(Kind::ZooKeeper), sessions::SLOW);
}

#[test]
fn keeper_expiry() {
    run(&store(Kind::Keeper), sessions::SLOW);
}

#[test]
fn keeper_limits() {
    limits::connections_beyond_the_limit_are_closed_and_counted();
    limits::a_client_that_does_not_read_waits_and_holds_up_nobody();
    limits::a_full_tree_refuses_growth_and_goes_on();
}

#[test]
fn keeper_buffers() {
    limits::unread_answers_of_all_clients_are_bounded();
}

#[test]
fn keeper_strangers() {
    limits::an_authenticated_client_takes_the_place_of_one_that_is_not();
    limits::a_client_without_credentials_is_closed_in_time();
}

#[test]
fn keeper_abuse() {
    run(&store(Kind::Keeper), abuse::ALL);
}

#[test]
fn keeper_refusals_are_logged() {
    abuse::refusals_are_logged_once_with_identity_and_path();
}

#[test]
fn keeper_files() {
    files::the_limit_of_open_files_bounds_the_connections();
    files::a_keeper_without_a_free_file_serves_on();
}

#[test]
fn keeper_tls() {
    tls::the_protocol_is_the_same_inside();
    tls::who_shows_no_certificate_of_the_authority_stays_out();
    tls::a_keeper_of_another_authority_is_found_out();
    tls::what_is_no_tls_is_closed();
}

#[test]
fn keeper_tls_ends() {
    tls::a_farewell_right_behind_a_request_is_seen_after_its_answer();
}

#[test]
fn keeper_tls_fails() {
    tls::a_request_before_garbage_is_handled();
}

#[test]
fn keeper_tls_stops() {
    tls::a_keeper_that_stops_says_farewell();
}
