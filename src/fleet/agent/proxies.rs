//! The proxy services of one node in its agent: the waiting and the active ones, and the
//! announcements to send to the manager. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a proxy that starts waits for a connection to the manager.
const MANAGER_LIMIT: Duration = Duration::from_secs(10);
/// After systemd was started again, how long the proxies of its earlier run are kept. Until then
/// the units that need them have started.
const RESTORE_LIMIT: Duration = Duration::from_secs(30);
/// Failures that wait for a connection to the manager.
const MAX_FAILURES: usize = 100;
pub(super) const UNREACHABLE: &str = "the manager cannot be reached";

/// A proxy service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Entry {
    pub(super) node: String,
    pub(super) unit: String,
    /// The target's instance of systemd on which the proxy became active; `None` while it waits.
    pub(super) active_on: Option<u64>,
    /// The units that cannot start before the proxy, while it waits.
    #[serde(default)]
    pub(super) dependents: BTreeSet<String>,
    /// Whether the manager has ended the proxy. Its systemd unit is being stopped.
    #[serde(default)]
    pub(super) has_ended: bool,
}

impl Entry {
    pub(super) fn new(node: String, unit: String, dependents: BTreeSet<String>) -> Self {
        Self { node, unit, active_on: None, dependents, has_ended: false }
    }
}

/// The content of the state file: the proxies that are active. The helper of one that waits calls
/// again if the agent is restarted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Saved {
    /// This node's instance of systemd.
    pub(super) instance: u64,
    pub(super) proxies: BTreeMap<String, Entry>,
}

/// A signal to the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Announcement {
    New {
        proxy: String,
        node: String,
        unit: String,
        dependents: BTreeSet<String>,
    },
    Established {
        proxy: String,
        node: String,
        unit: String,
        instance: u64,
    },
    Removed {
        proxy: String,
        node: String,
        unit: String,
    },
    Failed {
        proxy: String,
        reason: String,
    },
    /// All proxies were announced.
    All {
        instance: u64,
        deps: Vec<String>,
    },
}

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    Announce(Announcement),
    /// Answer the helper that waits for the proxy.
    Answer {
        proxy: String,
        result: Result<(), String>,
    },
    /// Stop the proxy service in systemd.
    StopUnit {
        proxy: String,
    },
    /// Write the state file.
    Save,
}

