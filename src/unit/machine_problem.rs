//! The problem of a machine in the tree, where status shows it: the reason why the machine cannot
//! run or remove its units.

use std::collections::BTreeMap;

use tracing::warn;

use super::host::Site;
use crate::model::UnitId;
use crate::store;
use crate::store::tree::{self, Tree};

/// Removed units whose files or processes cannot be removed, with the reasons.
pub(super) type HeldUp = BTreeMap<UnitId, String>;

/// The most units that are named one by one.
const NAMED: usize = 3;

/// Returns all problems in one line. `behind` is the reason why no unit is removed if the store was
/// restored.
pub(super) fn words(ground: Option<&str>, behind: Option<&str>, held_up: &HeldUp) -> Option<String> {
    let unit = |(id, why): (&UnitId, &String)| {
        format!("{} was removed, but its files or processes remain: {why}", id.key())
    };
    let mut all: Vec<String> = ground.map(str::to_owned).into_iter().collect();
    all.extend(behind.map(|why| format!("units are not removed: {why}")));
    all.extend(held_up.iter().take(NAMED).map(unit));
    if let Some(more @ 1..) = held_up.len().checked_sub(NAMED) {
        all.push(format!("and {more} more units"));
    }
    (!all.is_empty()).then(|| all.join("; "))
}

/// Writes the problem, or removes it, if it changed. Returns whether the tree is up to date; if the
/// store is unreachable, the caller tries again later.
pub async fn tell<T: Tree>(tree: &T, site: &Site, problem: Option<&str>) -> bool {
    let acl = site.roles.machine_problem(&site.identity);
    match store::report_machine_problem(tree, site.machine, problem, &acl).await {
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
        assert_eq!(words(None, None, &HeldUp::new()), None);
        assert_eq!(words(Some("no room"), None, &HeldUp::new()).as_deref(), Some("no room"));
        let held_up = |count| (0..count).map(|n| (UnitId::new(n), "busy".to_owned())).collect();
        let one = words(Some("no room"), None, &held_up(1)).unwrap();
        assert_eq!(one, "no room; unit-0000000000 was removed, but its files or processes remain: busy");
        let behind = words(Some("no room"), Some("older"), &held_up(0)).unwrap();
        assert_eq!(behind, "no room; units are not removed: older");
        let many = words(None, None, &held_up(5)).unwrap();
        assert!(many.matches("busy").count() == 3 && many.ends_with("; and 2 more units"), "{many}");
        assert!(!words(None, None, &held_up(3)).unwrap().contains("more units"));
    }
}
