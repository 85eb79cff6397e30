//! Calls to the state manager that were not answered in time. The state manager may apply such a
//! call later, after a newer one, and then keeps an old state. The components of a late call
//! therefore stay pending until it ends: when its connection has ended, their newest state is sent
//! again, until a call about them is answered in time.

use std::collections::HashMap;

use tokio::task::JoinSet;

use super::LateCall;
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::name::Name;
use crate::mutant;

/// Late calls that are still open.
#[derive(Debug, Default)]
pub(super) struct LateCalls {
    open: JoinSet<Vec<Name>>,
    components: LateComponents,
}

impl LateCalls {
    pub(super) fn add(&mut self, call: LateCall) {
        if mutant!(ForgetsLateCalls) {
            return;
        }
        self.components.begin(&call.names);
        self.open.spawn(async move {
            let LateCall { names, mut call } = call;
            call.ended().await;
            names
        });
    }

    /// Waits until a late call is over, forever if there is none. Cancel-safe.
    pub(super) async fn done(&mut self) {
        match self.open.join_next().await {
            Some(Ok(names)) => self.components.end(&names),
            // These tasks do not panic; after a panic, their components would stay pending until
            // another judge notifies.
            Some(Err(_)) => {}
            None => std::future::pending().await,
        }
    }

    /// A call about this change was answered in time. Returns whether that counts.
    pub(super) fn accepted(&mut self, name: &Name, sequence: u64) -> bool {
        self.components.accepted(name, sequence)
    }

    /// Whether a change was sent, and is to be sent again when a late call is over.
    pub(super) fn is_waiting(&self, change: &Change) -> bool {
        self.components.is_waiting(&change.name, change.sequence)
    }
}

/// The components in late calls. Pure.
#[derive(Debug, Default, PartialEq, Eq)]
struct LateComponents {
    of: HashMap<Name, LateComponent>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct LateComponent {
    /// Late calls that it is in.
    calls: u32,
    /// The number of its newest change that was sent since.
    sent: u64,
}

impl LateComponents {
    fn begin(&mut self, names: &[Name]) {
        for name in names {
            self.of.entry(*name).or_default().calls += 1;
        }
    }

    fn end(&mut self, names: &[Name]) {
        for name in names {
            if let Some(late) = self.of.get_mut(name) {
                late.calls -= 1;
                // The late call may have overwritten all states that were sent before this moment.
                late.sent = 0;
                if late.calls == 0 {
                    self.of.remove(name);
                }
            }
        }
    }

    fn accepted(&mut self, name: &Name, sequence: u64) -> bool {
        match self.of.get_mut(name) {
            Some(late) => {
                late.sent = sequence;
                false
            }
            None => true,
        }
    }

    fn is_waiting(&self, name: &Name, sequence: u64) -> bool {
        self.of.get(name).is_some_and(|late| late.sent == sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn component_of_a_late_call_is_sent_when_the_call_ends() {
        let [a, b] = ["a", "b"].map(|name| Name::parse(name).unwrap());
        let mut components = LateComponents::default();
        assert!(components.accepted(&a, 1));
        components.begin(&[a, b]);
        assert!(!components.is_waiting(&a, 2), "it is sent at once");
        assert!(!components.accepted(&a, 2), "the late call may be applied after this one");
        assert!(components.is_waiting(&a, 2) && !components.is_waiting(&b, 2));
        assert!(!components.is_waiting(&a, 3), "a newer change does not wait");
        components.begin(&[a]);
        components.end(&[a, b]);
        assert!(!components.is_waiting(&a, 2), "sent again");
        assert!(!components.accepted(&a, 2), "one late call is left");
        assert!(components.accepted(&b, 1));
        components.end(&[a]);
        assert!(components.accepted(&a, 2));
        assert_eq!(components, LateComponents::default());
    }
}
