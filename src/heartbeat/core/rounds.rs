//! When a round of calls to the state manager starts, and which components it is about. Components
//! that the state manager has rejected are left out and tried again later. `hsm` makes the
//! calls, [`hsm_batches`](super::hsm_batches) splits a round into calls. Pure.

use super::audit::{Audit, Change, Now};
use super::hsm_batches::Round;

/// Changes in one round, at most.
const MAX_ROUND: usize = 50_000;

/// Rejected components are tried again this often,
const RETRY_REJECTED_EVERY_MS: u64 = 600_000;

/// this many in one round, with a pause between two rounds. New changes wait for a running round,
/// so the round is kept short.
const MAX_REJECTED_IN_ROUND: usize = 10;
const RETRY_PAUSE_MS: u64 = 6_000;

/// How long new changes wait at most after a round that may have failed because of single
/// components.
const UNCLEAR_WAIT_MS: u64 = 1_000;

/// Whether another round can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallSlot {
    Free,
    /// The last round failed, and the pause after it is not over.
    Paused,
    /// A round is running.
    Busy,
}

/// Which components are not in the next round, and when they are in one again. Times are monotonic
/// milliseconds.
#[derive(Debug)]
pub struct Rejected {
    /// The address of the last round. A state manager at another address has rejected nothing.
    url: Option<String>,
    /// When rejected components are tried again, and from which entry on.
    retry_at: u64,
    retry_from: u32,
    /// The running round is about rejected components.
    retrying: bool,
    /// The newest change of the running or last round.
    newest: u64,
    /// The last round failed, perhaps because of its components. Newer changes wait until this
    /// time.
    unclear_until: Option<u64>,
}

impl Rejected {
    pub fn new(now_ms: u64) -> Self {
        let retry_at = now_ms + RETRY_REJECTED_EVERY_MS;
        Self { url: None, retry_at, retry_from: 0, retrying: false, newest: 0, unclear_until: None }
    }

    /// Returns whether earlier rounds went to another address.
    pub fn moves_to(&mut self, url: &str) -> bool {
        if self.url.as_deref() == Some(url) {
            return false;
        }
        self.url.replace(url.to_owned()).is_some()
    }

    /// The next round, if one is to start now. `is_waiting` tells changes that wait for the end of
    /// a late call.
    pub fn next_round(
        &mut self,
        slot: CallSlot,
        audit: &Audit,
        (now, now_ms): (Now, u64),
        is_waiting: impl Fn(&Change) -> bool,
    ) -> Option<Round> {
        let free = slot == CallSlot::Free;
        // A component that the state manager does not know, alone in its round, delays others only
        // for a moment.
        let instead = self.unclear_until.is_some_and(|until| now_ms >= until);
        if slot == CallSlot::Busy || !free && !instead {
            return None;
        }
        let overdue = now_ms.checked_sub(self.retry_at);
        if free && overdue.is_some_and(|overdue| overdue >= RETRY_PAUSE_MS) {
            return self.retry_some(audit, now_ms);
        }
        let mut pending = audit.pending(now, MAX_ROUND);
        pending.retain(|change| !is_waiting(change));
        match pending.last() {
            Some(newest) if free || newest.sequence > self.newest => {
                (self.newest, self.retrying, self.unclear_until) = (newest.sequence, false, None);
                Some(Round::of(&pending))
            }
            None if free && overdue.is_some() => self.retry_some(audit, now_ms),
            _ => None,
        }
    }

    fn retry_some(&mut self, audit: &Audit, now_ms: u64) -> Option<Round> {
        let (some, more) = audit.refused(self.retry_from, MAX_REJECTED_IN_ROUND);
        self.retry_from = more.unwrap_or(0);
        self.retry_at = now_ms + if more.is_some() { RETRY_PAUSE_MS } else { RETRY_REJECTED_EVERY_MS };
        self.retrying = !some.is_empty();
        self.retrying.then(|| Round::retry(&some))
    }

    /// Ends the running round. Returns whether it was about rejected components, whose result says
    /// nothing about the state manager.
    pub fn ended_retry(&mut self) -> bool {
        std::mem::take(&mut self.retrying)
    }

