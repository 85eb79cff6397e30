//! Assigns units to machines. Pure.

use crate::model::MachineId;
use std::collections::BTreeMap;

/// The machines that units may be assigned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// All units to this machine, however many it has already.
    To(MachineId),
    /// Each unit to the lowest machine without units, or to a new one.
    Empty,
}

/// The machine of one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) machine: MachineId,
    pub(super) new: bool,
}

/// Assigns `count` units. `carried` is the number of units on each machine, `next` the first unused
/// machine number. `None` if the numbers are used up.
pub(super) fn assign(
    count: u32,
    rule: Rule,
    carried: &BTreeMap<MachineId, usize>,
    next: u32,
) -> Option<Vec<Assignment>> {
    let mut empty = carried.iter().filter(|(_, units)| **units == 0).map(|(machine, _)| *machine);
    let mut next = next;
    (0..count)
        .map(|_| match rule {
            Rule::To(machine) => Some(Assignment { machine, new: false }),
            Rule::Empty => match empty.next() {
                Some(machine) => Some(Assignment { machine, new: false }),
                None => {
                    let machine = MachineId::new(next);
                    next = next.checked_add(1)?;
                    Some(Assignment { machine, new: true })
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

    fn numbers(assignments: &[Assignment]) -> Vec<(u32, bool)> {
        assignments.iter().map(|assignment| (assignment.machine.number(), assignment.new)).collect()
    }

    #[test]
    fn lowest_empty_machines_first_then_new_ones() {
        let carried = machines(&[(0, 1), (2, 0), (5, 0)]);
        let assignments = assign(4, Rule::Empty, &carried, 7).unwrap();
        assert_eq!(numbers(&assignments), [(2, false), (5, false), (7, true), (8, true)]);
    }

    #[test]
    fn a_given_machine_takes_them_all() {
        let assignments = assign(2, Rule::To(MachineId::new(0)), &machines(&[(0, 3), (1, 0)]), 2).unwrap();
        assert_eq!(numbers(&assignments), [(0, false), (0, false)]);
    }

    #[test]
    fn numbers_run_out_without_wrapping() {
        assert_eq!(assign(1, Rule::Empty, &machines(&[]), u32::MAX), None);
    }

    proptest! {
        #[test]
        fn units_share_a_machine_only_on_request(
            carried in proptest::collection::btree_map(0u32..50, 0usize..3, 0..20), count in 0u32..30
        ) {
            let carried: BTreeMap<_, _> = carried.into_iter().map(|(m, u)| (MachineId::new(m), u)).collect();
            let assignments = assign(count, Rule::Empty, &carried, 50).unwrap();
            let mut machines: Vec<_> = assignments.iter().map(|assignment| assignment.machine).collect();
            machines.sort_unstable();
            machines.dedup();
            prop_assert_eq!(machines.len(), count as usize);
            for assignment in assignments {
                prop_assert_eq!(assignment.new, !carried.contains_key(&assignment.machine));
                prop_assert_eq!(carried.get(&assignment.machine).copied().unwrap_or(0), 0);
            }
        }
    }
}