#[derive(Debug)]
pub(super) struct Proxies<I> {
    instance: u64,
    entries: BTreeMap<String, Entry>,
    is_connected: bool,
    /// Proxies of an earlier run of systemd are kept until then.
    restored_until: Option<I>,
    /// When proxies fail that wait without a connection.
    fail_at: Option<I>,
    /// Failures that were not announced yet.
    failures: Vec<(String, String)>,
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Proxies<I> {
    /// Continues with the saved proxies. `instance` is that of systemd now.
    pub(super) fn new(saved: Saved, instance: u64, now: I) -> Self {
        let is_restored = saved.instance != instance && !saved.proxies.is_empty();
        let restored_until = is_restored.then_some(now + RESTORE_LIMIT);
        Self {
            instance,
            entries: saved.proxies,
            is_connected: false,
            restored_until,
            fail_at: None,
            failures: Vec::new(),
        }
    }

    pub(super) fn saved(&self) -> Saved {
        let active = self.entries.iter().filter(|(_, entry)| entry.active_on.is_some());
        let proxies = active.map(|(proxy, entry)| (proxy.clone(), entry.clone())).collect();
        Saved { instance: self.instance, proxies }
    }

    /// Handles systemd's instance, which changes when systemd is started again under the agent.
    pub(super) fn systemd_is(&mut self, instance: u64, now: I) {
        if std::mem::replace(&mut self.instance, instance) != instance && !self.entries.is_empty() {
            self.restored_until = Some(now + RESTORE_LIMIT);
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    /// Returns whether the systemd unit of a proxy has to be stopped.
    pub(super) fn has_ended(&self, proxy: &str) -> bool {
        self.entries.get(proxy).is_some_and(|entry| entry.has_ended)
    }

    /// Handles a proxy service that is active in systemd and has no entry, because the state file
    /// was lost. The instance of its target is unknown.
    pub(super) fn adopted(&mut self, proxy: &str, node: String, unit: String) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !self.entries.contains_key(proxy) {
            let entry =
                Entry { active_on: Some(0), ..Entry::new(node.clone(), unit.clone(), BTreeSet::new()) };
            self.entries.insert(proxy.to_owned(), entry);
            effects.push(Effect::Save);
            let proxy = proxy.to_owned();
            self.announce(Announcement::Established { proxy, node, unit, instance: 0 }, &mut effects);
        }
        effects
    }

    /// Handles a proxy service that starts.
    pub(super) fn created(&mut self, proxy: String, entry: Entry, now: I) -> Vec<Effect> {
        self.failures.retain(|(failed, _)| *failed != proxy);
        let before = self.entries.insert(proxy.clone(), entry.clone());
        let mut effects = Vec::new();
        if let Some(Entry { node, unit, .. }) =
            before.filter(|before| (&before.node, &before.unit) != (&entry.node, &entry.unit))
        {
            self.announce(Announcement::Removed { proxy: proxy.clone(), node, unit }, &mut effects);
        }
        let Entry { node, unit, dependents, .. } = entry;
        self.announce(Announcement::New { proxy, node, unit, dependents }, &mut effects);
        self.wait_for_manager(now);
        effects
    }

    /// Handles a proxy service that could not be created.
    pub(super) fn refused(&mut self, proxy: &str, reason: &str) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.note_failure(proxy, reason, &mut effects);
        effects
    }

    /// Handles a proxy service that has stopped. While systemd itself stops, the proxy is kept:
    /// after the reboot the units that need it start again, and the target runs on meanwhile.
    pub(super) fn removed(&mut self, proxy: &str, systemd_stops: bool) -> Vec<Effect> {
        let mut effects = Vec::new();
        let is_kept = |entry: &Entry| systemd_stops && entry.active_on.is_some() && !entry.has_ended;
        if self.entries.get(proxy).is_none_or(is_kept) {
            return effects;
        }
        if let Some(Entry { node, unit, active_on, has_ended, .. }) = self.entries.remove(proxy) {
            if active_on.is_some() {
                effects.push(Effect::Save);
            } else {
                let result = Err("the start was cancelled".to_owned());
                effects.push(Effect::Answer { proxy: proxy.to_owned(), result });
            }
            if !has_ended {
                self.announce(Announcement::Removed { proxy: proxy.to_owned(), node, unit }, &mut effects);
            }
        }
        effects
    }

    /// Handles the state of a proxy service in systemd, which may have changed without a call of
    /// the helper.
    pub(super) fn observed(&mut self, proxy: &str, active_state: &str, now: I) -> Vec<Effect> {
        let is_restored = self.restored_until.is_some_and(|until| now < until);
        match active_state {
            "inactive" | "failed" if !is_restored => self.removed(proxy, false),
            "active" if self.has_ended(proxy) => vec![Effect::StopUnit { proxy: proxy.to_owned() }],
            _ => Vec::new(),
        }
    }

    /// Handles a registration with a manager. `deps` are the dep services that run here.
    pub(super) fn connected(&mut self, deps: Vec<String>) -> Vec<Effect> {
        (self.is_connected, self.fail_at) = (true, None);
        let mut effects = Vec::new();
        for (proxy, entry) in self.entries.iter().filter(|(_, entry)| !entry.has_ended) {
            let (proxy, Entry { node, unit, active_on, dependents, .. }) = (proxy.clone(), entry.clone());
            effects.push(Effect::Announce(match active_on {
                Some(instance) => Announcement::Established { proxy, node, unit, instance },
                None => Announcement::New { proxy, node, unit, dependents },
            }));
        }
        let failures = std::mem::take(&mut self.failures).into_iter();
        let failed = |(proxy, reason)| Effect::Announce(Announcement::Failed { proxy, reason });
        effects.extend(failures.map(failed));
        effects.push(Effect::Announce(Announcement::All { instance: self.instance, deps }));
        effects
    }

    pub(super) fn disconnected(&mut self, now: I) {
        self.is_connected = false;
        self.wait_for_manager(now);
    }

    /// Handles the manager's answer: the target's instance of systemd, or why the proxy fails.
    pub(super) fn ready(&mut self, proxy: &str, result: Result<u64, String>) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(entry) = self.entries.get_mut(proxy) else {
            // The proxy was removed before the answer arrived, and the manager counts it.
            if result.is_ok() {
                let (node, unit) = (String::new(), String::new());
                self.announce(Announcement::Removed { proxy: proxy.to_owned(), node, unit }, &mut effects);
            }
            return effects;
        };
        let result = match result {
            Ok(instance) => {
                (entry.active_on, entry.dependents) = (Some(instance), BTreeSet::new());
                effects.push(Effect::Save);
                Ok(())
            }
            // An earlier run of the proxy became active, and this one has failed.
            Err(_) if entry.active_on.is_some() => return self.target_stopped(proxy),
            Err(reason) => {
                self.entries.remove(proxy);
                Err(reason)
            }
        };
        effects.push(Effect::Answer { proxy: proxy.to_owned(), result });
        effects
    }

