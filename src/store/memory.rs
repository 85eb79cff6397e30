//! A [`Tree`] in memory, over the keeper's own state machine: the same rights, versions, multis and
//! watches as over the wire. For tests and simulation: on demand it loses answers, connections and
//! sessions, shows a session an old state, and restores a backup. It has no clock and no randomness
//! of its own.

use super::acl::Acl;
use super::credentials::Credential;
use super::paths::NodePath;
use super::tree::{Answer, Error, Event, Feed, Node, Read, Stat, Tree, Write};
#[cfg(test)]
use super::{Bootstrap, Environment, records::Placement};
use crate::keeper::acl as wire;
use crate::keeper::events::{self, Readers};
use crate::keeper::proto::{Code, CreateMode, Op};
use crate::keeper::state::{Caller, State};
use crate::keeper::tree::Node as StoredNode;
use crate::keeper::watch::{EventKind, Watch, Watches};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// The name of the hosts in messages.
const HOSTS: &str = "memory";

/// A store that several identities can connect to. Clones are the same store.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    world: Arc<Mutex<World>>,
}

#[derive(Debug, Default)]
struct World {
    state: State,
    last_session: i64,
    last_feed: u64,
    watches: Watches<u64>,
    /// In order, so that the same calls wake the same tasks in the same order.
    feeds: BTreeMap<u64, Watcher>,
    clients: BTreeMap<i64, Client>,
    /// The faults of the next writes.
    faults: VecDeque<Fault>,
}

#[derive(Debug)]
struct Watcher {
    client: i64,
    proved: Proved,
    sender: mpsc::UnboundedSender<Event>,
}

/// One connected client. Its key is the id of its first session.
#[derive(Debug)]
struct Client {
    /// The current session.
    session: i64,
    /// The old state that it reads while its server lags behind the others.
    past: Option<State>,
    /// Events that its server has not sent yet.
    held: Vec<(u64, Event)>,
}

/// All znodes at one time.
#[derive(Debug, Clone)]
pub struct Backup(State);

/// When the answer to a write is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Before the write was applied.
    LostBefore,
    /// After the write was applied.
    LostAfter,
}

impl MemoryStore {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store with the content of a backup.
    pub fn from_backup(backup: &Backup) -> Self {
        let store = Self::default();
        store.restore(backup);
        store
    }

    /// A session with one identity, or with none.
    pub fn connect(&self, credential: Option<&Credential>) -> MemoryTree {
        let mut world = self.world();
        world.last_session += 1;
        let client = world.last_session;
        world.clients.insert(client, Client { session: client, past: None, held: Vec::new() });
        let proved = credential
            .map(|credential| wire::Identity::new("digest", credential.identity().as_str()))
            .into_iter()
            .collect();
        MemoryTree {
            session: Arc::new(Session { client, proved: Arc::new(Mutex::new(proved)), store: self.clone() }),
        }
    }

    pub fn backup(&self) -> Backup {
        Backup(self.world().state.clone())
    }

    /// Restores a backup and ends all sessions.
    pub fn restore(&self, backup: &Backup) {
        let mut world = self.world();
        world.state = backup.0.clone();
        for session in backup.0.tree.ephemeral_owners() {
            world.state.close_session(session);
        }
        let clients: Vec<i64> = world.clients.keys().copied().collect();
        for client in clients {
            world.new_session(client);
        }
    }

    /// Makes the next writes of any client lose their answers in this order.
    pub fn lose_answers(&self, faults: impl IntoIterator<Item = Fault>) {
        self.world().faults.extend(faults);
    }

    /// Interrupts every connection: feeds may have missed events.
    pub fn interrupt(&self) {
        for feed in self.world().feeds.values() {
            // The feed may have been dropped.
            let _ = feed.sender.send(Event::Everything);
        }
    }

    /// Expires a session: its ephemerals are deleted, and a new session replaces it.
    pub fn expire(&self, tree: &MemoryTree) {
        self.world().new_session(tree.session.client);
    }
}

