//! Which machine a unit goes to. Pure: from what the machines carry to an ordered list of seats.

use crate::model::MachineId;
use std::collections::BTreeMap;

/// Where units may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// All to this machine, whatever it carries already.
    To(MachineId),
    /// Each to the lowest machine without units, or to a new one.
    Empty,
}

/// A place for one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) machine: MachineId,
    pub(super) new: bool,
}

/// Seats for `count` units. `carried` is how many units each machine has; `next` the first number never given to a
/// machine. None if the numbers are used up.
pub(super) fn seats(
    count: u32,
    rule: Rule,
    carried: &BTreeMap<MachineId, usize>,
    next: u32,
) -> Option<Vec<Seat>> {
    let mut empty = carried.iter().filter(|(_, units)| **units == 0).map(|(machine, _)| *machine);
    let mut next = next;
    (0..count)
        .map(|_| match rule {
            Rule::To(machine) => Some(Seat { machine, new: false }),
            Rule::Empty => match empty.next() {
                Some(machine) => Some(Seat { machine, new: false }),
                None => {
                    let machine = MachineId::new(next);
                    next = next.checked_add(1)?;
                    Some(Seat { machine, new: true })
                }
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn machines(carried: &[(u32, usize)]) -> BTreeMap<MachineId, usize> {
        carried.iter().map(|&(machine, units)| (MachineId::new(machine), units)).collect()
    }

    fn numbers(seats: &[Seat]) -> Vec<(u32, bool)> {
        seats.iter().map(|seat| (seat.machine.number(), seat.new)).collect()
    }

    #[test]
    fn lowest_empty_machines_first_then_new_ones() {
        let carried = machines(&[(0, 1), (2, 0), (5, 0)]);
        let seats = seats(4, Rule::Empty, &carried, 7).unwrap();
        assert_eq!(numbers(&seats), [(2, false), (5, false), (7, true), (8, true)]);
    }

    #[test]
    fn a_given_machine_takes_them_all() {
        let seats = seats(2, Rule::To(MachineId::new(0)), &machines(&[(0, 3), (1, 0)]), 2).unwrap();
        assert_eq!(numbers(&seats), [(0, false), (0, false)]);
    }

    #[test]
    fn numbers_run_out_without_wrapping() {
        assert_eq!(seats(1, Rule::Empty, &machines(&[]), u32::MAX), None);
    }

    proptest! {
        #[test]
        fn no_two_units_share_a_machine_unless_told(
            carried in proptest::collection::btree_map(0u32..50, 0usize..3, 0..20), count in 0u32..30
        ) {
            let carried: BTreeMap<_, _> = carried.into_iter().map(|(m, u)| (MachineId::new(m), u)).collect();
            let seats = seats(count, Rule::Empty, &carried, 50).unwrap();
            let mut machines: Vec<_> = seats.iter().map(|seat| seat.machine).collect();
            machines.sort_unstable();
            machines.dedup();
            prop_assert_eq!(machines.len(), count as usize);
            for seat in seats {
                prop_assert_eq!(seat.new, !carried.contains_key(&seat.machine));
                prop_assert_eq!(carried.get(&seat.machine).copied().unwrap_or(0), 0);
            }
        }
    }
}
