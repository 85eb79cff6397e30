//! The set of systemd units that are watched: names and globs. Pure.

use std::collections::BTreeMap;

use crate::model::Glob;

/// Names and globs of systemd units.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subscriptions {
    /// `None` for the name of one unit.
    patterns: BTreeMap<String, Option<Glob>>,
}

impl Subscriptions {
    /// Adds a name or a glob. Returns whether it is new.
    pub fn insert(&mut self, pattern: &str) -> bool {
        let glob = Self::is_glob(pattern).then(|| Glob::new(pattern));
        self.patterns.insert(pattern.to_owned(), glob).is_none()
    }

    /// Removes a name or a glob. Returns whether it was there.
    pub fn remove(&mut self, pattern: &str) -> bool {
        self.patterns.remove(pattern).is_some()
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    pub fn len(&self) -> usize {
        self.patterns.len()
    }

    /// Returns whether this name or glob is a member.
    pub fn contains(&self, pattern: &str) -> bool {
        self.patterns.contains_key(pattern)
    }

    /// Returns whether a pattern can match several names.
    pub fn is_glob(pattern: &str) -> bool {
        pattern.contains(['*', '?', '['])
    }

    /// Returns whether a member is the unit's name or matches it.
    pub fn matches(&self, unit: &str) -> bool {
        self.patterns.contains_key(unit)
            || self.patterns.values().flatten().any(|glob: &Glob| glob.matches(unit))
    }
}

impl<'a> FromIterator<&'a str> for Subscriptions {
    fn from_iter<I: IntoIterator<Item = &'a str>>(patterns: I) -> Self {
        let mut subscriptions = Self::default();
        for pattern in patterns {
            subscriptions.insert(pattern);
        }
        subscriptions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_globs_match_until_they_are_removed() {
        let mut units: Subscriptions = ["a.service", "b*.service"].into_iter().collect();
        assert!(units.matches("a.service") && units.matches("b1.service"));
        assert!(!units.matches("c.service") && !units.matches("a.serviceX"));
        assert!(!units.insert("a.service"), "a set has each member once");
        assert!(units.remove("b*.service") && !units.remove("b*.service"));
        assert!(!units.matches("b1.service") && units.len() == 1);
        assert!(units.remove("a.service") && units.is_empty());
    }
}
