//! A [`Tree`] over the wire, for the embedded keeper and for a ZooKeeper ensemble. The only user of
//! the client library. It adds what the library lacks: every wait is limited, no request is queued
//! for an unreachable store, and ended sessions are replaced. Reads are repeated after a lost
//! connection; writes never are, because a lost answer does not tell whether a write was applied.
//! The callers decide about that.

mod acls;
mod batch;
mod keeper_root;
mod tls;

use acls::to_acls;
use batch::ask_all;

use super::acl::Acl;
use super::address::Address;
use super::credentials::Credential;
use super::paths::NodePath;
use super::tree::{Answer, Error, Event, Feed, Node, Read, Stat, Tree, Write, check_size};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use zookeeper_client as zk;

/// How long to try the first connection: longer than a restart of the store.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long one request may take, waiting for a connection included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// The requested session timeout; a lost connection is detected within a fifth of it.
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection without an answer for this long is closed and made again. A store process that ends
/// closes its connections at once, also on loopback, so a shorter limit would only cause reconnects
/// on a busy machine: each reconnect sets every watch and reads everything again. The client pings
/// at three eighths of this.
const SILENCE: Duration = Duration::from_secs(2);

const CONNECT_PAUSE: Duration = Duration::from_millis(100);
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
const WATCH_PAUSE: Duration = Duration::from_millis(250);

/// A connection to a store. Clones share it.
#[derive(Debug, Clone)]
pub struct ZkTree {
    link: Arc<Link>,
    /// The deadline of all requests.
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Link {
    address: Address,
    hosts: String,
    tls: Option<tls::Options>,
    /// All proved identities, for later sessions. Never locked across an await.
    credentials: Mutex<Vec<Credential>>,
    /// Replaced when its session has ended. Never locked across an await.
    client: Mutex<Option<zk::Client>>,
}

impl ZkTree {
    /// Connects within a few seconds.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if nothing answers.
    pub async fn connect(address: &Address, credential: Option<&Credential>) -> Result<Self, Error> {
        let tls = address.is_tls().then(|| tls::Options::of(address)).transpose()?;
        let link = Link {
            address: address.clone(),
            hosts: address.hosts(),
            tls,
            credentials: Mutex::new(credential.cloned().into_iter().collect()),
            client: Mutex::new(None),
        };
        link.reconnect(Instant::now() + CONNECT_TIMEOUT).await?;
        Ok(Self { link: Arc::new(link), deadline: None })
    }

    /// The same connection with a deadline for all requests.
    #[must_use]
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    pub fn hosts(&self) -> &str {
        &self.link.hosts
    }

    /// Ends the session, so that the store does not wait for it to expire.
    pub async fn close(self) {
        let Some(client) = self.link.slot().take() else { return };
        let mut state = client.state_watcher();
        drop(client);
        let closed = async {
            while !state.state().is_terminated() {
                state.changed().await;
            }
        };
        // A store that does not answer expires the session by itself.
        let _ = timeout_at(Instant::now() + CLOSE_TIMEOUT, closed).await;
    }

    fn request_deadline(&self) -> Instant {
        let usual = Instant::now() + REQUEST_TIMEOUT;
        self.deadline.map_or(usual, |deadline| deadline.min(usual))
    }

    /// Runs a read, again after a lost connection, until it is answered or the deadline passes.
    async fn read<V, F>(&self, path: &NodePath, ask: impl Fn(zk::Client) -> F) -> Result<V, Error>
    where
        F: Future<Output = Result<V, zk::Error>> + Send,
        V: Send,
    {
        let deadline = self.request_deadline();
        loop {
            let client = self.link.ready(deadline).await?;
            let state = client.state_watcher();
            match timeout_at(deadline, ask(client)).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(e)) => match self.link.refusal(&e, path) {
                    Some(refusal) => return Err(refusal),
                    None => sleep(Duration::from_millis(10)).await,
                },
                // The request was queued as the connection was lost.
                Err(_) if state.peek_state() == zk::SessionState::Disconnected => {
                    return Err(self.link.unreachable());
                }
                Err(_) => return Err(self.link.timeout()),
            }
        }
    }
}

