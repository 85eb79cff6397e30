//! The next step for each target: jobs for its dep service, and answers to its sources. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::target::{Step, Target, Wanted};
use super::{Effect, Listed, ListedState, NodeUnit, OFFLINE_LIMIT, Phase, Proxies, Proxy, ProxyKey, Source};
use crate::fleet::name::NodeName;

impl<I: Copy + Ord + Add<Duration, Output = I>> Proxies<I> {
    /// Handles the result of a start.
    pub(super) fn started(
        &mut self,
        key: &NodeUnit,
        instance: u64,
        result: &Result<(), String>,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        match result {
            Ok(()) => self.is_active(key, instance, true, now, effects),
            Err(reason) => {
                // Proxies whose target still runs are not affected.
                let failed = self.of_target(key, |phase| *phase != Phase::Active { instance });
                let reason = format!("{} on node {} did not start: {reason}", key.1, key.0);
                self.end_all(failed, &reason, now, effects);
            }
        }
    }

    /// Notifies the sources of a target on which instance of systemd it is active; those that wait
    /// only if a start has ended.
    fn is_active(
        &mut self,
        key: &NodeUnit,
        instance: u64,
        was_started: bool,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        let Self { targets, sources, .. } = self;
        for key in targets.get(key).into_iter().flat_map(|target| &target.proxies) {
            let Some(proxy) = find(sources, key) else { continue };
            match proxy.phase {
                Phase::Active { instance: of } if of == instance => continue,
                Phase::Active { .. } => {}
                Phase::Waiting { .. } if was_started => proxy.since = now,
                Phase::Waiting { .. } => continue,
            }
            proxy.phase = Phase::Active { instance };
            effects.push(Effect::Ready { proxy: key.clone(), result: Ok(instance) });
        }
    }

    /// Returns the proxies of a target whose phase fulfils a condition.
    fn of_target(&self, key: &NodeUnit, is_so: impl Fn(&Phase<I>) -> bool) -> Vec<ProxyKey> {
        let proxies = self.targets.get(key).into_iter().flat_map(|target| &target.proxies);
        proxies.filter(|key| self.get(key).is_some_and(|proxy| is_so(&proxy.phase))).cloned().collect()
    }

    pub(super) fn settle_all(&mut self, now: I, effects: &mut Vec<Effect>) {
        let targets: Vec<NodeUnit> = self.targets.keys().cloned().collect();
        for target in targets {
            self.settle(&target, now, effects);
        }
    }

    /// Takes the next step for a target.
    pub(super) fn settle(&mut self, key: &NodeUnit, now: I, effects: &mut Vec<Effect>) {
        let instance = match self.online.get(&key.0) {
            Some(Some(instance)) => *instance,
            _ => return self.wait_for_node(key, now + OFFLINE_LIMIT, effects),
        };
        if self.targets.get(key).is_some_and(Target::is_active) {
            self.is_active(key, instance, false, now, effects);
        }
        let Self { targets, sources, .. } = self;
        let Some(target) = targets.get_mut(key) else { return };
        let mut wanted = Wanted::default();
        for key in &target.proxies {
            let Some(proxy) = find(sources, key) else { continue };
            match &mut proxy.phase {
                Phase::Waiting { fail_at } => {
                    *fail_at = None;
                    wanted.waiting += 1;
                }
                Phase::Active { instance: of } if *of == instance => wanted.active += 1,
                Phase::Active { .. } => wanted.restarted += 1,
            }
        }
        let step = target.step(wanted, now);
        let target = key.clone();
        match step {
            Step::None => {}
            Step::Start => effects.push(Effect::StartDep { target }),
            Step::Stop => effects.push(Effect::StopDep { target }),
            Step::Refresh => effects.push(Effect::Refresh { target }),
            Step::Remove => {
                self.targets.remove(key);
                effects.push(Effect::Unwatch { target });
            }
            Step::Stopped => {
                let stopped = self.of_target(key, |phase| *phase == Phase::Active { instance });
                let reason = format!("{} on node {} stopped", key.1, key.0);
                self.end_all(stopped, &reason, now, effects);
                self.settle(key, now, effects);
            }
        }
    }

    /// Ends proxies for a reason of their target or of the manager. The caller settles the target.
    pub(super) fn end_all(&mut self, keys: Vec<ProxyKey>, reason: &str, now: I, effects: &mut Vec<Effect>) {
        for key in keys {
            let Some(proxy) = self.take(&key) else { continue };
            let reason = reason.to_owned();
            match proxy.phase {
                Phase::Waiting { .. } => self.fail(key, proxy.target, reason, now, effects),
                Phase::Active { .. } => {
                    let state = ListedState::Stopped;
                    self.note_end(key.clone(), Some(proxy.target), state, reason.clone(), now);
                    effects.push(Effect::TargetStopped { proxy: key, reason });
                }
            }
        }
    }

    /// Answers a proxy that cannot become active.
    pub(super) fn fail(
        &mut self,
        proxy: ProxyKey,
        target: NodeUnit,
        reason: String,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        self.note_end(proxy.clone(), Some(target), ListedState::Failed, reason.clone(), now);
        effects.push(Effect::Ready { proxy, result: Err(reason) });
    }

    pub(super) fn note_end(
        &mut self,
        proxy: ProxyKey,
        target: Option<NodeUnit>,
        state: ListedState,
        reason: String,
        now: I,
    ) {
        self.ended.add(Listed { proxy, target, state, since: now, reason });
    }

    /// Sets when proxies fail that wait for a node which is not ready. Removes a target without
    /// proxies.
    fn wait_for_node(&mut self, key: &NodeUnit, fail_at: I, effects: &mut Vec<Effect>) {
        let Self { targets, sources, .. } = self;
        let proxies = targets.get(key).map(|target| &target.proxies);
        if proxies.is_some_and(BTreeSet::is_empty) {
            targets.remove(key);
            effects.push(Effect::Unwatch { target: key.clone() });
            return;
        }
        for key in proxies.into_iter().flatten() {
            if let Some(Phase::Waiting { fail_at: at }) = find(sources, key).map(|proxy| &mut proxy.phase) {
                at.get_or_insert(fail_at);
            }
        }
    }
}

fn find<'a, I>(sources: &'a mut BTreeMap<NodeName, Source<I>>, key: &ProxyKey) -> Option<&'a mut Proxy<I>> {
    sources.get_mut(&key.0)?.proxies.get_mut(&key.1)
}
