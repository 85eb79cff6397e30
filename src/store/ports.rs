//! The ports of one unit, as its own identity sees them: what the hook tools call. Needs no right on anything but the
//! ports node itself.

use super::error::Error;
use super::paths::{self, NodePath};
use super::tree::Tree;
use crate::model::ports::PortsDocument;
use crate::model::{PortRange, UnitId};

/// The ports node of one unit.
#[derive(Debug)]
pub struct UnitPorts<'t, T> {
    tree: &'t T,
    path: NodePath,
}

impl<'t, T: Tree> UnitPorts<'t, T> {
    pub fn new(tree: &'t T, unit: UnitId) -> Self {
        Self { tree, path: paths::unit_ports(unit) }
    }

    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn read(&self) -> Result<PortsDocument, Error> {
        let _ = (self.tree, &self.path);
        Err(Error::NotYet("opened-ports"))
    }

    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn open(&self, _range: PortRange) -> Result<(), Error> {
        Err(Error::NotYet("open-port"))
    }

    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn close(&self, _range: PortRange) -> Result<(), Error> {
        Err(Error::NotYet("close-port"))
    }
}
