//! The interface of a store of znodes: a handful of operations and their errors. No path is built
//! and nothing is decided here; retries and meaning belong to the typed operations.

use super::acl::Acl;
use super::credentials::Credential;
use super::paths::NodePath;
use crate::net::tls::probe::HandshakeFailure;
use std::future::Future;

/// ZooKeeper closes a connection that sends more than 1,048,575 bytes at once; this leaves space
/// for framing.
const MAX_WRITE: usize = 1_000_000;
const MAX_DATA: usize = 64 * 1024;

/// A znode as read: its bytes, and the version that a compare-and-swap must name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub data: Vec<u8>,
    pub version: i32,
    /// The zxid of the transaction that created the znode or last changed its data.
    pub modified: i64,
    /// The zxid of the transaction that created the znode or last added or removed a child.
    pub children_modified: i64,
    /// The number of its children.
    pub children: u32,
}

/// The metadata of a znode that can be read without any right on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// How often the data was changed.
    pub version: i32,
    /// As in [`Node`].
    pub modified: i64,
    /// As in [`Node`].
    pub children_modified: i64,
}

impl Node {
    pub fn stat(&self) -> Stat {
        Stat { version: self.version, modified: self.modified, children_modified: self.children_modified }
    }
}

/// One request of a batched read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    Data(NodePath),
    Children(NodePath),
}

/// The answer to one [`Read`]; `None` for an absent znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Data(Option<Node>),
    Children(Option<Vec<String>>),
}

impl Answer {
    /// The node of a [`Read::Data`]; `None` for an absent node.
    pub fn into_data(self) -> Option<Node> {
        match self {
            Self::Data(node) => node,
            Self::Children(_) => None,
        }
    }

    /// The names of a [`Read::Children`]; `None` for an absent node.
    pub fn into_children(self) -> Option<Vec<String>> {
        match self {
            Self::Children(names) => names,
            Self::Data(_) => None,
        }
    }
}

/// One step of an atomic write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Creating the root creates the chroot itself.
    Create {
        path: NodePath,
        data: Vec<u8>,
        acl: Acl,
        ephemeral: bool,
    },
    SetIfVersion {
        path: NodePath,
        data: Vec<u8>,
        version: i32,
    },
    DeleteIfVersion {
        path: NodePath,
        version: i32,
    },
    /// At any version: for a znode that may be deleted but not read.
    Delete {
        path: NodePath,
    },
    Check {
        path: NodePath,
        version: i32,
    },
}

impl Write {
    /// Creates a persistent znode.
    pub fn create(path: NodePath, data: impl Into<Vec<u8>>, acl: Acl) -> Self {
        Self::Create { path, data: data.into(), acl, ephemeral: false }
    }

    pub fn path(&self) -> &NodePath {
        match self {
            Self::Create { path, .. }
            | Self::SetIfVersion { path, .. }
            | Self::DeleteIfVersion { path, .. }
            | Self::Delete { path }
            | Self::Check { path, .. } => path,
        }
    }
}

/// Refuses writes for which the store would close the connection.
pub(super) fn check_size(writes: &[Write]) -> Result<(), Error> {
    let mut total = 0;
    for write in writes {
        let (bytes, grants) = match write {
            Write::Create { data, acl, .. } => (data.len(), acl.grants().len()),
            Write::SetIfVersion { data, .. } => (data.len(), 0),
            Write::DeleteIfVersion { .. } | Write::Delete { .. } | Write::Check { .. } => (0, 0),
        };
        if bytes > MAX_DATA {
            return Err(Error::TooLarge { path: write.path().clone(), bytes, limit: MAX_DATA });
        }
        total += bytes + write.path().as_str().len() + grants * 80 + 64;
        if total > MAX_WRITE {
            return Err(Error::TooLarge { path: write.path().clone(), bytes: total, limit: MAX_WRITE });
        }
    }
    Ok(())
}

/// An event of a feed. It names the znode to read again, never its new content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Changed(NodePath),
    /// Events may have been missed (first event, reconnect, new session): read everything again.
    Everything,
}

/// A watch of a part of the tree, until it is dropped.
pub trait Feed: Send {
    /// Waits for the next event. Cancel-safe. The first is always [`Event::Everything`].
    ///
    /// # Errors
    /// Failures that do not pass, for example wrong credentials. The feed waits for a lost store.
    fn next(&mut self) -> impl Future<Output = Result<Event, Error>> + Send;
}

/// A store of znodes. Every call ends within a limited time, also if the store is lost.
pub trait Tree: Send + Sync {
    type Feed: Feed;

    /// # Errors
    /// [`Error::NoNode`] and the failures of the store.
    fn get(&self, path: &NodePath) -> impl Future<Output = Result<Node, Error>> + Send;

    /// The znode, `None` if it is absent.
    fn find(&self, path: &NodePath) -> impl Future<Output = Result<Option<Node>, Error>> + Send {
        async move {
            match self.get(path).await {
                Ok(node) => Ok(Some(node)),
                Err(Error::NoNode(_)) => Ok(None),
                Err(err) => Err(err),
            }
        }
    }

    /// The metadata of a znode; `None` if it is absent. Needs no right on it.
    fn stat(&self, path: &NodePath) -> impl Future<Output = Result<Option<Stat>, Error>> + Send;

    /// Whether the znode exists. Needs no right on it.
    fn exists(&self, path: &NodePath) -> impl Future<Output = Result<bool, Error>> + Send {
        async move { Ok(self.stat(path).await?.is_some()) }
    }

