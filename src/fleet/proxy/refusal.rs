//! Why a proxy is refused: a missing permission, too many proxies, and cycles of units that wait
//! for each other across nodes. Pure.

use std::collections::BTreeSet;

use super::{MAX_DEPENDENTS, MAX_PROXIES, NodeUnit, Phase, Proxies, ProxyKey};
use crate::fleet::name::NodeName;

impl<I> Proxies<I> {
    /// Returns the reason to refuse a proxy. While the permissions cannot be read, only new proxies
    /// are refused.
    pub(super) fn refusal(&self, source: &NodeName, (node, _): &NodeUnit, is_new: bool) -> Option<String> {
        if !self.rules.contains_key(node) {
            return Some(format!("the manager has no node '{node}'"));
        }
        let allowed = match self.rules.get(source) {
            _ if source == node => return None,
            Some(None) if is_new => {
                return Some(format!("the permissions of node '{source}' cannot be read"));
            }
            Some(None) => return None,
            Some(Some(allowed)) => allowed.contains(node),
            None => false,
        };
        let hint = format!("`juju node allow {source} --on {node}`, or AllowDependenciesOn");
        let text = || format!("node '{source}' may not depend on node '{node}'; allow it with {hint}");
        (!allowed).then(text)
    }

    pub(super) fn excess(&self, (source, name): &ProxyKey, dependents: &BTreeSet<String>) -> Option<String> {
        let of = self.sources.get(source);
        if of.is_some_and(|of| of.proxies.len() >= MAX_PROXIES && !of.proxies.contains_key(name)) {
            return Some(format!("node '{source}' has {MAX_PROXIES} proxies already"));
        }
        let text = || format!("more than {MAX_DEPENDENTS} units depend on the proxy");
        (dependents.len() > MAX_DEPENDENTS).then(text)
    }

    /// Returns the reason to refuse a proxy whose target would wait for one of the units that wait
    /// for the proxy; `None` if there is no such cycle.
    pub(super) fn cycle(
        &self,
        (source, _): &ProxyKey,
        target: &NodeUnit,
        dependents: &BTreeSet<String>,
    ) -> Option<String> {
        let mut seen = BTreeSet::from([target.clone()]);
        let mut paths = vec![vec![target.clone()]];
        while let Some(path) = paths.pop() {
            let (node, unit) = path.last()?;
            if node == source && dependents.contains(unit) {
                let units = std::iter::once((node, unit)).chain(path.iter().map(|(node, unit)| (node, unit)));
                let units: Vec<String> = units.map(|(node, unit)| format!("{node}/{unit}")).collect();
                return Some(format!("the units wait for each other: {}", units.join(" -> ")));
            }
            let proxies = self.sources.get(node).into_iter().flat_map(|of| of.proxies.values());
            let waits = proxies.filter(|proxy| {
                matches!(proxy.phase, Phase::Waiting { .. }) && proxy.dependents.contains(unit)
            });
            for proxy in waits {
                if seen.insert(proxy.target.clone()) {
                    paths.push(path.iter().chain([&proxy.target]).cloned().collect());
                }
            }
        }
        None
    }
}
