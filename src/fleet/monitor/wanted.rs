//! The patterns that subscriptions need on nodes, each with the number of its subscriptions. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::Scope;
use crate::fleet::name::NodeName;

/// The names and patterns that all clients together may need on one node. Each of them costs the
/// node a comparison per change, so an agent accepts a limited number.
pub const MAX_PATTERNS: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// How many subscriptions need a pattern on a scope.
    counts: BTreeMap<(Scope, String), usize>,
    /// How many patterns each scope has.
    patterns: BTreeMap<Scope, usize>,
}

impl Wanted {
    /// Returns whether the limit of every node of the scope allows these patterns.
    pub(super) fn has_room(&self, scope: &Scope, patterns: &[String]) -> bool {
        let is_new = |pattern: &&String| !self.counts.contains_key(&(scope.clone(), (*pattern).clone()));
        let added = patterns.iter().filter(is_new).collect::<BTreeSet<_>>().len();
        let of = |scope: &Scope| self.patterns.get(scope).copied().unwrap_or_default();
        let of_node = match scope {
            Scope::AllNodes => {
                let nodes = self.patterns.iter().filter(|(scope, _)| **scope != Scope::AllNodes);
                nodes.map(|(_, count)| *count).max().unwrap_or_default()
            }
            Scope::Node(_) => of(scope),
        };
        added == 0 || of(&Scope::AllNodes) + of_node + added <= MAX_PATTERNS
    }

    pub(super) fn add(&mut self, scope: &Scope, pattern: &str) {
        let count = self.counts.entry((scope.clone(), pattern.to_owned())).or_default();
        *count += 1;
        if *count == 1 {
            *self.patterns.entry(scope.clone()).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, scope: &Scope, pattern: &str) {
        let key = (scope.clone(), pattern.to_owned());
        let Some(count) = self.counts.get_mut(&key) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.counts.remove(&key);
        if let Some(patterns) = self.patterns.get_mut(scope) {
            *patterns -= 1;
            if *patterns == 0 {
                self.patterns.remove(scope);
            }
        }
    }

    /// Returns the patterns that are needed on a node, each once.
    pub(super) fn on(&self, node: &NodeName) -> BTreeSet<&String> {
        let wanted = self.counts.keys().filter(|(scope, _)| scope.contains(node));
        wanted.map(|(_, pattern)| pattern).collect()
    }

    pub(super) fn is_wanted(&self, node: &NodeName, pattern: &str) -> bool {
        [Scope::AllNodes, Scope::Node(node.clone())]
            .into_iter()
            .any(|scope| self.counts.contains_key(&(scope, pattern.to_owned())))
    }
}