    /// The names of the children, sorted.
    ///
    /// # Errors
    /// [`Error::NoNode`] and the failures of the store.
    fn children(&self, path: &NodePath) -> impl Future<Output = Result<Vec<String>, Error>> + Send;

    /// All answers, in the order of the reads. The number of round trips does not depend on the
    /// number of reads. Not a snapshot: batches may see different states. An absent znode is no
    /// failure, and an unreadable znode is an [`Error::NoAuth`] of its own, since the creator of a
    /// znode can deny others access to it.
    fn read_each(
        &self,
        reads: Vec<Read>,
    ) -> impl Future<Output = Result<Vec<Result<Answer, Error>>, Error>> + Send;

    /// The same as [`Tree::read_each`], for znodes that must all be readable.
    ///
    /// # Errors
    /// The failures of the store, and [`Error::NoAuth`].
    fn read_many(&self, reads: Vec<Read>) -> impl Future<Output = Result<Vec<Answer>, Error>> + Send {
        async move { self.read_each(reads).await?.into_iter().collect() }
    }

    /// The data of each znode, `None` if it is absent; or why it may not be read.
    fn data_of_each(
        &self,
        paths: Vec<NodePath>,
    ) -> impl Future<Output = Result<Vec<Result<Option<Node>, String>>, Error>> + Send {
        let reads = paths.into_iter().map(Read::Data).collect();
        async move {
            let found = self.read_each(reads).await?.into_iter();
            Ok(found.map(|answer| answer.map(Answer::into_data).map_err(|err| err.to_string())).collect())
        }
    }

    /// Applies all writes or none.
    ///
    /// # Errors
    /// The refusal of the first failed step, with its path; or a failure of the store, of which
    /// [`Error::is_ambiguous`] tells whether the writes may have been applied.
    fn write(&self, writes: Vec<Write>) -> impl Future<Output = Result<(), Error>> + Send;

    /// Replaces the rights of a znode. ZooKeeper cannot do this as part of an atomic write.
    ///
    /// # Errors
    /// As for [`Tree::write`].
    fn set_acl(&self, path: &NodePath, acl: Acl) -> impl Future<Output = Result<(), Error>> + Send;

    /// Adds an identity to this session and the sessions that replace it. Proving the same again
    /// does nothing. A tree with a fixed identity refuses.
    fn prove(&self, credential: &Credential) -> impl Future<Output = Result<(), Error>> + Send {
        let what = format!("{} cannot be proved here", credential.user());
        async move { Err(Error::Unexpected { hosts: "this tree".to_owned(), what }) }
    }

    /// Makes later reads see every write that was finished before this call.
    fn sync(&self) -> impl Future<Output = Result<(), Error>> + Send;

    /// Watches `path` and everything below it. The watch is set when this returns: no later change
    /// is missed.
    fn watch(&self, path: &NodePath) -> impl Future<Output = Result<Self::Feed, Error>> + Send;
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{0}: no such znode")]
    NoNode(NodePath),
    #[error("{0}: the znode exists already")]
    NodeExists(NodePath),
    #[error("{0}: changed by another client meanwhile")]
    BadVersion(NodePath),
    #[error("{0}: the znode has children")]
    NotEmpty(NodePath),
    #[error("{0}: the store does not allow this with these credentials")]
    NoAuth(NodePath),
    #[error("cannot reach the store at {hosts}")]
    Unreachable { hosts: String },
    #[error("no CA certificate to verify the store at {hosts} with")]
    NoCa { hosts: String },
    #[error("the CA certificate for the store at {hosts} is not a certificate in PEM form")]
    BadCa { hosts: String },
    #[error("TLS handshake with the store at {host} failed: {why}")]
    Tls { host: String, why: HandshakeFailure },
    #[error("the store at {host} requires TLS")]
    TlsRequired { host: String },
    #[error("the store at {hosts} did not answer in {seconds} s")]
    Timeout { hosts: String, seconds: u64 },
    #[error("the store at {hosts} went away before it confirmed a change")]
    Ambiguous { hosts: String },
    #[error("the session with the store at {hosts} has expired")]
    Expired { hosts: String },
    #[error("the store at {hosts} refused the credentials")]
    AuthFailed { hosts: String },
    #[error("{path}: {bytes} bytes are more than the {limit} allowed")]
    TooLarge { path: NodePath, bytes: usize, limit: usize },
    #[error(
        "{path}: the store at {hosts} accepts no such change: a limit of it is reached, or its disk is full"
    )]
    Full { path: NodePath, hosts: String },
    #[error("'{given}' is not the address of a store: {reason}")]
    BadAddress { given: String, reason: &'static str },
    #[error("the store at {hosts} answered what was not expected: {what}")]
    Unexpected { hosts: String, what: String },
}

impl Error {
    /// Whether the write may have been applied: read back before repeating it.
    pub fn is_ambiguous(&self) -> bool {
        matches!(self, Self::Ambiguous { .. })
    }

    /// Whether another client wrote in between: reading and writing again may succeed at once.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::NoNode(_) | Self::NodeExists(_) | Self::BadVersion(_) | Self::NotEmpty(_))
    }

    /// Whether the same request may succeed later: the store was unreachable, or it had no space.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::Timeout { .. }
                // The server's certificate or listener may be replaced.
                | Self::Tls { .. }
                | Self::TlsRequired { .. }
                | Self::Ambiguous { .. }
                | Self::Expired { .. }
                | Self::Full { .. }
        )
    }
}
