//! Joining a machine: an offer below the machine's znode, which the holder of a one-time credential
//! may read and mark as used. It contains the machine's own credential until then, and nothing
//! secret afterwards. An operator makes one with a random credential; the controller makes another
//! one for the instance that it launches.

use serde_json::{Map, Value, json};

use super::acl::Roles;
use super::credentials::{Credential, Identity};
use super::environment::Environment;
use super::error::Error;
use super::paths::{self, NodePath};
use super::records::MAX_RECORD;
use super::tree::{self, Tree, Write};
use crate::model::MachineId;

/// The maker of an offer. Each has a znode of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OfferKind {
    Operator,
    /// The controller that launches an instance for the machine.
    Launch,
}

impl OfferKind {
    pub(super) fn znode_name(self) -> &'static str {
        match self {
            Self::Operator => "join",
            Self::Launch => "launch",
        }
    }
}

/// The credential and the roles that a joining machine gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    pub credential: Credential,
    pub roles: Roles,
    expires_ms: u64,
    path: NodePath,
    /// The version of the znode that was read.
    version: i32,
}

/// Why a machine cannot join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(
        "the store does not accept the token for machine {0}: it is forged, has expired or was replaced by a \
         newer one, or the machine was terminated"
    )]
    Unknown(MachineId),
    #[error("the token for machine {machine} was used before")]
    Used {
        machine: MachineId,
        /// The name that the host gave to itself.
        by: Option<String>,
    },
    #[error("the token for machine {0} has expired")]
    Expired(MachineId),
    #[error(transparent)]
    Store(#[from] Error),
}

impl From<tree::Error> for JoinError {
    fn from(error: tree::Error) -> Self {
        Self::Store(error.into())
    }
}

/// The user name of one-time credentials.
fn join_user(machine: MachineId) -> String {
    format!("join-{}", machine.key())
}

impl Offer {
    fn to_bytes(&self) -> Vec<u8> {
        let offer = json!({
            "auth": self.credential.expose(),
            "operator": self.roles.operator.as_str(),
            "controller": self.roles.controller.as_str(),
            "expires": self.expires_ms,
        });
        offer.to_string().into_bytes()
    }

    /// Parses the data of an offer's znode. The error does not quote it.
    fn parse(machine: MachineId, path: &NodePath, data: &[u8], version: i32) -> Result<Self, JoinError> {
        let corrupt = |problem: &str| Error::Corrupt { path: path.clone(), problem: problem.to_owned() };
        if data.len() > MAX_RECORD {
            return Err(corrupt("it is too long").into());
        }
        let map: Map<String, Value> = serde_json::from_slice(data).map_err(|_| corrupt("not JSON"))?;
        if map.contains_key("used") {
            let by = map.get("by").and_then(Value::as_str).map(str::to_owned);
            return Err(JoinError::Used { machine, by });
        }
        let text = |key: &str| map.get(key).and_then(Value::as_str).unwrap_or_default();
        let identity = |key| Identity::parse(text(key)).map_err(|_| corrupt("an identity is missing"));
        Ok(Self {
            credential: Credential::parse(text("auth")).map_err(|_| corrupt("the credential is missing"))?,
            roles: Roles { operator: identity("operator")?, controller: identity("controller")? },
            expires_ms: map.get("expires").and_then(Value::as_u64).unwrap_or(0),
            path: path.clone(),
            version,
        })
    }

    /// Reads the offer with a one-time credential.
    ///
    /// # Errors
    /// [`JoinError`]: by the clock that `now_ms` comes from, an offer may have expired. An offer
    /// that was used does not expire.
    pub async fn read<T: Tree>(
        tree: &T,
        machine: MachineId,
        kind: OfferKind,
        now_ms: u64,
    ) -> Result<Self, JoinError> {
        let path = paths::machine_offer(machine, kind);
        let node = match tree.get(&path).await {
            Ok(node) => node,
            Err(tree::Error::NoNode(_) | tree::Error::NoAuth(_)) => return Err(JoinError::Unknown(machine)),
            Err(error) => return Err(error.into()),
        };
        let offer = Self::parse(machine, &path, &node.data, node.version)?;
        if now_ms >= offer.expires_ms {
            return Err(JoinError::Expired(machine));
        }
        Ok(offer)
    }

    /// Marks the offer as used: its token is void, and the offer no longer contains a secret. `by`
    /// is a name of the host that is not secret; the host recognizes it after a crash.
    ///
    /// # Errors
    /// [`JoinError::Used`] if another process was faster.
    pub async fn use_up<T: Tree>(
        &self,
        tree: &T,
        machine: MachineId,
        (now_ms, by): (u64, &str),
    ) -> Result<(), JoinError> {
        let data = json!({"used": now_ms, "by": by}).to_string().into_bytes();
        let write = Write::SetIfVersion { path: self.path.clone(), data, version: self.version };
        match tree.write(vec![write]).await {
            Ok(()) => Ok(()),
            Err(tree::Error::BadVersion(_)) => Err(JoinError::Used { machine, by: None }),
            Err(tree::Error::NoNode(_)) => Err(JoinError::Unknown(machine)),
            Err(error) => Err(error.into()),
        }
    }
}

