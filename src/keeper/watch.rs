//! Tables of watches: paths and the connections that watch them. A watch belongs to a connection
//! and is removed with it. Sending events does not belong here. Pure.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use super::path;
use super::proto::WatcherKind;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(i32)]
pub enum EventKind {
    Created = 1,
    Deleted = 2,
    DataChanged = 3,
    ChildrenChanged = 4,
}

/// The watches of a connection on one path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Modes {
    data: bool,
    child: bool,
    persistent: bool,
    recursive: bool,
}

impl Modes {
    fn none(self) -> bool {
        self == Modes::default()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    Data,
    Child,
    Persistent,
    Recursive,
}

/// Number and bytes of watched paths. A path counts once for each connection that watches it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub count: usize,
    pub path_bytes: usize,
}

impl Usage {
    fn grow(&mut self, path: &str) {
        self.count += 1;
        self.path_bytes += path.len();
    }

    fn shrink(&mut self, path: &str) {
        self.count -= 1;
        self.path_bytes -= path.len();
    }
}

/// The watches of one connection.
#[derive(Debug, Default)]
struct Owned {
    paths: HashSet<Arc<str>>,
    usage: Usage,
}

#[derive(Debug)]
pub struct Watches<C> {
    by_path: HashMap<Arc<str>, Vec<(C, Modes)>>,
    by_owner: HashMap<C, Owned>,
    usage: Usage,
    /// Number of recursive watches. Without any, ancestors are not searched.
    recursive: usize,
}

impl<C> Default for Watches<C> {
    fn default() -> Self {
        Watches { by_path: HashMap::new(), by_owner: HashMap::new(), usage: Usage::default(), recursive: 0 }
    }
}

impl<C: Copy + Eq + Hash> Watches<C> {
    pub fn add(&mut self, owner: C, path: &str, watch: Watch) {
        let key = match self.by_path.get_key_value(path) {
            Some((key, _)) => key.clone(),
            None => Arc::from(path),
        };
        let watchers = self.by_path.entry(key.clone()).or_default();
        let at = watchers.iter().position(|(watcher, _)| *watcher == owner).unwrap_or_else(|| {
            watchers.push((owner, Modes::default()));
            watchers.len() - 1
        });
        let modes = &mut watchers[at].1;
        match watch {
            Watch::Data => modes.data = true,
            Watch::Child => modes.child = true,
            Watch::Persistent => modes.persistent = true,
            Watch::Recursive => {
                self.recursive += usize::from(!modes.recursive);
                modes.recursive = true;
            }
        }
        let owned = self.by_owner.entry(owner).or_default();
        if owned.paths.insert(key) {
            owned.usage.grow(path);
            self.usage.grow(path);
        }
    }

    /// Returns the number of watched (connection, path) pairs.
    pub fn len(&self) -> usize {
        self.usage.count
    }