impl Link {
    fn slot(&self) -> std::sync::MutexGuard<'_, Option<zk::Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn identities(&self) -> std::sync::MutexGuard<'_, Vec<Credential>> {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn full_path(&self, path: &NodePath) -> String {
        match (self.address.chroot(), path.as_str()) {
            ("", path) => path.to_owned(),
            (chroot, "/") => chroot.to_owned(),
            (chroot, path) => format!("{chroot}{path}"),
        }
    }

    fn own_path(&self, full: &str) -> NodePath {
        match full.strip_prefix(self.address.chroot()) {
            Some("") | None => NodePath::reported("/"),
            Some(path) => NodePath::reported(path),
        }
    }

    fn connector(&self) -> zk::Connector {
        let connector = zk::Client::connector()
            .with_session_timeout(SESSION_TIMEOUT)
            .with_connection_timeout(SILENCE)
            .with_fail_eagerly();
        let connector = match &self.tls {
            Some(tls) => connector.with_tls(tls.of_client()),
            None => connector,
        };
        self.identities().iter().fold(connector, |connector, credential| {
            connector.with_auth("digest", credential.expose().as_bytes())
        })
    }

    /// Opens a new session, unless another task did meanwhile.
    async fn reconnect(&self, deadline: Instant) -> Result<zk::Client, Error> {
        let servers = self.servers();
        loop {
            match timeout_at(deadline, self.connector().connect(&servers)).await {
                Ok(Ok(client)) => {
                    let mut slot = self.slot();
                    return match slot.as_ref() {
                        Some(other) if !other.state().is_terminated() => Ok(other.clone()),
                        _ => Ok(slot.insert(client).clone()),
                    };
                }
                Ok(Err(zk::Error::AuthFailed)) => {
                    return Err(Error::AuthFailed { hosts: self.hosts.clone() });
                }
                Ok(Err(_)) if Instant::now() + CONNECT_PAUSE < deadline => sleep(CONNECT_PAUSE).await,
                // The client library reports every failed connection alike.
                Ok(Err(_)) | Err(_) => return Err(self.why_unreachable().await),
            }
        }
    }

    /// Waits for a connected client. Waiting here, not in the client's own queue, keeps a write
    /// from being sent after its caller got an error.
    async fn ready(&self, deadline: Instant) -> Result<zk::Client, Error> {
        loop {
            let live = self.slot().as_ref().filter(|client| !client.state().is_terminated()).cloned();
            let client = match live {
                Some(client) => client,
                None => self.reconnect(deadline).await?,
            };
            let mut state = client.state_watcher();
            while state.state() == zk::SessionState::Disconnected {
                timeout_at(deadline, state.changed()).await.map_err(|_| self.unreachable())?;
            }
            match state.state() {
                zk::SessionState::AuthFailed => return Err(Error::AuthFailed { hosts: self.hosts.clone() }),
                ended if ended.is_terminated() => {}
                _ => return Ok(client),
            }
        }
    }

    /// The connect string of the client library.
    fn servers(&self) -> String {
        let scheme = if self.tls.is_some() { "tcp+tls://" } else { "" };
        let hosts: Vec<String> = self.hosts.split(',').map(|host| format!("{scheme}{host}")).collect();
        hosts.join(",")
    }

    async fn why_unreachable(&self) -> Error {
        let reason = match &self.tls {
            Some(tls) => tls.failure(&self.hosts).await,
            None => tls::plain_failure(&self.hosts).await,
        };
        reason.unwrap_or_else(|| self.unreachable())
    }

    fn unreachable(&self) -> Error {
        Error::Unreachable { hosts: self.hosts.clone() }
    }

    fn timeout(&self) -> Error {
        Error::Timeout { hosts: self.hosts.clone(), seconds: REQUEST_TIMEOUT.as_secs() }
    }

    /// The store's refusal. `None` if the answer was lost.
    fn refusal(&self, error: &zk::Error, path: &NodePath) -> Option<Error> {
        let path = path.clone();
        Some(match error {
            zk::Error::NoNode => Error::NoNode(path),
            zk::Error::NodeExists => Error::NodeExists(path),
            zk::Error::BadVersion => Error::BadVersion(path),
            zk::Error::NotEmpty => Error::NotEmpty(path),
            zk::Error::NoAuth => Error::NoAuth(path),
            zk::Error::AuthFailed => Error::AuthFailed { hosts: self.hosts.clone() },
            zk::Error::QuotaExceeded => Error::Full { path, hosts: self.hosts.clone() },
            zk::Error::ConnectionLoss
            | zk::Error::Custom(_)
            | zk::Error::Timeout
            | zk::Error::SessionExpired
            | zk::Error::SessionMoved
            | zk::Error::ClientClosed => return None,
            other => Error::Unexpected { hosts: self.hosts.clone(), what: format!("{path}: {other}") },
        })
    }

    fn answer(&self, read: Read, result: zk::MultiReadResult) -> Result<Answer, Error> {
        match (read, result) {
            (Read::Data(_), zk::MultiReadResult::Data { data, stat }) => {
                Ok(Answer::Data(Some(node(data, &stat))))
            }
            (Read::Children(_), zk::MultiReadResult::Children { children }) => {
                Ok(Answer::Children(Some(sorted(children))))
            }
            (Read::Data(_), zk::MultiReadResult::Error { err: zk::Error::NoNode }) => Ok(Answer::Data(None)),
            (Read::Children(_), zk::MultiReadResult::Error { err: zk::Error::NoNode }) => {
                Ok(Answer::Children(None))
            }
            (Read::Data(path) | Read::Children(path), zk::MultiReadResult::Error { err }) => {
                Err(self.refusal(&err, &path).unwrap_or_else(|| self.unexpected(&path)))
            }
            (Read::Data(path) | Read::Children(path), _) => Err(self.unexpected(&path)),
        }
    }

    fn unexpected(&self, path: &NodePath) -> Error {
        Error::Unexpected {
            hosts: self.hosts.clone(),
            what: format!("{path}: an answer to another question"),
        }
    }
}

/// An unreadable znode fails alone; every other failure fails all reads.
fn refused_alone(answer: Result<Answer, Error>) -> Result<Result<Answer, Error>, Error> {
    match answer {
        Ok(_) | Err(Error::NoAuth(_)) => Ok(answer),
        Err(other) => Err(other),
    }
}

fn node(data: Vec<u8>, stat: &zk::Stat) -> Node {
    let children = u32::try_from(stat.num_children).unwrap_or(0);
    Node { data, version: stat.version, modified: stat.mzxid, children_modified: stat.pzxid, children }
}

fn stat_of(stat: &zk::Stat) -> Stat {
    Stat { version: stat.version, modified: stat.mzxid, children_modified: stat.pzxid }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort_unstable();
    names
}

impl Link {
    fn add(&self, writer: &mut zk::MultiWriter<'_>, write: &Write) -> Result<(), zk::Error> {
        let path = self.full_path(write.path());
        match write {
            Write::Create { data, acl, ephemeral, .. } => {
                let acls = to_acls(acl);
                let mode = if *ephemeral { zk::CreateMode::Ephemeral } else { zk::CreateMode::Persistent };
                writer.add_create(&path, data, &mode.with_acls(zk::Acls::new(&acls)))
            }
            Write::SetIfVersion { data, version, .. } => writer.add_set_data(&path, data, Some(*version)),
            Write::DeleteIfVersion { version, .. } => writer.add_delete(&path, Some(*version)),
            Write::Delete { .. } => writer.add_delete(&path, None),
            Write::Check { version, .. } => writer.add_check_version(&path, *version),
        }
    }
}

impl Tree for ZkTree {
    type Feed = ZkFeed;