/// Deletes the offers to these machines that have expired, and returns their number. An offer that
/// was used stays: it contains no secret, and gives the reason to a host with the same token.
///
/// # Errors
/// The failures of the store. An offer that cannot be read, parsed or deleted is left.
pub async fn delete_expired_offers<T: Tree>(
    tree: &T,
    machines: &[MachineId],
    now_ms: u64,
) -> Result<usize, tree::Error> {
    let kinds = [OfferKind::Operator, OfferKind::Launch];
    let wanted: Vec<_> = machines.iter().flat_map(|&id| kinds.map(|kind| (id, kind))).collect();
    let paths: Vec<_> = wanted.iter().map(|(id, kind)| paths::machine_offer(*id, *kind)).collect();
    let found = tree.data_of_each(paths.clone()).await?;
    let mut deleted = 0;
    for (((machine, _), path), node) in wanted.into_iter().zip(paths).zip(found) {
        let Ok(Some(node)) = node else { continue };
        let Ok(offer) = Offer::parse(machine, &path, &node.data, node.version) else { continue };
        if now_ms < offer.expires_ms {
            continue;
        }
        match tree.write(vec![Write::DeleteIfVersion { path, version: node.version }]).await {
            Ok(()) => deleted += 1,
            Err(error) if error.is_transient() => return Err(error),
            // It was used or replaced meanwhile, or the machine was terminated.
            Err(_) => {}
        }
    }
    Ok(deleted)
}

impl Offer {
    /// Returns the writes that make this offer to the holder of `once`.
    fn replace(&self, exists: bool, once: &Credential) -> Vec<Write> {
        let delete = exists.then(|| Write::Delete { path: self.path.clone() });
        let acl = self.roles.machine_join(&once.identity());
        delete.into_iter().chain([Write::create(self.path.clone(), self.to_bytes(), acl)]).collect()
    }
}

/// An offer to a launched instance: its one-time credential, and when it expires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchOffer {
    pub machine: MachineId,
    pub once: Credential,
    pub expires_ms: u64,
}

/// Offers a machine to the instance that is launched for it, as the holder of the lease that
/// `fence` confirms. The one-time credential is derived from the machine's own `credential` and the
/// time of expiry: a launch that is repeated after a lost answer sends the same user data again, as
/// EC2 requires. An offer that is used, or is valid for less than half of `lifetime_ms`, is
/// replaced.
///
/// # Errors
/// The failures of the store; a conflict if the machine was removed or the lease was lost.
pub async fn offer_at_launch<T: Tree>(
    tree: &T,
    roles: &Roles,
    (machine, credential): (MachineId, &Credential),
    fence: Write,
    (now_ms, lifetime_ms): (u64, u64),
) -> Result<LaunchOffer, tree::Error> {
    let path = paths::machine_offer(machine, OfferKind::Launch);
    let found = tree.find(&path).await?;
    let offered = found.as_ref().and_then(|node| {
        Offer::parse(machine, &path, &node.data, node.version).ok().filter(|offer| {
            offer.credential == *credential && offer.expires_ms >= now_ms.saturating_add(lifetime_ms / 2)
        })
    });
    let expires_ms = offered.as_ref().map_or(now_ms.saturating_add(lifetime_ms), |offer| offer.expires_ms);
    let once = credential.derive(&join_user(machine), &format!("launch {expires_ms}"));
    if offered.is_none() {
        let (credential, roles) = (credential.clone(), roles.clone());
        let offer = Offer { credential, roles, expires_ms, path, version: 0 };
        let mut writes = vec![fence];
        writes.extend(offer.replace(found.is_some(), &once));
        tree.write(writes).await?;
    }
    Ok(LaunchOffer { machine, once, expires_ms })
}

impl<T: Tree> Environment<T> {
    /// Offers a machine to the holder of the returned one-time credential. An earlier offer becomes
    /// void.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn offer_join(&self, machine: MachineId, expires_ms: u64) -> Result<Credential, Error> {
        let credential = self.machine_credential(machine).await?;
        let once = Credential::generate(&join_user(machine))?;
        let path = paths::machine_offer(machine, OfferKind::Operator);
        let exists = self.tree.exists(&path).await?;
        let offer = Offer { credential, roles: self.info.roles.clone(), expires_ms, path, version: 0 };
        match self.tree.write(offer.replace(exists, &once)).await {
            Err(tree::Error::NoNode(_)) => Err(Error::MachineNotFound(machine)),
            done => {
                done?;
                Ok(once)
            }
        }
    }
}