    /// Returns the usage of all connections.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    pub fn usage_of(&self, owner: C) -> Usage {
        self.by_owner.get(&owner).map_or_else(Usage::default, |owned| owned.usage)
    }

    /// Returns whether the connection watches the path in any mode.
    pub fn is_watching(&self, owner: C, path: &str) -> bool {
        self.by_owner.get(&owner).is_some_and(|owned| owned.paths.contains(path))
    }

    pub fn is_empty(&self) -> bool {
        self.by_path.is_empty()
    }

    pub fn forget(&mut self, owner: C) {
        let Some(owned) = self.by_owner.remove(&owner) else { return };
        for path in owned.paths {
            self.usage.shrink(&path);
            self.change(owner, &path, |modes| *modes = Modes::default());
        }
    }

    pub fn contains(&self, owner: C, path: &str, kind: WatcherKind) -> bool {
        let modes = self.by_path.get(path).and_then(|watchers| watchers.iter().find(|(c, _)| *c == owner));
        modes.is_some_and(|(_, modes)| match kind {
            WatcherKind::Any => true,
            WatcherKind::Data => modes.data || modes.persistent || modes.recursive,
            WatcherKind::Children => modes.child || modes.persistent || modes.recursive,
        })
    }

    /// Removes watches. Returns false if there was none of this kind.
    pub fn remove(&mut self, owner: C, path: &str, kind: WatcherKind) -> bool {
        if !self.contains(owner, path, kind) {
            return false;
        }
        self.change(owner, path, |modes| match kind {
            WatcherKind::Any => *modes = Modes::default(),
            WatcherKind::Data => *modes = Modes { child: modes.child, ..Modes::default() },
            WatcherKind::Children => *modes = Modes { data: modes.data, ..Modes::default() },
        });
        true
    }

    fn change(&mut self, owner: C, path: &str, f: impl FnOnce(&mut Modes)) {
        let Some(watchers) = self.by_path.get_mut(path) else { return };
        let Some(at) = watchers.iter().position(|(watcher, _)| *watcher == owner) else { return };
        let before = watchers[at].1;
        f(&mut watchers[at].1);
        self.recursive -= usize::from(before.recursive && !watchers[at].1.recursive);
        if watchers[at].1.none() {
            watchers.swap_remove(at);
            if watchers.is_empty() {
                self.by_path.remove(path);
            }
            if let Some(owned) = self.by_owner.get_mut(&owner)
                && owned.paths.remove(path)
            {
                owned.usage.shrink(path);
                self.usage.shrink(path);
            }
        }
    }

    /// Calls `notify` for the watchers of a node that was created, deleted or written, then for the
    /// watchers of its parent's children; once for each connection and event.
    pub fn trigger(&mut self, kind: EventKind, path: &str, notify: &mut impl FnMut(C, EventKind, &str)) {
        if self.by_path.is_empty() {
            return;
        }
        self.notify_watchers(kind, path, notify);
        if kind != EventKind::DataChanged
            && let Some((parent, _)) = path::split(path)
        {
            self.notify_watchers(EventKind::ChildrenChanged, parent, notify);
        }
    }

    fn notify_watchers(&mut self, kind: EventKind, path: &str, notify: &mut impl FnMut(C, EventKind, &str)) {
        let mut spent = Vec::new();
        // Connections that a recursive watch on an ancestor must not notify again.
        let mut notified = HashSet::new();
        if let Some(watchers) = self.by_path.get_mut(path) {
            for (watcher, modes) in watchers {
                let once = match kind {
                    EventKind::Created | EventKind::DataChanged => modes.data,
                    EventKind::ChildrenChanged => modes.child,
                    EventKind::Deleted => modes.data || modes.child,
                };
                let recursive = modes.recursive && kind != EventKind::ChildrenChanged;
                if once || modes.persistent || recursive {
                    if self.recursive > 0 {
                        notified.insert(*watcher);
                    }
                    notify(*watcher, kind, path);
                }
                if once {
                    spent.push(*watcher);
                }
            }
        }
        for watcher in spent {
            self.change(watcher, path, |modes| match kind {
                EventKind::Created | EventKind::DataChanged => modes.data = false,
                EventKind::ChildrenChanged => modes.child = false,
                EventKind::Deleted => (modes.data, modes.child) = (false, false),
            });
        }
        if self.recursive == 0 || kind == EventKind::ChildrenChanged {
            return;
        }
        for above in path::ancestry(path).skip(1) {
            for (watcher, modes) in self.by_path.get(above).into_iter().flatten() {
                if modes.recursive && notified.insert(*watcher) {
                    notify(*watcher, kind, path);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Notified = (u8, EventKind, String);

    fn trigger(watches: &mut Watches<u8>, kind: EventKind, path: &str) -> Vec<Notified> {
        let mut notified = Vec::new();
        watches.trigger(kind, path, &mut |connection, kind, path| {
            notified.push((connection, kind, path.to_owned()));
        });
        notified
    }

    fn notified(connection: u8, kind: EventKind, path: &str) -> Notified {
        (connection, kind, path.to_owned())
    }

    #[test]
    fn plain_watches_fire_once() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Data);
        w.add(1, "/", Watch::Child);
        assert_eq!(
            trigger(&mut w, EventKind::DataChanged, "/a"),
            [notified(1, EventKind::DataChanged, "/a")]
        );
        assert_eq!(trigger(&mut w, EventKind::DataChanged, "/a"), []);
        assert_eq!(trigger(&mut w, EventKind::Created, "/b"), [notified(1, EventKind::ChildrenChanged, "/")]);
        assert!(w.is_empty());
    }

    #[test]
    fn deletion_is_reported_once_to_a_connection_with_several_watches() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Data);
        w.add(1, "/a", Watch::Child);
        w.add(1, "/a", Watch::Persistent);
        w.add(1, "/", Watch::Recursive);
        assert_eq!(trigger(&mut w, EventKind::Deleted, "/a"), [notified(1, EventKind::Deleted, "/a")]);
        assert_eq!(trigger(&mut w, EventKind::Created, "/a"), [notified(1, EventKind::Created, "/a")]);
    }

    #[test]
    fn persistent_watches_remain_and_report_children() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Persistent);
        for _ in 0..2 {
            assert_eq!(
                trigger(&mut w, EventKind::Created, "/a/b"),
                [notified(1, EventKind::ChildrenChanged, "/a")]
            );
            assert_eq!(
                trigger(&mut w, EventKind::DataChanged, "/a"),
                [notified(1, EventKind::DataChanged, "/a")]
            );
        }
        assert_eq!(trigger(&mut w, EventKind::Created, "/a/b/c"), []);
    }

    #[test]
    fn recursive_watches_cover_the_subtree_without_children_changed() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Recursive);
        assert_eq!(
            trigger(&mut w, EventKind::Created, "/a/b/c"),
            [notified(1, EventKind::Created, "/a/b/c")]
        );
        assert_eq!(
            trigger(&mut w, EventKind::DataChanged, "/a"),
            [notified(1, EventKind::DataChanged, "/a")]
        );
        assert_eq!(trigger(&mut w, EventKind::Deleted, "/ab"), []);
    }

    #[test]
    fn removal_is_by_kind_and_reports_absence() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Data);
        assert!(!w.remove(1, "/a", WatcherKind::Children));
        assert!(!w.remove(2, "/a", WatcherKind::Any));
        assert!(w.remove(1, "/a", WatcherKind::Data));
        assert!(w.is_empty());
    }

    #[test]
    fn usage_counts_each_connection_and_path_once() {
        let usage = |count, path_bytes| Usage { count, path_bytes };
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Data);
        w.add(1, "/a", Watch::Child);
        w.add(1, "/long", Watch::Data);
        w.add(2, "/a", Watch::Recursive);
        assert_eq!((w.usage_of(1), w.usage_of(2), w.usage()), (usage(2, 7), usage(1, 2), usage(3, 9)));
        trigger(&mut w, EventKind::DataChanged, "/a");
        assert_eq!(w.usage_of(1), usage(2, 7), "the child watch remains");
        trigger(&mut w, EventKind::Deleted, "/a");
        assert_eq!((w.usage_of(1), w.usage()), (usage(1, 5), usage(2, 7)));
        w.remove(1, "/long", WatcherKind::Any);
        w.forget(2);
        assert_eq!((w.usage_of(1), w.usage(), w.is_watching(1, "/long")), (usage(0, 0), usage(0, 0), false));
    }

    #[test]
    fn watches_are_removed_with_their_connection() {
        let mut w = Watches::default();
        w.add(1, "/a", Watch::Recursive);
        w.add(2, "/a", Watch::Data);
        w.forget(1);
        assert_eq!((w.len(), w.recursive), (1, 0));
        assert_eq!(
            trigger(&mut w, EventKind::DataChanged, "/a"),
            [notified(2, EventKind::DataChanged, "/a")]
        );
    }
}
