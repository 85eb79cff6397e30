//! From watch events to "these are dirty". Pure but for [`Changes`], which waits. An event says where to look
//! again and never what is there now; many events on one thing are one entry.

use super::paths::NodePath;
use super::requests;
use super::tree::{Error, Event, Feed};
use crate::model::planted::{Bug, planted};
use crate::model::{MachineId, ServiceId, UnitId};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use tokio::time::Instant;

/// More dirty keys than this are everything: reading all of it costs less than keeping count.
const MAX_KEYS: usize = 4096;

/// How long events are gathered after the first, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(5);

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A service's record or flag.
    Service(ServiceId),
    /// A unit's record, ports or agent.
    Unit(UnitId),
    /// A machine's record, units or agent.
    Machine(MachineId),
}

/// What to look at again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Since when everything is, or the first of what it swallowed.
    everything: Option<Instant>,
    /// Each with the time when it was first noticed.
    keys: BTreeMap<Key, Instant>,
}

impl Dirty {
    /// Nothing is known: read all of it.
    pub fn everything(&self) -> bool {
        self.everything.is_some()
    }

    /// None if everything is dirty.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.keys.keys().copied()
    }

    /// The same, each with the time when it was first noticed.
    pub fn noticed(&self) -> impl Iterator<Item = (Key, Instant)> {
        self.keys.iter().map(|(key, at)| (*key, *at))
    }

    /// When the first of it was noticed.
    pub fn since(&self) -> Option<Instant> {
        self.everything.into_iter().chain(self.keys.values().copied()).min()
    }

    pub fn is_empty(&self) -> bool {
        !self.everything() && self.keys.is_empty()
    }

    /// Takes one more event in, which was noticed at `now`.
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
    /// Names, counters and the controller's own corner say nothing that the things themselves do not.
    Nothing,
    /// Not a path of ours, or the whole environment: better look once too often.
    Unknown,
}

fn about(path: &NodePath) -> About {
    let mut parts = path.as_str().split('/').skip(1);
    let key = match (parts.next(), parts.next()) {
        (Some("services"), Some(id)) => ServiceId::from_key(id).ok().map(Key::Service),
        (Some("units"), Some(id)) => UnitId::from_key(id).ok().map(Key::Unit),
        (Some("machines"), Some(id)) => MachineId::from_key(id).ok().map(Key::Machine),
        // A held controller may continue, and reads everything again.
        (Some("controller"), Some("accepted")) => None,
        // Rare, and whoever provisions looks at everything for it.
        (Some("controller"), Some(name)) if requests::is_request(name) => None,
        (Some("services" | "units" | "machines" | "charms" | "names" | "controller" | "zookeeper"), _) => {
            return About::Nothing;
        }
        _ => None,
    };
    key.map_or(About::Unknown, About::Key)
}

/// A feed whose events are gathered.
#[derive(Debug)]
pub struct Changes<F> {
    feed: F,
    /// Gathered and not yet handed out, so that a dropped [`Changes::next`] loses nothing.
    pending: Dirty,
}

impl<F: Feed> Changes<F> {
    pub fn new(feed: F) -> Self {
        Self { feed, pending: Dirty::default() }
    }

    /// Nothing that was said so far counts: the next word is everything.
    pub fn all(&mut self) {
        self.pending.all(Instant::now());
    }

    /// What was gathered so far, without waiting: for who looks anyway, whatever for. Otherwise one that always has something
    /// to do at once would never hear of anything.
    pub fn gathered(&mut self) -> Dirty {
        std::mem::take(&mut self.pending)
    }

    /// Takes in what was heard elsewhere.
    pub fn add(&mut self, event: &Event) {
        self.pending.add(event, Instant::now());
    }

    /// Waits until something is dirty, gathers what follows at once, and returns it all. The first says everything.
    /// Cancel-safe.
    ///
    /// # Errors
    /// What [`Feed::next`] cannot wait out.
    pub async fn next(&mut self) -> Result<Dirty, Error> {
        self.gather().await?;
        Ok(self.gathered())
    }

    /// The same, for who will ask what was [`gathered`](Self::gathered). Cancel-safe.
    ///
    /// # Errors
    /// As for [`next`](Self::next).
    pub async fn gather(&mut self) -> Result<(), Error> {
        while self.pending.is_empty() {
            let event = self.feed.next().await?;
            self.add(&event);
        }
        let end = Instant::now() + GATHER;
        while let Ok(event) = tokio::time::timeout_at(end, self.feed.next()).await {
            let event = event?;
            if !planted(Bug::OneEventAtATime) {
                self.add(&event);
            }
        }
        Ok(())
    }

    /// Takes in what is heard while `work` goes on, so that it is known since when it waits.
    pub async fn during<R>(&mut self, work: impl Future<Output = R>) -> R {
        tokio::select! {
            biased;
            done = work => done,
            never = self.listen() => match never {},
        }
    }

    async fn listen(&mut self) -> Infallible {
        // What a feed cannot wait out it says again to who gathers next.
        while let Ok(event) = self.feed.next().await {
            if self.pending.is_empty() || !planted(Bug::OneEventAtATime) {
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
    use crate::store::tree::{Tree, Write};
    use crate::store::{Credential, MemoryStore, paths};
    use proptest::prelude::*;

    fn dirty(paths: &[&str]) -> Dirty {
        let mut dirty = Dirty::default();
        for path in paths {
            dirty.add(&Event::Changed(NodePath::reported(path)), Instant::now());
        }
        dirty
    }

    #[test]
    fn paths_are_about_services_units_and_machines() {
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
    fn bookkeeping_is_nothing_and_the_unknown_is_everything() {
        assert!(
            dirty(&["/names/units/a/0", "/charms/x/0000", "/units", "/controller/x", "/zookeeper/quota"])
                .is_empty()
        );
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
    fn everything_swallows_the_rest() {
        let mut all = dirty(&["/units/unit-0000000001"]);
        let first = all.since();
        let later = Instant::now() + GATHER;
        all.add(&Event::Everything, later);
        all.add(&Event::Changed(paths::unit(UnitId::new(2))), later);
        assert!(all.everything() && all.keys().next().is_none());
        assert!(first.is_some() && all.since() == first, "it has waited for as long as the first of it");
    }

    #[test]
    fn a_flood_becomes_everything() {
        let mut flood = Dirty::default();
        for unit in 0..=u32::try_from(MAX_KEYS).unwrap() {
            assert!(!flood.everything());
            flood.add(&Event::Changed(paths::unit(UnitId::new(unit))), Instant::now());
        }
        assert!(flood.everything());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_one_look_and_a_dropped_wait_loses_nothing() {
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
