//! Detects the loss of a connection's peer, from the times at which messages were sent and
//! received. Both sides send a heartbeat in every interval, and a peer that is silent for longer
//! than the limit is lost. Pure.

use std::time::Duration;

use crate::runtime::clock::Moment;

/// How often each side sends a heartbeat.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// A peer that is silent for this long is lost.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(6);

/// The action that is due at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<I> {
    /// The peer is lost: close the connection.
    Lost,
    /// Send a heartbeat.
    SendHeartbeat,
    /// No action is due until then.
    WaitUntil(I),
}

/// The times of one connection.
#[derive(Debug, Clone, Copy)]
pub struct Liveness<I> {
    interval: Duration,
    limit: Duration,
    last_sent: I,
}

impl<I: Moment> Liveness<I> {
    /// A connection that was opened now.
    pub fn new(interval: Duration, limit: Duration, now: I) -> Self {
        Self { interval, limit, last_sent: now }
    }

    /// Returns the step at `now`. `last_received` is the time of the last byte from the peer. A
    /// heartbeat that is to be sent counts as sent.
    pub fn step(&mut self, last_received: I, now: I) -> Step<I> {
        let (lost_at, beat_at) = (last_received + self.limit, self.last_sent + self.interval);
        if now >= lost_at {
            Step::Lost
        } else if now >= beat_at {
            self.last_sent = now;
            Step::SendHeartbeat
        } else {
            Step::WaitUntil(lost_at.min(beat_at))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs a connection whose peer sends its last byte at `silent_from`. Returns the times of the
    /// heartbeats, and of the loss.
    fn run(silent_from: Duration, until: Duration) -> (Vec<u128>, Option<u128>) {
        let mut liveness = Liveness::new(HEARTBEAT_INTERVAL, SILENCE_LIMIT, Duration::ZERO);
        let (mut now, mut beats) = (Duration::ZERO, Vec::new());
        while now < until {
            match liveness.step(now.min(silent_from), now) {
                Step::Lost => return (beats, Some(now.as_millis())),
                Step::SendHeartbeat => beats.push(now.as_millis()),
                Step::WaitUntil(then) => {
                    assert!(then > now);
                    now = then;
                }
            }
        }
        (beats, None)
    }

    #[test]
    fn heartbeats_are_regular_and_silence_is_a_loss() {
        assert_eq!(run(60_000 * MS, 7_000 * MS), (vec![2_000, 4_000, 6_000], None));
        assert_eq!(run(3_000 * MS, 60_000 * MS), (vec![2_000, 4_000, 6_000, 8_000], Some(9_000)));
        assert_eq!(run(Duration::ZERO, 60_000 * MS), (vec![2_000, 4_000], Some(6_000)));
    }
}
