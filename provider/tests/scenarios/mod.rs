//! The scenarios, each with its own account. A scenario that is missing from the list does not run,
//! and the compiler warns about it as dead code.

mod budgets;
mod machines;
mod reading;
mod refusals;
mod rules;

use crate::cloud::Account;
use portcullis_provider::ec2::Ec2;
use portcullis_provider::provider::{Firewall, MachineNumber, MachineRules, Seen};
use portcullis_provider::rule::{Change, Cidr, PortRange, Protocol, Rule};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;

pub(crate) type Scenario = fn(Arc<Account>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! scenarios {
    ($($file:ident :: $name:ident),* $(,)?) => {
        pub(crate) const ALL: &[(&str, Scenario)] =
            &[$((
                concat!(stringify!($file), "::", stringify!($name)),
                |account| Box::pin($file::$name(account)),
            )),*];
    };
}

scenarios![
    budgets::fifty_groups_cost_what_a_good_script_does,
    budgets::many_machines_are_read_with_few_calls,
    machines::a_launch_makes_both_groups_and_is_done_once,
    machines::a_launch_whose_answer_was_lost_is_done_once,
    machines::a_launch_that_has_ended_is_said_anew,
    machines::a_launch_needs_a_place,
    machines::a_group_left_over_opens_nothing,
    machines::a_group_of_others_is_in_the_way,
    machines::environments_with_one_name_stay_apart,
    machines::stores_with_one_environment_name_stay_apart,
    machines::groups_of_a_lost_store_are_adopted,
    machines::adopted_instances_are_only_let_go,
    machines::a_group_that_somebody_deleted_is_made_again,
    machines::a_group_is_shut_and_theirs_stays,
    machines::a_group_goes_when_nothing_holds_it,
    machines::the_list_has_all_of_ours_and_nothing_else,
    reading::pages_are_put_together,
    reading::vpcs_come_in_pages_too,
    reading::late_readers_do_not_undo_our_writes,
    reading::a_group_just_made_is_known,
    reading::of_two_groups_the_one_in_use_counts,
    reading::failures_are_not_emptiness,
    reading::ipv6_is_said_where_the_vpc_has_it,
    reading::somebody_elses_rules_are_shown,
    refusals::a_duplicate_in_a_batch,
    refusals::a_missing_rule_in_a_batch,
    refusals::a_missing_rule_in_a_default_vpc,
    refusals::the_same_permission_twice,
    refusals::a_group_that_is_not_there,
    refusals::a_name_that_is_taken,
    refusals::too_many_rules,
    refusals::nothing_is_sent_late_though_it_was_begun_in_time,
    refusals::throttled_for_a_moment,
    refusals::throttled_for_good,
    refusals::trouble_inside,
    refusals::denied,
    refusals::an_answer_that_got_lost,
    refusals::no_answer_at_all,
    rules::the_contract_holds,
    rules::a_change_is_one_request_each_way,
    rules::rules_of_others_stay,
    rules::tampering_is_seen,
];

pub(crate) const ONE: MachineNumber = MachineNumber::new(1);

pub(crate) fn tcp(ports: &[u16]) -> BTreeSet<Rule> {
    let rule = |&port| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
    ports.iter().map(rule).collect()
}

pub(crate) fn change(open: &[u16], close: &[u16]) -> Change {
    Change { open: tcp(open), close: tcp(close) }
}

pub(crate) fn counts(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected.iter().map(|(action, count)| ((*action).to_owned(), *count)).collect()
}

pub(crate) async fn seen(ec2: &Ec2, machine: MachineNumber) -> MachineRules {
    match ec2.observe(&BTreeSet::from([machine])).await.unwrap().remove(&machine) {
        Some(Seen::Present(rules)) => rules,
        other => panic!("machine {machine} should be there, got {other:?}"),
    }
}
