//! Creating and opening an environment. Its objects are in the files beside this one.

use super::acl::Roles;
use super::cas_retry::CasRetry;
use super::credentials::{Credential, Identity, random_hex};
use super::error::Error;
use super::idempotency::IdempotencyKey;
use super::machines::machine_writes;
use super::operators::Acting;
use super::paths;
use super::records::{Initialized, LOCAL_INSTANCE, Machine, Placement, counter_to_bytes};
use super::tree::{self, Tree, Write};
use crate::model::{EnvironmentName, MachineId};
use serde_json::{Map, Value};

/// ZooKeeper's own znode below the root of the store.
pub(super) const STORES_OWN: &str = "zookeeper";

/// The machine of an environment that has only one.
pub(super) const LOCAL_MACHINE: MachineId = MachineId::new(0);

/// The properties of a new environment.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    pub environment: EnvironmentName,
    pub placement: Placement,
    /// The identity that the tree is connected as.
    pub operator: Identity,
    pub controller: Identity,
}

/// A bootstrapped environment, accessed with one identity.
#[derive(Debug)]
pub struct Environment<T> {
    pub(super) tree: T,
    pub(super) info: Initialized,
    pub(super) key: Option<IdempotencyKey>,
    /// For the log of changes.
    pub(super) acting: Option<Acting>,
}

impl<T: Tree> Environment<T> {
    /// Creates the environment completely or not at all. After a failure it can be called again; an
    /// environment of the same name and identities is left as it is.
    ///
    /// # Errors
    /// [`Error::AlreadyBootstrapped`] or [`Error::WrongCredentials`] if another environment exists,
    /// [`Error::ForeignNodes`] if the root is not empty, and the failures of the store.
    pub async fn bootstrap(tree: T, wanted: &Bootstrap) -> Result<Self, Error> {
        let info = Initialized {
            environment: wanted.environment.clone(),
            cluster_id: random_hex(16)?,
            placement: wanted.placement,
            roles: Roles { operator: wanted.operator.clone(), controller: wanted.controller.clone() },
        };
        let local = Credential::generate(&LOCAL_MACHINE.key())?;
        let mut retry = CasRetry::at(paths::initialized());
        loop {
            match Self::read_info(&tree).await {
                Ok(found) if found.roles == info.roles && found.environment == info.environment => {
                    lock_root(&tree, &found.roles).await?;
                    return Ok(Self { tree, info: found, key: None, acting: None });
                }
                Ok(found) => return Err(Error::AlreadyBootstrapped(found.environment.to_string())),
                Err(Error::NotBootstrapped) => {}
                Err(e) => return Err(e),
            }
            let mut writes = Vec::new();
            match tree.children(&paths::root()).await {
                // Another client created it between the two reads.
                Ok(names) if names.iter().any(|name| paths::root().child(name) == paths::initialized()) => {
                    continue;
                }
                Ok(names) => {
                    if let Some(name) = names.into_iter().find(|name| name != STORES_OWN) {
                        return Err(Error::ForeignNodes(name));
                    }
                }
                Err(tree::Error::NoNode(root)) => {
                    writes.push(Write::create(root, Vec::new(), info.roles.operators()));
                }
                Err(tree::Error::NoAuth(_)) => return Err(Error::WrongCredentials),
                Err(e) => return Err(e.into()),
            }
            writes.extend(environment_writes(&info, &local));
            match tree.write(writes).await {
                Err(tree::Error::NoNode(root)) if root == paths::root() => return Err(Error::NoChrootParent),
                Err(tree::Error::NoAuth(_)) => return Err(Error::WrongCredentials),
                Err(e) => retry.after(e).await?,
                // The next iteration reads it, locks the root and returns.
                Ok(()) => {}
            }
        }
    }

    /// Opens the environment as the operator or the controller.
    ///
    /// # Errors
    /// [`Error::NotBootstrapped`], [`Error::WrongCredentials`], and the failures of the store.
    pub async fn open(tree: T) -> Result<Self, Error> {
        let info = Self::read_info(&tree).await?;
        Ok(Self { tree, info, key: None, acting: None })
    }

    async fn read_info(tree: &T) -> Result<Initialized, Error> {
        let path = paths::initialized();
        match tree.get(&path).await {
            Ok(node) => Initialized::parse(&path, &node.data),
            Err(tree::Error::NoNode(_)) => Err(Error::NotBootstrapped),
            Err(tree::Error::NoAuth(_)) => Err(Error::WrongCredentials),
            Err(e) => Err(e.into()),
        }
    }

    /// Refuses a store that holds another environment, or another one of the same name.
    ///
    /// # Errors
    /// [`Error::OtherEnvironment`] or [`Error::OtherCluster`].
    pub fn verify_identity(
        &self,
        environment: &EnvironmentName,
        cluster_id: Option<&str>,
    ) -> Result<(), Error> {
        if self.info.environment != *environment {
            return Err(Error::OtherEnvironment {
                found: self.info.environment.to_string(),
                wanted: environment.to_string(),
            });
        }
        match cluster_id {
            Some(wanted) if wanted != self.info.cluster_id => {
                Err(Error::OtherCluster { found: self.info.cluster_id.clone(), wanted: wanted.to_owned() })
            }
            _ => Ok(()),
        }
    }

    pub fn info(&self) -> &Initialized {
        &self.info
    }

    pub fn tree(&self) -> &T {
        &self.tree
    }

    /// Returns the tree, to be closed.
    pub fn into_tree(self) -> T {
        self.tree
    }
}

/// Sets the rights of the root, which exists before any environment, so this cannot be part of the
/// atomic write. Every bootstrap repeats it, in case an earlier one crashed before.
async fn lock_root<T: Tree>(tree: &T, roles: &Roles) -> Result<(), Error> {
    Ok(tree.set_acl(&paths::root(), roles.operators()).await?)
}

/// The znodes of a new environment. `/initialized` comes last.
fn environment_writes(info: &Initialized, local: &Credential) -> Vec<Write> {
    let acl = || info.roles.operators();
    let machines = if info.placement == Placement::Local { LOCAL_MACHINE.number() + 1 } else { 0 };
    let mut writes = vec![
        Write::create(paths::services(), counter_to_bytes(0), acl()),
        Write::create(paths::units(), counter_to_bytes(0), acl()),
        Write::create(paths::machines(), counter_to_bytes(machines), acl()),
        Write::create(paths::names(), Vec::new(), acl()),
        Write::create(paths::service_names(), Vec::new(), acl()),
        Write::create(paths::unit_names(), Vec::new(), acl()),
        Write::create(paths::machine_names(), Vec::new(), acl()),
        Write::create(paths::charms(), Vec::new(), acl()),
        Write::create(paths::controller(), Vec::new(), info.roles.controllers()),
    ];
    if info.placement == Placement::Local {
        // The local machine exists already, and is never terminated.
        let machine = Machine {
            instance_id: LOCAL_INSTANCE.parse().ok(),
            name: None,
            addresses: vec!["localhost".to_owned()],
            adopted: true,
            rest: Map::from_iter([("instance-state".to_owned(), Value::from("running"))]),
        };
        writes.extend(machine_writes(&info.roles, LOCAL_MACHINE, &machine, local));
    }
    writes.push(Write::create(paths::initialized(), info.to_bytes(), acl()));
    writes
}
