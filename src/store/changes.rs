//! Collects watch events into a set of dirty objects. An event says which object to read again,
//! never its content; many events on one object are one entry. Only [`Changes`] waits; the rest
//! decides.

use super::paths::{self, NodePath};
use super::requests;
use super::tree::{Error, Event, Feed, Tree};
use crate::model::{MachineId, ServiceId, UnitId};
use crate::mutant;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use tokio::time::Instant;

/// With more dirty keys than this, everything is dirty: reading all costs less than tracking them.
const MAX_KEYS: usize = 4096;

/// How long events are collected after the first, so that a burst causes one read.
pub(crate) const GATHER: Duration = Duration::from_millis(5);

/// A part of the tree that agents and commands watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    Everything,
    Unit(UnitId),
    ExposedFlag(ServiceId),
    MachineUnits(MachineId),
    MachineTrackers(MachineId),
    MachineCertificate(MachineId),
    Machines,
    ManagerAddress,
    Dependencies,
    Operators,
    Heartbeat,
    HeartbeatJournal,
}

impl Watched {
    /// Watches it. No change after this returns is missed.
    pub async fn feed<T: Tree>(self, tree: &T) -> Result<T::Feed, Error> {
        let path = match self {
            Self::Everything => paths::root(),
            Self::Unit(id) => paths::unit(id),
            Self::ExposedFlag(service) => paths::exposed(service),
            Self::MachineUnits(id) => paths::machine_units(id),
            Self::MachineTrackers(id) => paths::machine_trackers(id),
            Self::MachineCertificate(id) => paths::machine_certificate(id),
            Self::Machines => paths::machines(),
            Self::ManagerAddress => paths::fleet_address(),
            Self::Dependencies => paths::fleet_dependencies(),
            Self::Operators => paths::operators(),
            Self::Heartbeat => paths::heartbeat(),
            Self::HeartbeatJournal => paths::heartbeat_journal(),
        };
        tree.watch(&path).await
    }
}

/// The object of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A service's record or flag.
    Service(ServiceId),
    /// A unit's record, ports or agent.
    Unit(UnitId),
    /// A machine's record, units or agent.
    Machine(MachineId),
}

/// The objects to read again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Since when everything is dirty, or the earliest time of the keys that this replaced.
    everything: Option<Instant>,
    /// Each with the time of its first event.
    keys: BTreeMap<Key, Instant>,
}

impl Dirty {
    /// Whether everything has to be read.
    pub fn everything(&self) -> bool {
        self.everything.is_some()
    }

    /// The dirty objects; none if everything is dirty.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.keys.keys().copied()
    }

    /// The dirty objects, each with the time of its first event.
    pub fn noticed(&self) -> impl Iterator<Item = (Key, Instant)> {
        self.keys.iter().map(|(key, at)| (*key, *at))
    }

    /// The time of the first event.
    pub fn since(&self) -> Option<Instant> {
        self.everything.into_iter().chain(self.keys.values().copied()).min()
    }

    pub fn is_empty(&self) -> bool {
        !self.everything() && self.keys.is_empty()
    }

    /// Adds an event that arrived at `now`.
    pub fn add(&mut self, event: &Event, now: Instant) {
        if self.everything() {
            return;
        }
        match event {
            Event::Everything => self.all(now),
            Event::Changed(path) => match about(path) {
                About::Key(key) => {
                    self.keys.entry(key).or_insert(now);
                    if self.keys.len() > MAX_KEYS {
                        self.all(now);
                    }
                }
                About::Nothing => {}
                About::Unknown => self.all(now),
            },
        }
    }

    fn all(&mut self, now: Instant) {
        self.everything = self.since().or(Some(now));
        self.keys.clear();
    }
}

enum About {
    Key(Key),
    /// Names, counters and the controller's own znodes: the objects themselves have events, too.
    Nothing,
    /// An unknown path, or the whole environment: everything is read.
    Unknown,
}

