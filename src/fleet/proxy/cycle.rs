//! Cycles of units that wait for each other across nodes. Pure.

use std::collections::BTreeSet;

use super::{NodeUnit, Phase, Proxies, ProxyKey};

impl<I> Proxies<I> {
    /// Returns the reason to refuse a proxy whose target would wait for one of the units that wait for
    /// the proxy; `None` if there is no such cycle.
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
