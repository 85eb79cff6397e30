//! An environment in a store: making it, and opening one that is there. What is in it is in the files beside this one.

use super::credentials::Identity;
use super::error::Error;
use super::records::{Initialized, Placement};
use super::tree::Tree;
use crate::model::EnvironmentName;

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
}

impl<T: Tree> Environment<T> {
    /// Makes the environment, whole or not at all. Run again after a failure it finishes what was begun.
    ///
    /// # Errors
    /// [`Error::AlreadyBootstrapped`] if it is there and another's, and the failures of the store.
    pub async fn bootstrap(_tree: T, _wanted: &Bootstrap) -> Result<Self, Error> {
        Err(Error::NotYet("bootstrap"))
    }

    /// Opens the environment as the operator or the controller.
    ///
    /// # Errors
    /// [`Error::NotBootstrapped`], [`Error::WrongCredentials`], and the failures of the store.
    pub async fn open(_tree: T) -> Result<Self, Error> {
        Err(Error::NotYet("open"))
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
}