/// Top-level znodes below which nothing else is of interest to a reader of services, units and
/// machines.
const INTERNAL: &[&str] = &[
    "services",
    "units",
    "machines",
    "charms",
    "names",
    "controller",
    "zookeeper",
    "authority",
    "flag-log",
    "operators",
    "tombstones",
];

fn about(path: &NodePath) -> About {
    let mut parts = path.as_str().split('/').skip(1);
    let key = match (parts.next(), parts.next()) {
        (Some("services"), Some(id)) => ServiceId::from_key(id).ok().map(Key::Service),
        (Some("units"), Some(id)) => UnitId::from_key(id).ok().map(Key::Unit),
        (Some("machines"), Some(id)) => MachineId::from_key(id).ok().map(Key::Machine),
        // A held controller may continue, and reads everything again.
        (Some("controller"), Some("accepted")) => None,
        // Rare, and the provisioner reads everything for it.
        (Some("controller"), Some(name)) if requests::is_request(name) => None,
        (Some(top), _) if INTERNAL.contains(&top) => return About::Nothing,
        _ => None,
    };
    key.map_or(About::Unknown, About::Key)
}

/// A feed with collected events.
#[derive(Debug)]
pub struct Changes<F> {
    feed: F,
    /// Collected and not returned yet, so that a dropped [`Changes::next`] loses nothing.
    pending: Dirty,
}

/// Passes on the events of the next `window`, so that a burst causes one read. Cancel-safe if `add`
/// keeps what it gets.
///
/// # Errors
/// Those of [`Feed::next`].
pub async fn gather_burst<F: Feed>(
    feed: &mut F,
    window: Duration,
    mut add: impl FnMut(&Event),
) -> Result<(), Error> {
    let end = Instant::now() + window;
    while let Ok(event) = tokio::time::timeout_at(end, feed.next()).await {
        add(&event?);
    }
    Ok(())
}

impl<F: Feed> Changes<F> {
    pub fn new(feed: F) -> Self {
        Self { feed, pending: Dirty::default() }
    }

    pub fn feed_mut(&mut self) -> &mut F {
        &mut self.feed
    }

    /// Makes everything dirty.
    pub fn all(&mut self) {
        self.pending.all(Instant::now());
    }

    /// Takes the collected changes without waiting. A caller that reads for another reason calls
    /// this, so that a caller that never waits gets its events, too.
    pub fn gathered(&mut self) -> Dirty {
        std::mem::take(&mut self.pending)
    }

    /// Adds an event from another source.
    pub fn add(&mut self, event: &Event) {
        self.pending.add(event, Instant::now());
    }

    /// Waits for a change, collects those that follow at once, and returns them all. The first
    /// result is everything. Cancel-safe.
    ///
    /// # Errors
    /// Those of [`Feed::next`].
    pub async fn next(&mut self) -> Result<Dirty, Error> {
        self.gather().await?;
        Ok(self.gathered())
    }

    /// The same without taking the changes; see [`gathered`](Self::gathered). Cancel-safe.
    ///
    /// # Errors
    /// As for [`next`](Self::next).
    pub async fn gather(&mut self) -> Result<(), Error> {
        while self.pending.is_empty() {
            let event = self.feed.next().await?;
            self.add(&event);
        }
        let Self { feed, pending } = self;
        gather_burst(feed, GATHER, |event| {
            if !mutant!(SimultaneousEventsDropped) {
                pending.add(event, Instant::now());
            }
        })
        .await
    }

    /// Collects events while `work` runs, so that their times are right.
    pub async fn during<R>(&mut self, work: impl Future<Output = R>) -> R {
        tokio::select! {
            biased;
            done = work => done,
            never = self.listen() => match never {},
        }
    }

