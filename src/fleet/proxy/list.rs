//! The list of proxies, with those that failed or ended. Pure.

use std::collections::BTreeMap;

use super::{NodeUnit, Phase, Proxies, ProxyKey};

/// Failed and ended proxies that are kept for the list.
const MAX_ENDED: usize = 1_000;

/// A proxy as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<I> {
    pub proxy: ProxyKey,
    /// `None` if the name of the proxy has no valid one.
    pub target: Option<NodeUnit>,
    pub state: ListedState,
    pub since: I,
    /// Why the proxy failed or stopped.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListedState {
    Waiting,
    Active,
    /// It did not become active.
    Failed,
    /// It ended because of its target.
    Stopped,
}

impl ListedState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Active => "active",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }
}

/// The proxies that failed or ended, and did not start again.
#[derive(Debug)]
pub(super) struct Ended<I>(BTreeMap<ProxyKey, Listed<I>>);

impl<I> Default for Ended<I> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<I: Copy + Ord> Ended<I> {
    /// Adds a proxy. If there are too many, the oldest is removed.
    pub(super) fn add(&mut self, ended: Listed<I>) {
        if self.0.len() >= MAX_ENDED
            && let Some(oldest) = self.0.values().min_by_key(|ended| ended.since)
        {
            let oldest = oldest.proxy.clone();
            self.0.remove(&oldest);
        }
        self.0.insert(ended.proxy.clone(), ended);
    }

    pub(super) fn remove(&mut self, proxy: &ProxyKey) {
        self.0.remove(proxy);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&ProxyKey) -> bool) {
        self.0.retain(|proxy, _| keep(proxy));
    }
}

impl<I: Copy + Ord> Proxies<I> {
    /// Returns all proxies, ordered by source and name.
    pub fn list(&self) -> Vec<Listed<I>> {
        let current = self.sources.iter().flat_map(|(source, of)| {
            of.proxies.iter().map(move |(name, proxy)| Listed {
                proxy: (source.clone(), name.clone()),
                target: Some(proxy.target.clone()),
                state: match proxy.phase {
                    Phase::Waiting { .. } => ListedState::Waiting,
                    Phase::Active { .. } => ListedState::Active,
                },
                since: proxy.since,
                reason: String::new(),
            })
        });
        let mut all: Vec<Listed<I>> = current.chain(self.ended.0.values().cloned()).collect();
        all.sort_by(|a, b| a.proxy.cmp(&b.proxy));
        all
    }
}
