//! Units: added to a service, placed on machines, removed.

use super::credentials::Credential;
use super::environment::Environment;
use super::error::Error;
use super::records::Unit;
use super::tree::Tree;
use crate::model::{MachineId, ServiceName, UnitId, UnitName};

/// A unit that was made, and where it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub id: UnitId,
    pub name: UnitName,
    pub machine: MachineId,
    /// The machine was made for it.
    pub new_machine: bool,
}

impl<T: Tree> Environment<T> {
    /// # Errors
    /// [`Error::ServiceNotFound`], [`Error::MachineNotFound`], [`Error::TooManyUnits`], the failures of the store.
    pub async fn add_units(
        &self,
        _service: &ServiceName,
        _count: u32,
        _to: Option<MachineId>,
    ) -> Result<Vec<Placed>, Error> {
        Err(Error::NotYet("add-unit"))
    }

    /// # Errors
    /// [`Error::UnitNotFound`] and the failures of the store.
    pub async fn unit(&self, _name: &UnitName) -> Result<(UnitId, Unit), Error> {
        Err(Error::NotYet("unit"))
    }

    /// # Errors
    /// [`Error::UnitNotFound`] and the failures of the store.
    pub async fn remove_unit(&self, _name: &UnitName) -> Result<(), Error> {
        Err(Error::NotYet("remove-unit"))
    }

    /// The identity that a unit's hooks have: for `juju hook-env` and the machine's agent.
    ///
    /// # Errors
    /// [`Error::UnitNotFound`] and the failures of the store.
    pub async fn unit_credential(&self, _name: &UnitName) -> Result<Credential, Error> {
        Err(Error::NotYet("unit credentials"))
    }
}
