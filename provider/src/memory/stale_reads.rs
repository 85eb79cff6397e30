//! A value whose readers may be some calls behind its writers. Pure.

use std::collections::VecDeque;

#[derive(Debug, Clone)]
pub(super) struct Versioned<T> {
    /// Versions with the number of the call that wrote them, oldest first, never empty.
    versions: VecDeque<(u64, T)>,
    /// Whether older versions were dropped.
    forgotten: bool,
}

impl<T> Versioned<T> {
    pub(super) fn new(at: u64, value: T) -> Self {
        Self { versions: VecDeque::from([(at, value)]), forgotten: false }
    }

    pub(super) fn latest(&self) -> Option<&T> {
        self.versions.back().map(|(_, value)| value)
    }

    /// Returns the value for a reader that sees writes up to call `horizon`; `None` before the
    /// first one.
    pub(super) fn as_of(&self, horizon: u64) -> Option<&T> {
        let seen = self.versions.iter().rev().find(|(at, _)| *at <= horizon);
        let oldest = self.versions.front().filter(|_| self.forgotten);
        seen.or(oldest).map(|(_, value)| value)
    }

    /// Adds a version, and drops versions that no reader at or after `horizon` can see.
    pub(super) fn set(&mut self, at: u64, value: T, horizon: u64) {
        self.versions.push_back((at, value));
        while self.versions.get(1).is_some_and(|(next, _)| *next <= horizon) {
            self.versions.pop_front();
            self.forgotten = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_see_older_versions() {
        let mut value = Versioned::new(3, "a");
        value.set(5, "b", 0);
        value.set(9, "c", 0);
        let seen: Vec<_> = [2, 3, 4, 5, 8, 9, 10].map(|horizon| value.as_of(horizon).copied()).into();
        assert_eq!(seen, [None, Some("a"), Some("a"), Some("b"), Some("b"), Some("c"), Some("c")]);
        assert_eq!(value.latest(), Some(&"c"));
    }

    #[test]
    fn versions_that_no_reader_can_see_are_dropped() {
        let mut value = Versioned::new(0, 0);
        for at in 1..100 {
            value.set(at, at, at.saturating_sub(3));
            assert!(value.versions.len() <= 4);
            assert_eq!(value.as_of(at.saturating_sub(3)), Some(&at.saturating_sub(3)));
        }
        assert_eq!(value.as_of(5), Some(&96), "a dropped version is not reported as absent");
    }
}
