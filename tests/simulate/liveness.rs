//! L3: a wanted close is sent within a bounded number of passes, however long the provider takes to
//! answer. Every other fault restarts the count; latency does not.

use std::collections::BTreeMap;

use portcullis::model::MachineId;

use crate::port_bits::PortBits;

/// The number of the leader's passes within which a close is sent: a first read, a second read, a
/// pass whose lease ends before the provider has returned its rules, and one pass for every eight
/// machines.
const PASSES: u32 = 12;

/// Open and unwanted rules by machine, with the number of passes that have ended since without a
/// request to close them.
#[derive(Debug, Default)]
pub(crate) struct UnsentCloses(BTreeMap<MachineId, (PortBits, u32)>);

impl UnsentCloses {
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Records that a request to close ports on the machine was sent.
    pub(crate) fn sent(&mut self, machine: MachineId) {
        self.0.remove(&machine);
    }

    /// Counts a pass that left this `surplus` open. Returns the overdue closes.
    pub(crate) fn passed(&mut self, surplus: &BTreeMap<MachineId, PortBits>) -> Option<String> {
        self.0.retain(|machine, _| surplus.contains_key(machine));
        for (machine, points) in surplus {
            let (known, passes) = self.0.entry(*machine).or_insert((*points, 0));
            let still = known.and(*points);
            (*known, *passes) = if still.is_empty() { (*points, 1) } else { (still, *passes + 1) };
            if *passes > PASSES {
                return Some(format!("L3: no close of{still} was sent to {machine} in {passes} passes"));
            }
        }
        None
    }
}

#[test]
fn an_unsent_close_becomes_overdue() {
    let (machine, mut unsent_closes) = (MachineId::new(1), UnsentCloses::default());
    let surplus = BTreeMap::from([(machine, PortBits::ALL)]);
    let overdue =
        |unsent_closes: &mut UnsentCloses| (0..=PASSES).find_map(|_| unsent_closes.passed(&surplus));
    assert!(overdue(&mut unsent_closes).is_some_and(|why| why.contains("13 passes")));
    unsent_closes.sent(machine);
    assert_eq!(
        (0..PASSES).find_map(|_| unsent_closes.passed(&surplus)),
        None,
        "a request starts the count again"
    );
    assert_eq!(unsent_closes.passed(&BTreeMap::new()), None);
    assert_eq!((0..PASSES).find_map(|_| unsent_closes.passed(&surplus)), None, "and so does a wanted state");
}
