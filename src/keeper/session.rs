//! Sessions and their deadlines, on the caller's monotonic clock. Closing expired sessions and
//! deleting their ephemerals belongs in `state.rs`. Pure.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::txn::Password;

/// With more entries than these the queue is rebuilt. The limits make rebuilding rare enough that
/// its cost per entry is negligible.
const QUEUE_PER_SESSION: usize = 4;
const QUEUE_SLACK: usize = 64;

#[derive(Debug, Clone, Copy)]
pub struct Session {
    pub timeout_ms: i32,
    pub password: Password,
    deadline_ms: i64,
}

#[derive(Debug, Clone, Default)]
pub struct Sessions {
    live: HashMap<i64, Session>,
    /// At least one entry per session, at or before its deadline. A touch does not update the
    /// queue; when an old entry is due, the session's current deadline is checked. Entries of ended
    /// and re-attached sessions stay until they are due or the queue is rebuilt.
    queue: BinaryHeap<Reverse<(i64, i64)>>,
}

impl Sessions {
    pub fn open(&mut self, id: i64, timeout_ms: i32, password: Password, now_ms: i64) {
        let deadline_ms = now_ms + i64::from(timeout_ms);
        self.live.insert(id, Session { timeout_ms, password, deadline_ms });
        self.enqueue(deadline_ms, id);
    }

    fn enqueue(&mut self, deadline_ms: i64, id: i64) {
        self.queue.push(Reverse((deadline_ms, id)));
        if self.queue.len() > QUEUE_SLACK + QUEUE_PER_SESSION * self.live.len() {
            let live = self.live.iter().map(|(id, session)| Reverse((session.deadline_ms, *id)));
            self.queue = live.collect();
        }
    }

    pub fn close(&mut self, id: i64) -> bool {
        self.live.remove(&id).is_some()
    }

    pub fn get(&self, id: i64) -> Option<&Session> {
        self.live.get(&id)
    }

    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (i64, &Session)> {
        self.live.iter().map(|(id, session)| (*id, session))
    }

    /// Restarts the timeout of a session after a request of its client.
    pub fn touch(&mut self, id: i64, now_ms: i64) {
        if let Some(session) = self.live.get_mut(&id) {
            session.deadline_ms = now_ms + i64::from(session.timeout_ms);
        }
    }

    /// Sets the timeout that the client of a re-attached session requested.
    pub fn set_timeout(&mut self, id: i64, timeout_ms: i32, now_ms: i64) {
        if let Some(session) = self.live.get_mut(&id) {
            session.timeout_ms = timeout_ms;
            let deadline_ms = now_ms + i64::from(timeout_ms);
            session.deadline_ms = deadline_ms;
            self.enqueue(deadline_ms, id);
        }
    }

    /// Extends all deadlines by `lag_ms`, a time in which the server was paused and read no
    /// requests.
    pub fn extend_deadlines(&mut self, lag_ms: i64) {
        for session in self.live.values_mut() {
            session.deadline_ms += lag_ms;
        }
    }

    /// Returns a lower bound of the next deadline. It is early if sessions were touched since.
    pub fn next_deadline_ms(&self) -> Option<i64> {
        self.queue.peek().map(|Reverse((deadline_ms, _))| *deadline_ms)
    }

    /// Returns an expired session, if there is one. It stays live until it is closed, and is
    /// returned only once.
    pub fn pop_expired(&mut self, now_ms: i64) -> Option<i64> {
        while let Some(&Reverse((queued_ms, id))) = self.queue.peek() {
            if queued_ms > now_ms {
                return None;
            }
            self.queue.pop();
            match self.live.get(&id) {
                Some(session) if session.deadline_ms > now_ms => {
                    self.queue.push(Reverse((session.deadline_ms, id)));
                }
                Some(_) => return Some(id),
                None => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expired(sessions: &mut Sessions, now_ms: i64) -> Vec<i64> {
        let mut ids: Vec<_> = std::iter::from_fn(|| {
            sessions.pop_expired(now_ms).inspect(|id| {
                sessions.close(*id);
            })
        })
        .collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn session_expires_without_requests_for_its_timeout() {
        let mut sessions = Sessions::default();
        sessions.open(1, 100, [0; 16], 0);
        sessions.open(2, 300, [0; 16], 0);
        assert_eq!(sessions.next_deadline_ms(), Some(100));
        assert_eq!(expired(&mut sessions, 99), Vec::<i64>::new());
        sessions.touch(1, 90);
        assert_eq!(expired(&mut sessions, 189), Vec::<i64>::new());
        assert_eq!(expired(&mut sessions, 190), [1]);
        assert_eq!(expired(&mut sessions, 1000), [2]);
        assert!(sessions.is_empty());
    }

    #[test]
    fn pause_of_the_server_extends_deadlines() {
        let mut sessions = Sessions::default();
        sessions.open(1, 100, [0; 16], 0);
        sessions.extend_deadlines(5_000);
        assert_eq!(expired(&mut sessions, 5_099), Vec::<i64>::new());
        assert_eq!(expired(&mut sessions, 5_100), [1]);
    }

    #[test]
    fn queue_does_not_grow_with_reattached_and_ended_sessions() {
        let mut sessions = Sessions::default();
        sessions.open(1, 40_000, [0; 16], 0);
        for n in 0..10_000 {
            sessions.set_timeout(1, 40_000, n);
            sessions.open(2 + n, 40_000, [0; 16], n);
            sessions.close(2 + n);
        }
        assert!(sessions.queue.len() < 100, "{} entries for one session", sessions.queue.len());
        assert_eq!(expired(&mut sessions, 49_998), Vec::<i64>::new());
        assert_eq!(expired(&mut sessions, 49_999), [1]);
    }

    #[test]
    fn shorter_timeout_applies_at_once() {
        let mut sessions = Sessions::default();
        sessions.open(1, 40_000, [0; 16], 0);
        sessions.set_timeout(1, 100, 10);
        assert_eq!(expired(&mut sessions, 110), [1]);
    }
}
