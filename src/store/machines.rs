//! Machines: added, found, terminated.

use super::credentials::Credential;
use super::environment::Environment;
use super::error::Error;
use super::records::Machine;
use super::tree::Tree;
use crate::model::{InstanceId, MachineId};

impl<T: Tree> Environment<T> {
    /// With `adopted`, the machine is an instance that is there already, and that is never terminated.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn add_machine(&self, _adopted: Option<InstanceId>) -> Result<MachineId, Error> {
        Err(Error::NotYet("add-machine"))
    }

    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn machine(&self, _id: MachineId) -> Result<Machine, Error> {
        Err(Error::NotYet("machine"))
    }

    /// All of them or none.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`], [`Error::MachineInUse`], and the failures of the store.
    pub async fn terminate_machines(&self, _ids: &[MachineId]) -> Result<(), Error> {
        Err(Error::NotYet("terminate-machine"))
    }

    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn machine_credential(&self, _id: MachineId) -> Result<Credential, Error> {
        Err(Error::NotYet("machine credentials"))
    }
}
