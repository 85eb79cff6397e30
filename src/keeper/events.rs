//! Derives events from committed changes, and decides which clients receive them. A client receives
//! an event only if it may read the znode that the event names: the node itself, or the parent if
//! its children changed. For a deleted node its last access list decides. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::acl::{self, Acl, IdentitySet};
use super::path;
use super::state::DeletedNode;
use super::tree::DataTree;
use super::txn::Change;
use super::watch::EventKind;

type List = Arc<Vec<Acl>>;

/// The access lists that decide which clients receive the events of one change.
#[derive(Debug, Clone, Copy)]
pub struct Readers<'a> {
    own: Option<&'a List>,
    parent: Option<&'a List>,
}

impl Readers<'_> {
    pub fn include(&self, kind: EventKind, proved: &IdentitySet) -> bool {
        let list = if kind == EventKind::ChildrenChanged { self.parent } else { self.own };
        list.is_some_and(|list| acl::allows(list, acl::READ, proved))
    }
}

/// Access lists after a transaction: those in the tree, and the last ones of the nodes that it
/// deleted.
#[derive(Debug)]
struct Lists<'a> {
    tree: &'a DataTree,
    deleted: HashMap<&'a str, &'a List>,
}

impl<'a> Lists<'a> {
    fn new(tree: &'a DataTree, deleted: &'a [DeletedNode]) -> Self {
        Lists { tree, deleted: deleted.iter().map(|node| (&*node.path, &node.acl)).collect() }
    }

    fn of(&self, path: &str) -> Option<&'a List> {
        self.tree.get(path).map(|node| &node.acl).or_else(|| self.deleted.get(path).copied())
    }

    fn parent_of(&self, path: &str) -> Option<&'a List> {
        path::split(path).and_then(|(parent, _)| self.of(parent))
    }
}

