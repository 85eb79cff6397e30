//! The problem of a machine in the tree, where status shows it: the reason why the machine cannot
//! run or remove its units.

use std::collections::BTreeMap;

use tracing::warn;

use super::host::UnitHost;
use crate::model::UnitId;
use crate::store;
use crate::store::tree::{self, Tree};

/// Removed units whose files or processes cannot be removed, with the reasons.
pub(super) type FailedRemovals = BTreeMap<UnitId, String>;

/// The most units that are named one by one.
const NAMED: usize = 3;

/// Returns all problems in one line. `rolled_back` is the reason why no unit is removed after the
/// store was restored.
pub(super) fn describe(
    directory: Option<&str>,
    rolled_back: Option<&str>,
    failed_removals: &FailedRemovals,
) -> Option<String> {
    let unit = |(id, why): (&UnitId, &String)| {
        format!("{} was removed, but its files or processes remain: {why}", id.key())
    };
    let mut all: Vec<String> = directory.map(str::to_owned).into_iter().collect();
    all.extend(rolled_back.map(|why| format!("units are not removed: {why}")));
    all.extend(failed_removals.iter().take(NAMED).map(unit));
    if let Some(more @ 1..) = failed_removals.len().checked_sub(NAMED) {
        all.push(format!("and {more} more units"));
    }
    (!all.is_empty()).then(|| all.join("; "))
}

/// Writes the problem, or removes it, if it changed. Returns whether the tree is up to date; if the
/// store is unreachable, the caller tries again later.
pub async fn report<T: Tree>(tree: &T, host: &UnitHost, problem: Option<&str>) -> bool {
    let acl = host.roles.machine_problem(&host.identity);
    match store::report_machine_problem(tree, host.machine, problem, &acl).await {
        // The machine was removed.
        Ok(()) | Err(store::Error::Tree(tree::Error::NoNode(_))) => true,
        Err(error) => {
            warn!(%error, "cannot report the machine's problem");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_problems_are_named_and_the_rest_counted() {
        assert_eq!(describe(None, None, &FailedRemovals::new()), None);
        assert_eq!(describe(Some("no room"), None, &FailedRemovals::new()).as_deref(), Some("no room"));
        let failed_removals = |count| (0..count).map(|n| (UnitId::new(n), "busy".to_owned())).collect();
        let one = describe(Some("no room"), None, &failed_removals(1)).unwrap();
        assert_eq!(one, "no room; unit-0000000000 was removed, but its files or processes remain: busy");
        let rolled_back = describe(Some("no room"), Some("older"), &failed_removals(0)).unwrap();
        assert_eq!(rolled_back, "no room; units are not removed: older");
        let many = describe(None, None, &failed_removals(5)).unwrap();
        assert!(many.matches("busy").count() == 3 && many.ends_with("; and 2 more units"), "{many}");
        assert!(!describe(None, None, &failed_removals(3)).unwrap().contains("more units"));
    }
}