    /// Handles the end of a target. The manager has removed the proxy.
    pub(super) fn target_stopped(&mut self, proxy: &str) -> Vec<Effect> {
        match self.entries.get_mut(proxy) {
            Some(entry) if entry.active_on.is_some() => entry.has_ended = true,
            // The end of an earlier run of the proxy.
            _ => return Vec::new(),
        }
        vec![Effect::Save, Effect::StopUnit { proxy: proxy.to_owned() }]
    }

    /// Handles the deadlines that have passed.
    pub(super) fn tick(&mut self, now: I) -> Vec<Effect> {
        self.restored_until = self.restored_until.filter(|until| now < *until);
        let mut effects = Vec::new();
        if self.fail_at.is_some_and(|at| at <= now) {
            self.fail_at = None;
            let waiting = self.entries.iter().filter(|(_, entry)| entry.active_on.is_none());
            let waiting: Vec<String> = waiting.map(|(proxy, _)| proxy.clone()).collect();
            for proxy in waiting {
                self.entries.remove(&proxy);
                self.note_failure(&proxy, UNREACHABLE, &mut effects);
                effects.push(Effect::Answer { proxy, result: Err(UNREACHABLE.to_owned()) });
            }
        }
        effects
    }

    /// Returns when [`Self::tick`] is to be called.
    pub(super) fn deadline(&self) -> Option<I> {
        self.fail_at.into_iter().chain(self.restored_until).min()
    }

    fn announce(&self, announcement: Announcement, effects: &mut Vec<Effect>) {
        // Without a connection, the next one announces everything.
        if self.is_connected {
            effects.push(Effect::Announce(announcement));
        }
    }

    fn note_failure(&mut self, proxy: &str, reason: &str, effects: &mut Vec<Effect>) {
        let (proxy, reason) = (proxy.to_owned(), reason.to_owned());
        if self.is_connected {
            effects.push(Effect::Announce(Announcement::Failed { proxy, reason }));
        } else if self.failures.len() < MAX_FAILURES {
            self.failures.push((proxy, reason));
        }
    }