impl World {
    /// Sends an event to the feeds whose client may read the node.
    fn notify(
        watches: &mut Watches<u64>,
        feeds: &BTreeMap<u64, Watcher>,
        clients: &mut BTreeMap<i64, Client>,
        (kind, path, readers): (EventKind, &str, Readers<'_>),
    ) {
        watches.trigger(kind, path, &mut |feed, kind, path| {
            let Some(watcher) = feeds.get(&feed) else { return };
            if !readers.include(kind, &known(&watcher.proved)) {
                return;
            }
            let event = Event::Changed(NodePath::reported(path));
            match clients.get_mut(&watcher.client).filter(|client| client.past.is_some()) {
                Some(client) => client.held.push((feed, event)),
                // The feed may have been dropped.
                None => _ = watcher.sender.send(event),
            }
        });
    }

    /// Brings the client's server up to date. Its events come before its next answer.
    fn catch_up(&mut self, client: i64) {
        let Some(client) = self.clients.get_mut(&client).filter(|client| client.past.is_some()) else {
            return;
        };
        client.past = None;
        for (feed, event) in std::mem::take(&mut client.held) {
            if let Some(watcher) = self.feeds.get(&feed) {
                let _ = watcher.sender.send(event);
            }
        }
    }

    /// Replaces the client's ended session.
    fn new_session(&mut self, key: i64) {
        self.last_session += 1;
        let session = self.last_session;
        let Some(client) = self.clients.get_mut(&key) else { return };
        let ended = std::mem::replace(client, Client { session, past: None, held: Vec::new() });
        self.end(ended.session);
        for watcher in self.feeds.values().filter(|watcher| watcher.client == key) {
            let _ = watcher.sender.send(Event::Everything);
        }
    }

    fn end(&mut self, session: i64) {
        let (_, gone) = self.state.close_session(session);
        let Self { state, watches, feeds, clients, .. } = self;
        events::of_ended(&state.tree, &gone, |kind, path, readers| {
            Self::notify(watches, feeds, clients, (kind, path, readers));
        });
    }

    fn session_of(&self, session: &Session) -> i64 {
        self.clients.get(&session.client).map_or(session.client, |client| client.session)
    }

    /// The state as the server of this session has it.
    fn seen_by(&self, session: &Session) -> &State {
        self.clients.get(&session.client).and_then(|client| client.past.as_ref()).unwrap_or(&self.state)
    }

    fn node(&self, session: &Session, path: &NodePath) -> Result<&StoredNode, Error> {
        let seen = &self.seen_by(session).tree;
        let node = seen.get(path.as_str()).ok_or_else(|| Error::NoNode(path.clone()))?;
        if wire::allows(&node.acl, wire::READ, &session.proved()) {
            Ok(node)
        } else {
            Err(Error::NoAuth(path.clone()))
        }
    }
}

/// One session. Clones share it; dropping the last one ends it and deletes its ephemerals.
#[derive(Debug, Clone)]
pub struct MemoryTree {
    session: Arc<Session>,
}

#[derive(Debug)]
struct Session {
    client: i64,
    proved: Proved,
    store: MemoryStore,
}

/// The identities of a session, shared with its feeds: the right to read a node is checked for each
/// event.
type Proved = Arc<Mutex<wire::IdentitySet>>;

fn known(proved: &Proved) -> MutexGuard<'_, wire::IdentitySet> {
    proved.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn proved(&self) -> MutexGuard<'_, wire::IdentitySet> {
        known(&self.proved)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut world = self.store.world();
        if let Some(client) = world.clients.remove(&self.client) {
            world.end(client.session);
        }
    }
}

impl MemoryTree {
    fn world(&self) -> MutexGuard<'_, World> {
        self.session.store.world()
    }

    /// Connects the session to a server with the state `past`, until it syncs or writes.
    pub fn fall_behind(&self, past: &Backup) {
        if let Some(client) = self.world().clients.get_mut(&self.session.client) {
            client.past = Some(past.0.clone());
        }
    }

    fn apply(&self, ops: &[Op<'_>], path_of: impl Fn(usize) -> NodePath) -> Result<(), Error> {
        let mut world = self.world();
        let fault = world.faults.pop_front();
        let lost = || Error::Ambiguous { hosts: HOSTS.to_owned() };
        if fault == Some(Fault::LostBefore) {
            return Err(lost());
        }
        let proved = self.session.proved().clone();
        let caller = Caller { session: world.session_of(&self.session), proved: &proved };
        let result = world.state.write(caller, ops, 0);
        if let Ok(written) = &result {
            let World { state, watches, feeds, clients, .. } = &mut *world;
            events::of_changes(&state.tree, &written.changes, &written.deleted, |kind, path, readers| {
                World::notify(watches, feeds, clients, (kind, path, readers));
            });
        }
        if fault.is_some() {
            return Err(lost());
        }
        world.catch_up(self.session.client);
        result.map(drop).map_err(|refusal| refusal_of(refusal.code, path_of(refusal.index)))
    }
}

fn refusal_of(code: Code, path: NodePath) -> Error {
    match code {
        Code::NoNode => Error::NoNode(path),
        Code::NodeExists => Error::NodeExists(path),
        Code::BadVersion => Error::BadVersion(path),
        Code::NotEmpty => Error::NotEmpty(path),
        Code::NoAuth => Error::NoAuth(path),
        other => Error::Unexpected { hosts: HOSTS.to_owned(), what: format!("{path}: {other:?}") },
    }
}

fn acl_of(acl: &Acl) -> Vec<wire::Acl> {
    let granted = acl.grants().iter().map(|(identity, rights)| wire::Acl {
        perms: i32::from(rights.bits()),
        identity: wire::Identity::new("digest", identity.as_str()),
    });
    let public = || wire::Acl { perms: wire::READ, identity: wire::Identity::new("world", "anyone") };
    granted.chain(acl.is_public().then(public)).collect()
}

