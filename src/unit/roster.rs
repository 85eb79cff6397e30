//! Decides from a machine's list of units which units run and which are removed. Pure. A list that
//! is wrongly empty reads like an operator who removed everything, and a removal cannot be undone:
//! so the removal of most units needs a second read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::agent::Directive;
use crate::model::UnitId;
use crate::runtime::confirm::Unconfirmed;

/// Decides about units while the store is older than the checkpoint: units with files or an agent
/// here stay as they are, and only listed units without them are started. `started` collects the
/// latter.
pub(super) fn hold(
    listed: &BTreeSet<UnitId>,
    units_with_files: impl IntoIterator<Item = UnitId>,
    directives: &BTreeMap<UnitId, Directive>,
    started: &mut BTreeSet<UnitId>,
) -> BTreeMap<UnitId, Directive> {
    let here: BTreeSet<UnitId> = units_with_files.into_iter().chain(directives.keys().copied()).collect();
    started.extend(listed.difference(&here));
    let directive = |id: UnitId| if started.contains(&id) { Directive::Live } else { Directive::Hold };
    here.union(listed).map(|id| (*id, directive(*id))).collect()
}

/// Returns the directives for all units that are listed or have files here, as of a read at `now`.
/// Units whose removal is unconfirmed are left out, and continue as before.
pub(super) fn decide<I: Copy + Ord + Add<Duration, Output = I>>(
    unconfirmed: &mut Unconfirmed<UnitId, I>,
    listed: &BTreeSet<UnitId>,
    units_with_files: impl IntoIterator<Item = UnitId>,
    directives: &BTreeMap<UnitId, Directive>,
    now: I,
) -> BTreeMap<UnitId, Directive> {
    // Units whose removal was confirmed earlier do not count for this read.
    let removing = |id: &UnitId| directives.get(id) == Some(&Directive::Remove);
    let here: BTreeSet<UnitId> =
        units_with_files.into_iter().chain(directives.keys().copied()).filter(|id| !removing(id)).collect();
    let missing: BTreeSet<UnitId> = here.difference(listed).copied().collect();
    let is_likely = missing.len() <= 1 || missing.len() * 2 < here.len();
    let removed = unconfirmed.confirm(&missing, is_likely, now).into_iter();
    let live = listed.iter().map(|id| (*id, Directive::Live));
    live.chain(removed.map(|id| (id, Directive::Remove))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::confirm::CONFIRM_AFTER;

    fn ids(numbers: impl IntoIterator<Item = u32>) -> BTreeSet<UnitId> {
        numbers.into_iter().map(UnitId::new).collect()
    }

    /// Returns the units that are removed at each of these reads, by seconds since the first.
    fn removed(here: u32, reads: &[(u64, &[u32])]) -> Vec<Vec<u32>> {
        let (mut missed, mut directives) = (Unconfirmed::default(), BTreeMap::new());
        let read = |(at, listed): &(u64, &[u32])| {
            let listed = ids(listed.iter().copied());
            let now = Duration::from_secs(*at);
            let decided = decide(&mut missed, &listed, ids(0..here), &directives, now);
            let gone = decided.iter().filter(|(id, directive)| {
                **directive == Directive::Remove && directives.get(id) != Some(&Directive::Remove)
            });
            let gone = gone.map(|(id, _)| id.number()).collect();
            directives.extend(decided);
            gone
        };
        reads.iter().map(read).collect()
    }

    #[test]
    fn held_machine_starts_new_units_and_changes_no_others() {
        let directives =
            BTreeMap::from([(UnitId::new(1), Directive::Live), (UnitId::new(2), Directive::Remove)]);
        let mut started = BTreeSet::new();
        let decided = hold(&ids([1, 7]), ids([0, 1]), &directives, &mut started);
        let expected =
            [(0, Directive::Hold), (1, Directive::Hold), (2, Directive::Hold), (7, Directive::Live)];
        let expected: BTreeMap<_, _> = expected.map(|(id, directive)| (UnitId::new(id), directive)).into();
        assert_eq!(decided, expected);
        // At the next pass the new unit has files, and continues.
        assert_eq!(hold(&ids([1, 7]), ids([0, 1, 7]), &expected, &mut started), expected);
    }

    #[test]
    fn a_missing_unit_is_removed() {
        assert_eq!(removed(1, &[(0, &[])]), [vec![0]]);
        assert_eq!(removed(3, &[(0, &[0, 2])]), [vec![1]]);
        assert_eq!(removed(5, &[(0, &[0, 1, 2])]), [vec![3, 4]], "a few of many");
    }

    #[test]
    fn removing_most_units_needs_a_second_read() {
        for (here, listed) in [(2, &[][..]), (4, &[0, 1]), (200, &[7])] {
            let gone: Vec<u32> = (0..here).filter(|id| !listed.contains(id)).collect();
            let reads = [(0, listed), (1, listed), (2, listed), (3, listed)];
            assert_eq!(removed(here, &reads), [vec![], vec![], gone, vec![]], "{here}");
        }
    }

    #[test]
    fn a_wrong_list_removes_no_unit() {
        let all: Vec<u32> = (0..10).collect();
        let reads = [(0, &[][..]), (1, &all), (3, &[]), (4, &all), (9, &all)];
        assert!(removed(10, &reads).iter().all(Vec::is_empty));
    }

    #[test]
    fn a_unit_that_is_missing_long_enough_is_removed_despite_other_changes() {
        // Other units come and go at each read.
        let reads = [(0, &[0, 1, 2, 3][..]), (1, &[0, 1, 2]), (2, &[0, 1]), (3, &[0]), (5, &[0])];
        let gone = removed(10, &reads);
        assert_eq!(gone[2], [4, 5, 6, 7, 8, 9]);
        assert_eq!(gone.concat().len(), 9, "{gone:?}");
    }

    #[test]
    fn units_that_are_being_removed_need_no_confirmation() {
        let directives: BTreeMap<UnitId, Directive> =
            (0..8).map(|id| (UnitId::new(id), Directive::Remove)).collect();
        let mut missed = Unconfirmed::default();
        let decided = decide(&mut missed, &ids([9]), ids(0..10), &directives, Duration::ZERO);
        assert_eq!(
            decided,
            BTreeMap::from([(UnitId::new(8), Directive::Remove), (UnitId::new(9), Directive::Live)])
        );
        assert_eq!(missed.pending(), None);
        decide(&mut missed, &ids([]), ids(20..30), &BTreeMap::new(), Duration::ZERO);
        assert_eq!(missed.pending(), Some((10, CONFIRM_AFTER)));
    }
}