    fn wait_for_manager(&mut self, now: I) {
        let waits = self.entries.values().any(|entry| entry.active_on.is_none());
        if !self.is_connected && waits && self.fail_at.is_none() {
            self.fail_at = Some(now + MANAGER_LIMIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROXY: &str = "hirte-proxy@bar_db.service";

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn entry(active_on: Option<u64>) -> Entry {
        let (node, unit) = ("bar".to_owned(), "db.service".to_owned());
        Entry { active_on, ..Entry::new(node, unit, BTreeSet::new()) }
    }

    fn new_proxy() -> Effect {
        let Entry { node, unit, dependents, .. } = entry(None);
        Effect::Announce(Announcement::New { proxy: PROXY.to_owned(), node, unit, dependents })
    }

    fn removed_proxy() -> Effect {
        let Entry { node, unit, .. } = entry(None);
        Effect::Announce(Announcement::Removed { proxy: PROXY.to_owned(), node, unit })
    }

    fn answer(result: Result<(), &str>) -> Effect {
        Effect::Answer { proxy: PROXY.to_owned(), result: result.map_err(str::to_owned) }
    }

    fn all() -> Effect {
        Effect::Announce(Announcement::All { instance: 1, deps: Vec::new() })
    }

    /// A connected agent with one active proxy.
    fn active() -> Proxies<Duration> {
        let mut proxies = Proxies::new(Saved::default(), 1, at(0));
        assert_eq!(proxies.connected(Vec::new()), [all()]);
        assert_eq!(proxies.created(PROXY.to_owned(), entry(None), at(0)), [new_proxy()]);
        assert_eq!(proxies.ready(PROXY, Ok(7)), [Effect::Save, answer(Ok(()))]);
        assert_eq!(proxies.saved().proxies[PROXY], entry(Some(7)));
        proxies
    }

    #[test]
    fn each_connection_announces_all_proxies() {
        let mut proxies = active();
        proxies.disconnected(at(5));
        assert_eq!(
            (proxies.deadline(), proxies.tick(at(500))),
            (None, vec![]),
            "an active proxy has no limit"
        );
        let Entry { node, unit, .. } = entry(None);
        let established = Announcement::Established { proxy: PROXY.to_owned(), node, unit, instance: 7 };
        assert_eq!(proxies.connected(Vec::new()), [Effect::Announce(established), all()]);
    }

    #[test]
    fn a_start_waits_for_the_manager_for_a_bounded_time() {
        let mut proxies = Proxies::new(Saved::default(), 1, at(0));
        assert_eq!(proxies.created(PROXY.to_owned(), entry(None), at(5)), []);
        assert_eq!((proxies.deadline(), proxies.tick(at(14))), (Some(at(15)), vec![]));
        assert_eq!(proxies.tick(at(15)), [answer(Err(UNREACHABLE))]);
        let failed = Announcement::Failed { proxy: PROXY.to_owned(), reason: UNREACHABLE.to_owned() };
        assert_eq!(proxies.connected(Vec::new()), [Effect::Announce(failed), all()]);
        // A connection in time announces the proxy, and its loss begins the limit again.
        proxies.disconnected(at(20));
        proxies.created(PROXY.to_owned(), entry(None), at(20));
        assert_eq!(proxies.connected(Vec::new()), [new_proxy(), all()]);
        proxies.disconnected(at(100));
        assert_eq!(proxies.deadline(), Some(at(110)));
    }

    #[test]
    fn a_proxy_ends_with_its_unit_or_its_target() {
        let mut proxies = active();
        assert_eq!(proxies.removed(PROXY, false), [Effect::Save, removed_proxy()]);
        assert_eq!(proxies.removed(PROXY, false), []);
        let mut proxies = active();
        let stop = Effect::StopUnit { proxy: PROXY.to_owned() };
        assert_eq!(proxies.target_stopped(PROXY), [Effect::Save, stop.clone()]);
        assert_eq!(proxies.connected(Vec::new()), [all()], "an ended proxy is not announced");
        assert_eq!(proxies.observed(PROXY, "active", at(1)), [stop]);
        assert_eq!(proxies.removed(PROXY, false), [Effect::Save], "the manager has removed it");
        let mut proxies = active();
        assert_eq!(proxies.observed(PROXY, "deactivating", at(1)), []);
        assert_eq!(proxies.observed(PROXY, "failed", at(1)), [Effect::Save, removed_proxy()]);
        // A start that is cancelled.
        proxies.created(PROXY.to_owned(), entry(None), at(2));
        let cancelled = answer(Err("the start was cancelled"));
        assert_eq!(proxies.removed(PROXY, true), [cancelled, removed_proxy()]);
        proxies.created(PROXY.to_owned(), entry(None), at(3));
        assert_eq!(proxies.ready(PROXY, Err("denied".to_owned())), [answer(Err("denied"))]);
        assert_eq!(proxies.saved().proxies.len(), 0);
    }

    #[test]
    fn messages_about_an_earlier_run_of_a_proxy_do_no_harm() {
        let mut proxies = active();
        proxies.removed(PROXY, false);
        let (node, unit) = (String::new(), String::new());
        let removed = Effect::Announce(Announcement::Removed { proxy: PROXY.to_owned(), node, unit });
        assert_eq!(proxies.ready(PROXY, Ok(7)), [removed], "the manager counts a proxy that is gone");
        assert_eq!(proxies.ready(PROXY, Err("late".to_owned())), []);
        proxies.created(PROXY.to_owned(), entry(None), at(1));
        assert_eq!(proxies.target_stopped(PROXY), [], "the new run waits");
        proxies.ready(PROXY, Ok(7));
        let stop = Effect::StopUnit { proxy: PROXY.to_owned() };
        assert_eq!(proxies.ready(PROXY, Err("failed".to_owned())), [Effect::Save, stop]);
    }

    #[test]
    fn an_active_service_without_an_entry_is_announced() {
        let mut proxies = Proxies::new(Saved::default(), 1, at(0));
        let Entry { node, unit, .. } = entry(None);
        assert_eq!(proxies.adopted(PROXY, node.clone(), unit.clone()), [Effect::Save]);
        assert_eq!(proxies.adopted(PROXY, node.clone(), unit.clone()), []);
        let established = Announcement::Established { proxy: PROXY.to_owned(), node, unit, instance: 0 };
        assert_eq!(proxies.connected(Vec::new()), [Effect::Announce(established), all()]);
    }

    #[test]
    fn a_reboot_keeps_the_proxies_for_a_while() {
        let mut proxies = active();
        assert_eq!(proxies.removed(PROXY, true), [], "systemd stops");
        let saved = proxies.saved();
        let mut proxies = Proxies::new(saved.clone(), 2, at(0));
        assert_eq!(proxies.observed(PROXY, "inactive", at(29)), []);
        assert_eq!(proxies.deadline(), Some(at(30)));
        proxies.tick(at(30));
        assert_eq!(proxies.observed(PROXY, "inactive", at(30)), [Effect::Save]);
        // A restart of the agent alone keeps nothing of units that have stopped.
        let mut proxies = Proxies::new(saved, 1, at(0));
        assert_eq!(proxies.observed(PROXY, "inactive", at(0)), [Effect::Save]);
    }
}