fn op_of(write: &Write) -> Op<'_> {
    let path = write.path().as_str();
    match write {
        Write::Create { data, acl, ephemeral, .. } => Op::Create {
            path,
            data: Some(data),
            acl: acl_of(acl),
            mode: if *ephemeral { CreateMode::Ephemeral } else { CreateMode::Persistent },
            sequential: false,
            wants_stat: false,
        },
        Write::SetIfVersion { data, version, .. } => {
            Op::SetData { path, data: Some(data), version: *version }
        }
        Write::DeleteIfVersion { version, .. } => Op::Delete { path, version: *version },
        Write::Delete { .. } => Op::Delete { path, version: -1 },
        Write::Check { version, .. } => Op::Check { path, version: *version },
    }
}

fn node_of(node: &StoredNode) -> Node {
    Node {
        data: node.data.as_deref().unwrap_or_default().to_vec(),
        version: node.version,
        modified: node.mzxid,
        children_modified: node.pzxid,
        children: u32::try_from(node.child_count()).unwrap_or(u32::MAX),
    }
}

fn children_of(node: &StoredNode) -> Vec<String> {
    node.children().map(str::to_owned).collect()
}

fn absent<V>(result: Result<V, Error>) -> Result<Option<V>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::NoNode(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

impl Tree for MemoryTree {
    type Feed = MemoryFeed;

    async fn get(&self, path: &NodePath) -> Result<Node, Error> {
        self.world().node(&self.session, path).map(node_of)
    }

    async fn stat(&self, path: &NodePath) -> Result<Option<Stat>, Error> {
        let world = self.world();
        let node = world.seen_by(&self.session).tree.get(path.as_str());
        Ok(node.map(|node| node_of(node).stat()))
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, Error> {
        self.world().node(&self.session, path).map(children_of)
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, Error>>, Error> {
        let world = self.world();
        let answer = |read: &Read| match read {
            Read::Data(path) => absent(world.node(&self.session, path).map(node_of)).map(Answer::Data),
            Read::Children(path) => {
                absent(world.node(&self.session, path).map(children_of)).map(Answer::Children)
            }
        };
        // `node` refuses for missing rights only.
        Ok(reads.iter().map(answer).collect())
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), Error> {
        super::tree::check_size(&writes)?;
        let ops: Vec<Op<'_>> = writes.iter().map(op_of).collect();
        self.apply(&ops, |index| writes[index].path().clone())
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), Error> {
        let op = Op::SetAcl { path: path.as_str(), acl: acl_of(&acl), version: -1 };
        self.apply(&[op], |_| path.clone())
    }

    async fn prove(&self, credential: &Credential) -> Result<(), Error> {
        let identity = wire::Identity::new("digest", credential.identity().as_str());
        self.session.proved().insert(identity);
        Ok(())
    }

    async fn sync(&self) -> Result<(), Error> {
        self.world().catch_up(self.session.client);
        Ok(())
    }

    async fn watch(&self, path: &NodePath) -> Result<MemoryFeed, Error> {
        let (sender, events) = mpsc::unbounded_channel();
        let mut world = self.world();
        match world.node(&self.session, path) {
            Err(Error::NoNode(_)) => {}
            refused => _ = refused?,
        }
        world.last_feed += 1;
        let id = world.last_feed;
        world.watches.add(id, path.as_str(), Watch::Recursive);
        // The receiver is alive.
        let _ = sender.send(Event::Everything);
        let proved = self.session.proved.clone();
        world.feeds.insert(id, Watcher { client: self.session.client, proved, sender });
        Ok(MemoryFeed { id, events, tree: self.clone() })
    }
}

/// A watch in memory.
#[derive(Debug)]
pub struct MemoryFeed {
    id: u64,
    events: mpsc::UnboundedReceiver<Event>,
    tree: MemoryTree,
}

impl Feed for MemoryFeed {
    async fn next(&mut self) -> Result<Event, Error> {
        // The sender lives as long as the feed.
        self.events.recv().await.ok_or_else(|| Error::Expired { hosts: HOSTS.to_owned() })
    }
}

impl Drop for MemoryFeed {
    fn drop(&mut self) {
        let mut world = self.tree.world();
        world.watches.forget(self.id);
        world.feeds.remove(&self.id);
    }
}

#[cfg(test)]
impl MemoryStore {
    /// Returns a store with an environment, as its operator, and the credential of its controller.
    pub(crate) async fn bootstrapped(placement: Placement) -> (Self, Environment<MemoryTree>, Credential) {
        let store = Self::default();
        let [operator, controller] =
            ["operator", "controller"].map(|user| Credential::generate(user).unwrap());
        let wanted = Bootstrap {
            environment: "test".parse().unwrap(),
            placement,
            operator: operator.identity(),
            controller: controller.identity(),
        };
        let environment = Environment::bootstrap(store.connect(Some(&operator)), &wanted).await.unwrap();
        (store, environment, controller)
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