/// Calls `each` for every event of `changes`, in order. `deleted` holds the nodes that the changes
/// deleted, in the same order.
pub fn of_changes(
    tree: &DataTree,
    changes: &[Change<'_>],
    deleted: &[DeletedNode],
    mut each: impl FnMut(EventKind, &str, Readers<'_>),
) {
    let lists = Lists::new(tree, deleted);
    let mut next_deleted = deleted.iter();
    for change in changes {
        let (kind, path, own) = match change {
            Change::Create { path, acl, .. } => (EventKind::Created, path, Some(acl)),
            Change::Delete { path } => (EventKind::Deleted, path, next_deleted.next().map(|node| &node.acl)),
            Change::SetData { path, .. } => (EventKind::DataChanged, path, None),
            Change::SetAcl { .. } => continue,
        };
        let parent = lists.parent_of(path);
        each(kind, path, Readers { own: own.or_else(|| lists.of(path)), parent });
    }
}

/// Calls `each` for every event of an ended session, whose ephemerals are deleted.
pub fn of_ended(
    tree: &DataTree,
    deleted: &[DeletedNode],
    mut each: impl FnMut(EventKind, &str, Readers<'_>),
) {
    let lists = Lists::new(tree, deleted);
    for node in deleted {
        let parent = lists.parent_of(&node.path);
        each(EventKind::Deleted, &node.path, Readers { own: Some(&node.acl), parent });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::acl::{ALL, Identity, READ};
    use crate::keeper::proto::{CreateMode, Op};
    use crate::keeper::state::{Caller, State, TreeLimits};

    fn list(user: &str) -> Vec<Acl> {
        vec![
            Acl { perms: READ, identity: Identity::new("digest", user) },
            Acl { perms: ALL, identity: Identity::new("digest", "boss:x") },
        ]
    }

    fn create<'a>(path: &'a str, acl: Vec<Acl>, mode: CreateMode) -> Op<'a> {
        Op::Create { path, data: None, acl, mode, sequential: false, wants_stat: false }
    }

    /// Writes `ops` and returns the events that `ann:x` receives. A `ChildrenChanged` event has the
    /// path of the changed child.
    fn seen_by_ann(state: &mut State, ops: &[Op<'_>]) -> Vec<(EventKind, String)> {
        let boss = [Identity::new("digest", "boss:x")].into_iter().collect();
        let written = state.write(Caller { session: 7, proved: &boss }, ops, 1).unwrap();
        let mut seen = Vec::new();
        of_changes(&state.tree, &written.changes, &written.deleted, |kind, path, readers| {
            collect(&mut seen, kind, path, readers);
        });
        seen
    }

    fn collect(seen: &mut Vec<(EventKind, String)>, kind: EventKind, path: &str, readers: Readers<'_>) {
        let ann = [Identity::new("digest", "ann:x")].into_iter().collect();
        if readers.include(kind, &ann) {
            seen.push((kind, path.to_owned()));
        }
        if kind != EventKind::DataChanged && readers.include(EventKind::ChildrenChanged, &ann) {
            seen.push((EventKind::ChildrenChanged, path.to_owned()));
        }
    }

    fn tree() -> State {
        let mut state = State::new(TreeLimits::default());
        let mode = CreateMode::Persistent;
        seen_by_ann(
            &mut state,
            &[create("/open", list("ann:x"), mode), create("/shut", list("eve:x"), mode)],
        );
        state
    }

    #[test]
    fn access_list_of_the_named_node_decides() {
        let mode = CreateMode::Persistent;
        let event = |kind, path: &str| (kind, path.to_owned());
        for (path, acl, expected) in [
            (
                "/open/mine",
                list("ann:x"),
                vec![
                    event(EventKind::Created, "/open/mine"),
                    event(EventKind::ChildrenChanged, "/open/mine"),
                ],
            ),
            ("/open/other", list("eve:x"), vec![event(EventKind::ChildrenChanged, "/open/other")]),
            ("/shut/mine", list("ann:x"), vec![event(EventKind::Created, "/shut/mine")]),
            ("/shut/other", list("eve:x"), vec![]),
        ] {
            assert_eq!(seen_by_ann(&mut tree(), &[create(path, acl, mode)]), expected, "{path}");
        }
        let set = |path| [Op::SetData { path, data: None, version: -1 }];
        assert_eq!(seen_by_ann(&mut tree(), &set("/open")), [event(EventKind::DataChanged, "/open")]);
        assert_eq!(seen_by_ann(&mut tree(), &set("/shut")), []);
    }

    #[test]
    fn deletion_event_goes_to_clients_that_could_read_the_node() {
        let delete = |path| Op::Delete { path, version: -1 };
        let kinds =
            |seen: Vec<(EventKind, String)>| seen.into_iter().map(|(kind, _)| kind).collect::<Vec<_>>();
        let root_is_open = EventKind::ChildrenChanged;
        assert_eq!(kinds(seen_by_ann(&mut tree(), &[delete("/open")])), [EventKind::Deleted, root_is_open]);
        assert_eq!(kinds(seen_by_ann(&mut tree(), &[delete("/shut")])), [root_is_open]);
        // Deleted and created again for another client: the old list decides about the deletion,
        // the new one about the creation.
        let again = [delete("/open"), create("/open", list("eve:x"), CreateMode::Persistent)];
        let seen = kinds(seen_by_ann(&mut tree(), &again));
        assert_eq!(seen, [EventKind::Deleted, root_is_open, root_is_open]);
        // The same transaction deletes the parent: its last list decides about the change of its
        // children.
        let mut state = tree();
        seen_by_ann(&mut state, &[create("/open/x", list("eve:x"), CreateMode::Persistent)]);
        let seen = kinds(seen_by_ann(&mut state, &[delete("/open/x"), delete("/open")]));
        assert_eq!(seen, [EventKind::ChildrenChanged, EventKind::Deleted, root_is_open]);
    }

    #[test]
    fn session_end_events_follow_the_same_rule() {
        let mut state = tree();
        let mode = CreateMode::Ephemeral;
        seen_by_ann(
            &mut state,
            &[create("/open/a", list("eve:x"), mode), create("/shut/a", list("ann:x"), mode)],
        );
        let (_, deleted) = state.close_session(7);
        let mut seen = Vec::new();
        of_ended(&state.tree, &deleted, |kind, path, readers| collect(&mut seen, kind, path, readers));
        assert_eq!(
            seen,
            [(EventKind::ChildrenChanged, "/open/a".to_owned()), (EventKind::Deleted, "/shut/a".to_owned())]
        );
    }
}
