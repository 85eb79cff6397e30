//! Several operators of one environment. Every operator has credentials of its own; with them it
//! reads its entry below `/operators`, which contains the credential that the rights of all znodes
//! name. Removing an operator removes the entry. Also the log of the operators who exposed and
//! unexposed services.

use serde::{Deserialize, Serialize};

use super::cas_retry::CasRetry;
use super::credentials::{Credential, Identity};
use super::environment::Environment;
use super::error::Error;
use super::paths;
use super::records::{corrupt, credentials_to_bytes, parse_credentials};
use super::tree::{self, Tree, Write};
use super::update::ensure;
use crate::model::{Cidr, OperatorName, ServiceName};

/// The beginning of the user name of an added operator's credentials.
const USER: &str = "operator-";

/// The number of entries that the log keeps.
const MAX_ENTRIES: usize = 200;

/// The name for the operator that bootstrapped the environment.
pub const FIRST_OPERATOR: &str = "operator";

/// A change of a service's flag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagChange {
    /// Milliseconds since 1970.
    pub at: u64,
    pub service: String,
    pub exposed: bool,
    /// The sources that the service is exposed to; none for the whole world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
    /// The operator's name, as its own program gave it.
    pub by: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct FlagLog {
    entries: Vec<FlagChange>,
}

/// The operator that a connection acts for, and the time, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acting {
    pub operator: String,
    /// Milliseconds since 1970.
    pub now_ms: u64,
}

/// The names of the added operators, in order.
pub async fn operator_names<T: Tree>(tree: &T) -> Result<Vec<OperatorName>, tree::Error> {
    let mut names: Vec<OperatorName> = match tree.children(&paths::operators()).await {
        Ok(names) => names.iter().filter_map(|name| name.parse().ok()).collect(),
        Err(tree::Error::NoNode(_)) => Vec::new(),
        Err(error) => return Err(error),
    };
    names.sort();
    Ok(names)
}

impl Credential {
    /// Makes credentials for an added operator.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn of_operator(name: &OperatorName) -> Result<Self, Error> {
        Self::generate(&format!("{USER}{name}"))
    }

    /// The name of the operator that these credentials were made for; `None` for the first
    /// operator and for other roles.
    pub fn added_operator(&self) -> Option<OperatorName> {
        self.user().strip_prefix(USER)?.parse().ok()
    }
}

/// Reads the credential that the rights of all znodes name, as an added operator.
///
/// # Errors
/// [`Error::WrongCredentials`] if the operator was removed.
pub async fn shared_credential<T: Tree>(tree: &T, name: &OperatorName) -> Result<Credential, Error> {
    let path = paths::operator(name);
    match tree.get(&path).await {
        Ok(node) => parse_credentials(&path, &node.data),
        Err(tree::Error::NoNode(_) | tree::Error::NoAuth(_)) => Err(Error::OperatorRemoved(name.clone())),
        Err(error) => Err(error.into()),
    }
}

impl<T: Tree> Environment<T> {
    /// The same environment, with an operator's name for the log of changes.
    #[must_use]
    pub fn acting(mut self, acting: Acting) -> Self {
        self.acting = Some(acting);
        self
    }

    /// Adds an operator with this identity. `shared` is the credential that the rights of all
    /// znodes name.
    ///
    /// # Errors
    /// [`Error::OperatorExists`] and the failures of the store.
    pub async fn add_operator(
        &self,
        name: &OperatorName,
        identity: &Identity,
        shared: &Credential,
    ) -> Result<(), Error> {
        let roles = &self.info.roles;
        ensure(&self.tree, &paths::operators(), &roles.operators()).await?;
        let acl = roles.operator_entry(identity);
        let entry = Write::create(paths::operator(name), credentials_to_bytes(shared), acl);
        match self.change_operators(entry).await {
            Err(Error::Tree(tree::Error::NodeExists(_))) => Err(Error::OperatorExists(name.clone())),
            done => done,
        }
    }

    /// Changes an entry. The list is written as well, because managers may not read the entries and
    /// get no events about them.
    async fn change_operators(&self, entry: Write) -> Result<(), Error> {
        let list = paths::operators();
        let mut retry = CasRetry::at(list.clone());
        loop {
            let version = self.tree.get(&list).await?.version;
            let touch = Write::SetIfVersion { path: list.clone(), data: Vec::new(), version };
            match self.tree.write(vec![entry.clone(), touch]).await {
                Err(error @ tree::Error::BadVersion(_)) => retry.after(error).await?,
                done => return Ok(done?),
            }
        }
    }

    /// # Errors
    /// [`Error::OperatorNotFound`] and the failures of the store.
    pub async fn remove_operator(&self, name: &OperatorName) -> Result<(), Error> {
        match self.change_operators(Write::Delete { path: paths::operator(name) }).await {
            Err(Error::Tree(tree::Error::NoNode(_))) => Err(Error::OperatorNotFound(name.clone())),
            done => done,
        }
    }

    /// The operators that were added, sorted by name.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn operators(&self) -> Result<Vec<OperatorName>, Error> {
        Ok(operator_names(&self.tree).await?)
    }

    /// Returns the log of changes of expose flags with their operators, oldest first.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn flag_changes(&self) -> Result<Vec<FlagChange>, Error> {
        let path = paths::flag_log();
        let Some(node) = self.tree.find(&path).await? else { return Ok(Vec::new()) };
        let log: FlagLog =
            serde_json::from_slice(&node.data).map_err(|error| corrupt(&path, error.to_string()))?;
        Ok(log.entries)
    }

    /// The write that adds a change to the log, for the same transaction as the change itself;
    /// `None` for a connection that acts for no operator. A log that cannot be parsed begins anew:
    /// it must not keep an operator from closing ports.
    pub(super) async fn log_of_change(
        &self,
        service: &ServiceName,
        change: Option<&[Cidr]>,
    ) -> Result<Option<Write>, Error> {
        let Some(Acting { operator, now_ms }) = &self.acting else { return Ok(None) };
        let path = paths::flag_log();
        let node = self.tree.find(&path).await?;
        let mut log: FlagLog =
            node.as_ref().and_then(|node| serde_json::from_slice(&node.data).ok()).unwrap_or_default();
        log.entries.push(FlagChange {
            at: *now_ms,
            service: service.to_string(),
            exposed: change.is_some(),
            to: change.into_iter().flatten().map(ToString::to_string).collect(),
            by: operator.clone(),
        });
        let surplus = log.entries.len().saturating_sub(MAX_ENTRIES);
        log.entries.drain(..surplus);
        // Texts and numbers are always JSON.
        let data = serde_json::to_vec(&log).expect("texts and numbers");
        Ok(Some(match node {
            Some(node) => Write::SetIfVersion { path, data, version: node.version },
            None => Write::create(path, data, self.info.roles.operators()),
        }))
    }
}
