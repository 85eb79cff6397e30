//! Services: deployed, found by name, exposed, destroyed.

use super::environment::Environment;
use super::error::Error;
use super::records::Service;
use super::tree::Tree;
use super::units::Placed;
use crate::model::{CharmUrl, MachineId, ServiceId, ServiceName};
use serde_json::{Map, Value};

/// What to deploy.
#[derive(Debug, Clone)]
pub struct Deploy {
    pub service: ServiceName,
    pub charm: CharmUrl,
    /// Further keys of the service's record: the charm's metadata.
    pub metadata: Map<String, Value>,
    pub units: u32,
    /// The machine that all units go to; it must exist.
    pub to: Option<MachineId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deployed {
    pub service: ServiceId,
    pub units: Vec<Placed>,
}

/// What became of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    Changed,
    AlreadySo,
}

impl<T: Tree> Environment<T> {
    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn service(&self, _name: &ServiceName) -> Result<(ServiceId, Service), Error> {
        Err(Error::NotYet("service"))
    }

    /// Makes the service, its name, its units and the machines they need in one step.
    ///
    /// # Errors
    /// [`Error::ServiceExists`], [`Error::MachineNotFound`], [`Error::TooManyUnits`], the failures of the store.
    pub async fn deploy(&self, _wanted: &Deploy) -> Result<Deployed, Error> {
        Err(Error::NotYet("deploy"))
    }

    /// Removes the service with all its units.
    ///
    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn destroy_service(&self, _name: &ServiceName) -> Result<(), Error> {
        Err(Error::NotYet("destroy-service"))
    }

    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn expose(&self, _name: &ServiceName) -> Result<Flag, Error> {
        Err(Error::NotYet("expose"))
    }

    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn unexpose(&self, _name: &ServiceName) -> Result<Flag, Error> {
        Err(Error::NotYet("unexpose"))
    }
}
