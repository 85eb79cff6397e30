//! Units that the manager itself watches, besides those that clients subscribe to. Pure.

use super::{Effect, Monitors, Scope};
use crate::fleet::name::NodeName;

impl<O> Monitors<O> {
    /// Lets the agent of a node report a unit until [`Self::unwatch_unit`] is called as often.
    pub fn watch_unit(&mut self, node: &NodeName, systemd_unit: &str) -> Vec<Effect> {
        self.wanted.add(&Scope::Node(node.clone()), systemd_unit);
        self.refresh_unit(node, systemd_unit)
    }

    pub fn unwatch_unit(&mut self, node: &NodeName, systemd_unit: &str) -> Vec<Effect> {
        self.release_pattern(&Scope::Node(node.clone()), systemd_unit)
    }

    /// Lets the agent of a node report a unit again.
    pub fn refresh_unit(&self, node: &NodeName, systemd_unit: &str) -> Vec<Effect> {
        let (node, pattern) = (node.clone(), systemd_unit.to_owned());
        let is_online = self.online.contains(&node);
        is_online.then_some(Effect::SubscribeOnNode { node, pattern }).into_iter().collect()
    }

    /// Counts a pattern less. Agents stop reporting those that nothing else needs.
    pub(super) fn release_pattern(&mut self, scope: &Scope, pattern: &str) -> Vec<Effect> {
        self.wanted.remove(scope, pattern);
        let unneeded = self.online.iter().filter(|node| scope.contains(node));
        let unneeded = unneeded.filter(|node| !self.wanted.is_wanted(node, pattern));
        let unsubscribe =
            |node: &NodeName| Effect::UnsubscribeOnNode { node: node.clone(), pattern: pattern.to_owned() };
        unneeded.map(unsubscribe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watched_unit_is_reported_until_nothing_needs_it() {
        let mut monitors = Monitors::<u32>::default();
        let node: NodeName = "n1".parse().unwrap();
        let (unit, pattern) = ("a.service", "a.service".to_owned());
        assert_eq!(monitors.watch_unit(&node, unit), [], "offline");
        let subscribe = [Effect::SubscribeOnNode { node: node.clone(), pattern: pattern.clone() }];
        assert_eq!(monitors.node_online(&node), subscribe);
        let monitor = monitors.create(1).unwrap();
        let scope = Scope::Node(node.clone());
        let (id, _) = monitors.subscribe(&1, monitor, scope, std::slice::from_ref(&pattern)).unwrap();
        assert_eq!(monitors.watch_unit(&node, unit), subscribe);
        assert_eq!(monitors.unwatch_unit(&node, unit), []);
        assert_eq!(monitors.unsubscribe(&1, monitor, id).unwrap(), []);
        let unsubscribe = [Effect::UnsubscribeOnNode { node: node.clone(), pattern }];
        assert_eq!(monitors.unwatch_unit(&node, unit), unsubscribe);
    }
}