    async fn listen(&mut self) -> Infallible {
        // The feed returns its failure again to the next caller of `gather`.
        while let Ok(event) = self.feed.next().await {
            if self.pending.is_empty() || !mutant!(SimultaneousEventsDropped) {
                self.add(&event);
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::tree::Write;
    use crate::store::{Credential, MemoryStore};
    use proptest::prelude::*;

    fn dirty(paths: &[&str]) -> Dirty {
        let mut dirty = Dirty::default();
        for path in paths {
            dirty.add(&Event::Changed(NodePath::reported(path)), Instant::now());
        }
        dirty
    }

    #[test]
    fn events_are_keyed_by_service_unit_and_machine() {
        let all = dirty(&[
            paths::exposed(ServiceId::new(1)).as_str(),
            paths::unit_ports(UnitId::new(2)).as_str(),
            paths::unit_agent(UnitId::new(2)).as_str(),
            paths::machine_unit(MachineId::new(3), UnitId::new(2)).as_str(),
        ]);
        let keys =
            [Key::Service(ServiceId::new(1)), Key::Unit(UnitId::new(2)), Key::Machine(MachineId::new(3))];
        assert_eq!(all.keys().collect::<Vec<_>>(), keys);
        assert!(!all.everything());
    }

    #[test]
    fn internal_paths_are_ignored_and_unknown_ones_mean_everything() {
        assert!(
            dirty(&["/names/units/a/0", "/charms/x/0000", "/units", "/controller/x", "/zookeeper/quota"])
                .is_empty()
        );
        let machine = MachineId::new(0);
        for path in [paths::flag_log(), paths::operators(), paths::authority(), paths::tombstone(machine)] {
            assert!(dirty(&[path.as_str()]).is_empty(), "{}", path.as_str());
        }
        for path in [
            "/controller/adopt-groups",
            "/controller/clear",
            "/",
            "",
            "/initialized",
            "/units/what",
            "/other",
            "/services/service-1",
        ] {
            assert!(dirty(&[path]).everything(), "{path}");
        }
    }

    #[test]
    fn everything_replaces_single_keys() {
        let mut all = dirty(&["/units/unit-0000000001"]);
        let first = all.since();
        let later = Instant::now() + GATHER;
        all.add(&Event::Everything, later);
        all.add(&Event::Changed(paths::unit(UnitId::new(2))), later);
        assert!(all.everything() && all.keys().next().is_none());
        assert!(first.is_some() && all.since() == first, "it has waited for as long as the first of it");
    }

    #[test]
    fn too_many_keys_become_everything() {
        let mut flood = Dirty::default();
        for unit in 0..=u32::try_from(MAX_KEYS).unwrap() {
            assert!(!flood.everything());
            flood.add(&Event::Changed(paths::unit(UnitId::new(unit))), Instant::now());
        }
        assert!(flood.everything());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_one_result_and_a_dropped_wait_loses_nothing() {
        let store = MemoryStore::default();
        let credential = Credential::parse("operator:x").unwrap();
        let roles = Roles { operator: credential.identity(), controller: credential.identity() };
        let tree = store.connect(Some(&credential));
        let mut changes = Changes::new(tree.watch(&paths::root()).await.unwrap());
        assert!(changes.next().await.unwrap().everything());

        let unit = |number| paths::unit(UnitId::new(number));
        let create = |path| Write::create(path, Vec::new(), roles.operators());
        tree.write(vec![create(paths::units()), create(unit(1))]).await.unwrap();
        // Long enough to take the first event in, too short to hand it out.
        let cut_short = tokio::time::timeout(GATHER / 2, changes.next()).await;
        assert!(cut_short.is_err());
        tree.write(vec![create(unit(2)), create(paths::unit_ports(UnitId::new(2)))]).await.unwrap();
        let dirty = changes.next().await.unwrap();
        assert_eq!(dirty.keys().collect::<Vec<_>>(), [1, 2].map(|number| Key::Unit(UnitId::new(number))));

        store.interrupt();
        assert!(changes.next().await.unwrap().everything());
    }

    proptest! {
        #[test]
        fn the_order_of_events_does_not_matter(mut units in proptest::collection::vec(0u32..20, 0..40)) {
            let now = Instant::now();
            let events = |units: &[u32]| {
                let mut dirty = Dirty::default();
                for &unit in units {
                    dirty.add(&Event::Changed(paths::unit_ports(UnitId::new(unit))), now);
                }
                dirty
            };
            let before = events(&units);
            units.reverse();
            prop_assert_eq!(before, events(&units));
        }
    }
}
