//! Who lives and who is retired, by a machine's list of units. Pure. A list that wrongly shows nothing looks just like an
//! operator who removed everything, and a unit that is retired is gone for good: so most of them are not believed to be gone
//! on the word of one look.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::agent::Order;
use crate::model::UnitId;

/// Decides about units while the store is older than the checkpoint: units with files or an agent
/// here stay as they are, and only listed units without them are started. `started` collects the
/// latter.
pub(super) fn hold(
    listed: &BTreeSet<UnitId>,
    residents: impl IntoIterator<Item = UnitId>,
    orders: &BTreeMap<UnitId, Order>,
    started: &mut BTreeSet<UnitId>,
) -> BTreeMap<UnitId, Order> {
    let here: BTreeSet<UnitId> = residents.into_iter().chain(orders.keys().copied()).collect();
    started.extend(listed.difference(&here));
    let order = |id: UnitId| if started.contains(&id) { Order::Live } else { Order::Hold };
    here.union(listed).map(|id| (*id, order(*id))).collect()
}

/// Since when units are missed that the list was not trusted to have lost. `I` is a point in time.
#[derive(Debug)]
pub(super) struct Missed<I> {
    since: BTreeMap<UnitId, I>,
    /// Longer than two looks at the same mistake are apart.
    doubt: Duration,
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Missed<I> {
    pub(super) fn new(doubt: Duration) -> Self {
        Self { since: BTreeMap::new(), doubt }
    }

    /// What is to become of all that are listed or were here, by a look at `now`. Who is in doubt is not mentioned, and goes
    /// on as before.
    pub(super) fn decide(
        &mut self,
        listed: &BTreeSet<UnitId>,
        residents: impl IntoIterator<Item = UnitId>,
        orders: &BTreeMap<UnitId, Order>,
        now: I,
    ) -> BTreeMap<UnitId, Order> {
        // Who was believed to be gone already says nothing about this look.
        let retiring = |id: &UnitId| orders.get(id) == Some(&Order::Retire);
        let here: BTreeSet<UnitId> =
            residents.into_iter().chain(orders.keys().copied()).filter(|id| !retiring(id)).collect();
        let missing: BTreeSet<UnitId> = here.difference(listed).copied().collect();
        self.since.retain(|id, _| missing.contains(id));
        let likely = missing.len() <= 1 || missing.len() * 2 < here.len();
        let mut decided: BTreeMap<UnitId, Order> = listed.iter().map(|id| (*id, Order::Live)).collect();
        for id in missing {
            let since = *self.since.entry(id).or_insert(now);
            if likely || since + self.doubt <= now {
                self.since.remove(&id);
                decided.insert(id, Order::Retire);
            }
        }
        decided
    }

    /// How many are in doubt, and when to look again.
    pub(super) fn in_doubt(&self) -> Option<(usize, I)> {
        self.since.values().min().map(|since| (self.since.len(), *since + self.doubt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOUBT: Duration = Duration::from_secs(2);

    fn ids(numbers: impl IntoIterator<Item = u32>) -> BTreeSet<UnitId> {
        numbers.into_iter().map(UnitId::new).collect()
    }

    /// Who is retired at each of these looks, by seconds since the first.
    fn retired(here: u32, looks: &[(u64, &[u32])]) -> Vec<Vec<u32>> {
        let (mut missed, mut orders) = (Missed::new(DOUBT), BTreeMap::new());
        let look = |(at, listed): &(u64, &[u32])| {
            let listed = ids(listed.iter().copied());
            let decided = missed.decide(&listed, ids(0..here), &orders, Duration::from_secs(*at));
            let gone = decided
                .iter()
                .filter(|(id, order)| **order == Order::Retire && orders.get(id) != Some(&Order::Retire));
            let gone = gone.map(|(id, _)| id.number()).collect();
            orders.extend(decided);
            gone
        };
        looks.iter().map(look).collect()
    }

    #[test]
    fn held_machine_starts_new_units_and_changes_no_others() {
        let orders = BTreeMap::from([(UnitId::new(1), Order::Live), (UnitId::new(2), Order::Retire)]);
        let mut started = BTreeSet::new();
        let decided = hold(&ids([1, 7]), ids([0, 1]), &orders, &mut started);
        let expected = [(0, Order::Hold), (1, Order::Hold), (2, Order::Hold), (7, Order::Live)];
        let expected: BTreeMap<_, _> = expected.map(|(id, order)| (UnitId::new(id), order)).into();
        assert_eq!(decided, expected);
        // At the next pass the new unit has files, and continues.
        assert_eq!(hold(&ids([1, 7]), ids([0, 1, 7]), &expected, &mut started), expected);
    }

    #[test]
    fn one_that_is_missing_is_gone() {
        assert_eq!(retired(1, &[(0, &[])]), [vec![0]]);
        assert_eq!(retired(3, &[(0, &[0, 2])]), [vec![1]]);
        assert_eq!(retired(5, &[(0, &[0, 1, 2])]), [vec![3, 4]], "a few of many");
    }

    #[test]
    fn most_of_them_take_a_second_look() {
        for (here, listed) in [(2, &[][..]), (4, &[0, 1]), (200, &[7])] {
            let gone: Vec<u32> = (0..here).filter(|id| !listed.contains(id)).collect();
            let looks = [(0, listed), (1, listed), (2, listed), (3, listed)];
            assert_eq!(retired(here, &looks), [vec![], vec![], gone, vec![]], "{here}");
        }
    }

    #[test]
    fn a_list_that_was_wrong_costs_nobody() {
        let all: Vec<u32> = (0..10).collect();
        let looks = [(0, &[][..]), (1, &all), (3, &[]), (4, &all), (9, &all)];
        assert!(retired(10, &looks).iter().all(Vec::is_empty));
    }

    #[test]
    fn who_is_missed_long_enough_goes_however_much_else_changes() {
        // Others come and go at each look.
        let looks = [(0, &[0, 1, 2, 3][..]), (1, &[0, 1, 2]), (2, &[0, 1]), (3, &[0]), (5, &[0])];
        let gone = retired(10, &looks);
        assert_eq!(gone[2], [4, 5, 6, 7, 8, 9]);
        assert_eq!(gone.concat().len(), 9, "{gone:?}");
    }

    #[test]
    fn who_is_being_retired_is_no_reason_to_doubt() {
        let orders: BTreeMap<UnitId, Order> = (0..8).map(|id| (UnitId::new(id), Order::Retire)).collect();
        let mut missed = Missed::new(DOUBT);
        let decided = missed.decide(&ids([9]), ids(0..10), &orders, Duration::ZERO);
        assert_eq!(decided, BTreeMap::from([(UnitId::new(8), Order::Retire), (UnitId::new(9), Order::Live)]));
        assert_eq!(missed.in_doubt(), None);
        missed.decide(&ids([]), ids(20..30), &BTreeMap::new(), Duration::ZERO);
        assert_eq!(missed.in_doubt(), Some((10, DOUBT)));
    }
}