    async fn get(&self, path: &NodePath) -> Result<Node, Error> {
        let full = self.link.full_path(path);
        let (data, stat) = self.read(path, |client| client.get_data(&full)).await?;
        Ok(node(data, &stat))
    }

    async fn stat(&self, path: &NodePath) -> Result<Option<Stat>, Error> {
        let full = self.link.full_path(path);
        Ok(self.read(path, |client| client.check_stat(&full)).await?.as_ref().map(stat_of))
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, Error> {
        let full = self.link.full_path(path);
        let (names, _) = self.read(path, |client| client.get_children(&full)).await?;
        Ok(sorted(names))
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, Error>>, Error> {
        let Some(first) = reads.first() else { return Ok(Vec::new()) };
        let (Read::Data(path) | Read::Children(path)) = first;
        let questions: Vec<(bool, String)> = reads
            .iter()
            .map(|read| match read {
                Read::Data(path) => (true, self.link.full_path(path)),
                Read::Children(path) => (false, self.link.full_path(path)),
            })
            .collect();
        let results = self.read(path, |client| ask_all(client, &questions)).await?;
        if results.len() != reads.len() {
            return Err(self.link.unexpected(path));
        }
        let answers = reads.into_iter().zip(results).map(|(read, result)| self.link.answer(read, result));
        answers.map(refused_alone).collect()
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), Error> {
        check_size(&writes)?;
        let deadline = self.request_deadline();
        let client = self.link.ready(deadline).await?;
        let mut writer = client.new_multi_writer();
        for write in &writes {
            self.link.add(&mut writer, write).map_err(|e| Error::Unexpected {
                hosts: self.link.hosts.clone(),
                what: format!("{}: {e}", write.path()),
            })?;
        }
        let ambiguous = || Error::Ambiguous { hosts: self.link.hosts.clone() };
        let result = timeout_at(deadline, writer.commit()).await.map_err(|_| ambiguous())?;
        match result {
            Ok(_) => Ok(()),
            Err(zk::MultiWriteError::OperationFailed { index, source }) => {
                let path = writes.get(index).map_or_else(super::paths::root, |write| write.path().clone());
                Err(self.link.refusal(&source, &path).unwrap_or_else(ambiguous))
            }
            Err(zk::MultiWriteError::RequestFailed { source }) => {
                match self.link.refusal(&source, writes[0].path()) {
                    Some(refusal) if !matches!(refusal, Error::Unexpected { .. }) => Err(refusal),
                    _ => Err(ambiguous()),
                }
            }
        }
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), Error> {
        let deadline = self.request_deadline();
        let client = self.link.ready(deadline).await?;
        let full = self.link.full_path(path);
        let acls = to_acls(&acl);
        // The root of this statement is a future, so the request is bounded like any other.
        let result = timeout_at(deadline, client.set_acl(&full, &acls, None)).await;
        let ambiguous = || Error::Ambiguous { hosts: self.link.hosts.clone() };
        match result {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(self.link.refusal(&e, path).unwrap_or_else(ambiguous)),
            Err(_) => Err(ambiguous()),
        }
    }

    async fn prove(&self, credential: &Credential) -> Result<(), Error> {
        {
            let mut known = self.link.identities();
            if known.contains(credential) {
                return Ok(());
            }
            // Added first, so that a session that is opened meanwhile has it, too.
            known.push(credential.clone());
        }
        let (auth, root) = (credential.expose(), super::paths::root());
        let proved = self
            .read(&root, |client| {
                let auth = auth.clone();
                async move { client.auth("digest", auth.as_bytes()).await }
            })
            .await;
        if proved.is_err() {
            self.link.identities().retain(|known| known != credential);
        }
        proved
    }

    async fn sync(&self) -> Result<(), Error> {
        let root = super::paths::root();
        let full = self.link.full_path(&root);
        self.read(&root, |client| {
            let full = full.clone();
            async move { client.sync(&full).await }
        })
        .await
    }

    async fn watch(&self, path: &NodePath) -> Result<ZkFeed, Error> {
        let mut feed = ZkFeed { tree: self.clone(), path: path.clone(), watcher: None, announced: false };
        feed.watcher = Some(feed.start().await?);
        Ok(feed)
    }
}

/// A watch that is set again after every reconnect and in every new session, because the client
/// library does not do that.
#[derive(Debug)]
pub struct ZkFeed {
    tree: ZkTree,
    path: NodePath,
    watcher: Option<zk::PersistentWatcher>,
    /// Whether [`Event::Everything`] was returned since the watch was set.
    announced: bool,
}

impl ZkFeed {
    async fn start(&self) -> Result<zk::PersistentWatcher, Error> {
        let full = self.tree.link.full_path(&self.path);
        self.tree
            .read(&self.path, |client| {
                let full = full.clone();
                async move { client.watch(&full, zk::AddWatchMode::PersistentRecursive).await }
            })
            .await
    }
}

impl Feed for ZkFeed {
    async fn next(&mut self) -> Result<Event, Error> {
        loop {
            let Some(watcher) = &mut self.watcher else {
                match self.start().await {
                    Ok(watcher) => self.watcher = Some(watcher),
                    Err(e) if e.is_transient() => sleep(WATCH_PAUSE).await,
                    Err(e) => return Err(e),
                }
                self.announced = false;
                continue;
            };
            if !self.announced {
                self.announced = true;
                return Ok(Event::Everything);
            }
            let event = watcher.changed().await;
            if event.event_type != zk::EventType::Session {
                return Ok(Event::Changed(self.tree.link.own_path(&event.path)));
            }
            // Lost: wait for the connection. Connected again, or session ended: set the watch
            // again.
            if event.session_state != zk::SessionState::Disconnected {
                self.watcher = None;
            }
        }
    }
}
