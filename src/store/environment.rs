//! An environment in a store: making it, and opening one that is there. What is in it is in the files beside this one.

use super::acl::Roles;
use super::credentials::{Credential, Identity, random_hex};
use super::error::Error;
use super::machines::machine_writes;
use super::operation::Operation;
use super::paths;
use super::records::{Initialized, LOCAL_INSTANCE, Machine, Placement, counter_to_bytes};
use super::retry::Attempts;
use super::tree::{self, Tree, Write};
use crate::model::{EnvironmentName, MachineId};
use serde_json::{Map, Value};

/// ZooKeeper's own node below the root of the store.
pub(super) const STORES_OWN: &str = "zookeeper";

/// Where everything runs in an environment of one machine.
pub(super) const LOCAL_MACHINE: MachineId = MachineId::new(0);

/// What a new environment is made of.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    pub environment: EnvironmentName,
    pub placement: Placement,
    /// The operator must be the one that the tree is connected as.
    pub operator: Identity,
    pub controller: Identity,
}

/// A bootstrapped environment, as one identity sees it.
#[derive(Debug)]
pub struct Environment<T> {
    pub(super) tree: T,
    pub(super) info: Initialized,
    pub(super) operation: Option<Operation>,
}

impl<T: Tree> Environment<T> {
    /// Makes the environment, whole or not at all. Run again after a failure it finishes what was begun, and does
    /// nothing to an environment of the same name that these identities own already.
    ///
    /// # Errors
    /// [`Error::AlreadyBootstrapped`] or [`Error::WrongCredentials`] if it is there and another's,
    /// [`Error::ForeignNodes`] if the place is not empty, and the failures of the store.
    pub async fn bootstrap(tree: T, wanted: &Bootstrap) -> Result<Self, Error> {
        let info = Initialized {
            environment: wanted.environment.clone(),
            cluster_id: random_hex(16)?,
            placement: wanted.placement,
            roles: Roles { operator: wanted.operator.clone(), controller: wanted.controller.clone() },
        };
        let local = Credential::generate(&LOCAL_MACHINE.key())?;
        let mut attempts = Attempts::at(paths::initialized());
        loop {
            match Self::read_info(&tree).await {
                Ok(found) if found.roles == info.roles && found.environment == info.environment => {
                    lock_root(&tree, &found.roles).await?;
                    return Ok(Self { tree, info: found, operation: None });
                }
                Ok(found) => return Err(Error::AlreadyBootstrapped(found.environment.to_string())),
                Err(Error::NotBootstrapped) => {}
                Err(e) => return Err(e),
            }
            let mut writes = Vec::new();
            match tree.children(&paths::root()).await {
                // Made between the two reads, by someone who had the same idea.
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
                Err(e) => attempts.after(e).await?,
                // The next round finds it, locks the root and returns.
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
        Ok(Self { tree, info, operation: None })
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

    /// Refuses a store that is not the one that was meant.
    ///
    /// # Errors
    /// [`Error::OtherEnvironment`] or [`Error::OtherCluster`].
    pub fn expect(&self, environment: &EnvironmentName, cluster_id: Option<&str>) -> Result<(), Error> {
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

    /// Gives the tree back, to be closed.
    pub fn into_tree(self) -> T {
        self.tree
    }
}

/// The one right that cannot be part of the multi: a store's root is there before any environment. Repeated by every
/// bootstrap, so that a crash before it is put right by the next.
async fn lock_root<T: Tree>(tree: &T, roles: &Roles) -> Result<(), Error> {
    Ok(tree.set_acl(&paths::root(), roles.operators()).await?)
}

/// Everything that an environment begins with. `/initialized` comes last, which matters to nobody who reads after the
/// multi, and says what it means to whoever reads this.
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
        Write::create(paths::charms(), Vec::new(), acl()),
        Write::create(paths::controller(), Vec::new(), info.roles.controllers()),
    ];
    if info.placement == Placement::Local {
        // Not launched by anybody, so known from the start, and never terminated.
        let machine = Machine {
            instance_id: LOCAL_INSTANCE.parse().ok(),
            addresses: vec!["localhost".to_owned()],
            adopted: true,
            rest: Map::from_iter([("instance-state".to_owned(), Value::from("running"))]),
        };
        writes.extend(machine_writes(&info.roles, LOCAL_MACHINE, &machine, local));
    }
    writes.push(Write::create(paths::initialized(), info.to_bytes(), acl()));
    writes
}
