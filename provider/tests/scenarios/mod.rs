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
    budgets::fifty_groups_need_one_call_per_change,
    budgets::many_machines_are_read_with_few_calls,
    machines::launch_creates_both_groups_and_is_idempotent,
    machines::launch_after_a_lost_reply_is_idempotent,
    machines::terminated_launch_is_repeated_with_a_new_token,
    machines::launch_without_a_usable_subnet_is_refused,
    machines::leftover_group_is_emptied_or_replaced,
    machines::foreign_group_with_our_name_is_reported,
    machines::environments_with_similar_names_are_separate,
    machines::stores_with_one_environment_name_are_separate,
    machines::groups_of_a_lost_store_are_adopted,
    machines::adopted_instance_is_released_and_not_terminated,
    machines::deleted_group_is_created_again,
    machines::revoke_all_keeps_foreign_rules,
    machines::unused_group_is_deleted,
    machines::list_contains_exactly_our_objects,
    reading::all_pages_are_read,
    reading::all_pages_of_vpcs_are_read,
    reading::stale_reads_do_not_undo_our_writes,
    reading::new_group_is_used_before_reads_show_it,
    reading::of_several_groups_the_one_in_use_is_read,
    reading::failed_reads_are_errors_and_not_empty_results,
    reading::ipv6_of_a_vpc_is_reported,
    reading::foreign_rules_are_reported,
    refusals::duplicate_rule_in_a_batch_is_skipped,
    refusals::missing_rule_in_a_batch_is_skipped,
    refusals::missing_rule_in_a_default_vpc_counts_as_closed,
    refusals::invalid_request_is_not_repeated,
    refusals::missing_group_is_reported,
    refusals::existing_group_with_our_tags_is_used,
    refusals::rule_limit_is_reported_and_closes_continue,
    refusals::request_is_not_sent_after_its_deadline,
    refusals::throttled_reads_are_repeated_and_writes_are_not,
    refusals::throttled_opens_do_not_delay_closes,
    refusals::server_errors_are_ambiguous_or_unavailable,
    refusals::missing_permission_is_reported,
    refusals::repeated_change_succeeds_after_a_lost_reply,
    refusals::missing_reply_is_ambiguous,
    rules::ec2_fulfils_the_contract,
    rules::change_is_one_request_to_open_and_one_to_close,
    rules::foreign_rules_stay,
    rules::removed_rule_is_reported,
    rules::removed_rule_is_reported_without_a_read_before,
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