    /// The round ended at `now_ms`; `unclear` if it may have failed because of single components.
    pub fn ended(&mut self, unclear: bool, now_ms: u64) {
        self.unclear_until = unclear.then(|| now_ms + UNCLEAR_WAIT_MS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::core::mass_outage::HoldPhase;
    use crate::heartbeat::core::name::Name;
    use crate::heartbeat::core::params::Params;
    use crate::heartbeat::core::record::NotifyStatus;
    use crate::heartbeat::core::sequence::Sequence;

    const NOW: Now = Now { awake: 1_000, wall: 0 };

    /// A memory with this many pending and then rejected components, and the number of the last
    /// pending change.
    fn memory(pending: usize, rejected: usize) -> (Audit, u64) {
        let mut audit = Audit::new(NOW.awake, &Params::default(), 1_000);
        audit.start_judging(NOW.awake, HoldPhase::Quiet);
        for number in 0..pending + rejected {
            audit.beat(NOW.awake, &Name::parse(&format!("n{number}")).unwrap(), false).unwrap();
        }
        let changes = audit.judge(NOW, NOW.awake, &mut Sequence::above(0, 0)).changes;
        for change in &changes[pending..] {
            audit.set_notified(&change.name, change.sequence, NotifyStatus::Refused);
        }
        for bucket in audit.dirty().clone() {
            audit.written(bucket);
        }
        (audit, pending as u64)
    }

    fn size(round: Option<Round>) -> usize {
        let mut round = round.unwrap_or_default();
        std::iter::from_fn(|| round.next_call()).map(|call| call.entries.len()).sum()
    }

    #[test]
    fn next_round_starts_when_it_should() {
        let retry = RETRY_REJECTED_EVERY_MS;
        let unclear = |until| Rejected { unclear_until: Some(until), ..Rejected::new(0) };
        let sent = |newest, rejected| Rejected { newest, ..rejected };
        for (what, mut rejected, slot, (pending, refused), now_ms, expected) in [
            ("nothing to send", Rejected::new(0), CallSlot::Free, (0, 0), 0, 0),
            ("pending changes", Rejected::new(0), CallSlot::Free, (3, 0), 0, 3),
            ("a running round", Rejected::new(0), CallSlot::Busy, (3, 0), 0, 0),
            ("a pause after a failure", Rejected::new(0), CallSlot::Paused, (3, 0), 0, 0),
            ("a pause, unclear, too early", sent(2, unclear(500)), CallSlot::Paused, (3, 0), 499, 0),
            ("a pause, unclear, a newer change", sent(2, unclear(500)), CallSlot::Paused, (3, 0), 500, 3),
            ("a pause, unclear, nothing newer", sent(3, unclear(500)), CallSlot::Paused, (3, 0), 500, 0),
            ("rejected, not due", Rejected::new(0), CallSlot::Free, (0, 5), retry - 1, 0),
            ("rejected, due", Rejected::new(0), CallSlot::Free, (0, 5), retry, 5),
            ("rejected, due, pending first", Rejected::new(0), CallSlot::Free, (2, 5), retry, 2),
            ("rejected, overdue", Rejected::new(0), CallSlot::Free, (2, 5), retry + RETRY_PAUSE_MS, 5),
            ("rejected, due, paused", unclear(0), CallSlot::Paused, (0, 5), retry + RETRY_PAUSE_MS, 0),
            ("many rejected", Rejected::new(0), CallSlot::Free, (0, 25), retry, MAX_REJECTED_IN_ROUND),
        ] {
            let (audit, _) = memory(pending, refused);
            let round = rejected.next_round(slot, &audit, (NOW, now_ms), |_| false);
            assert_eq!(size(round), expected, "{what}");
        }
    }

    #[test]
    fn rejected_components_are_all_tried_again_in_turn() {
        let (audit, _) = memory(0, 25);
        let (mut rejected, mut now_ms, mut sizes) = (Rejected::new(0), RETRY_REJECTED_EVERY_MS, Vec::new());
        for _ in 0..4 {
            sizes.push(size(rejected.next_round(CallSlot::Free, &audit, (NOW, now_ms), |_| false)));
            assert_eq!(rejected.ended_retry(), *sizes.last().unwrap() > 0);
            now_ms += RETRY_PAUSE_MS;
        }
        assert_eq!(sizes, [10, 10, 5, 0]);
    }

    #[test]
    fn changes_of_late_calls_wait() {
        let (audit, last) = memory(3, 0);
        let mut rejected = Rejected::new(0);
        let round = rejected.next_round(CallSlot::Free, &audit, (NOW, 0), |change| change.sequence == last);
        assert_eq!(size(round), 2);
        rejected.ended(false, 0);
        assert_eq!(size(rejected.next_round(CallSlot::Free, &audit, (NOW, 0), |_| true)), 0);
    }

    #[test]
    fn another_address_is_another_state_manager() {
        let mut rejected = Rejected::new(0);
        assert!(!rejected.moves_to("http://a"), "the first one");
        assert!(!rejected.moves_to("http://a"));
        assert!(rejected.moves_to("http://b"));
    }
}
