//! The ports of one unit, for the hook tools. Needs no right on any other znode than the unit's
//! ports.

use super::error::Error;
use super::paths::{self, NodePath};
use super::records::corrupt;
use super::tree::{self, Tree};
use super::update::{Change, update};
use crate::model::ports::{InvalidPorts, PortsDocument};
use crate::model::{PortRange, UnitId};

/// The ports znode of one unit.
#[derive(Debug)]
pub struct UnitPorts<'t, T> {
    tree: &'t T,
    path: NodePath,
}

impl<'t, T: Tree> UnitPorts<'t, T> {
    pub fn new(tree: &'t T, unit: UnitId) -> Self {
        Self { tree, path: paths::unit_ports(unit) }
    }

    /// The open ports. An absent znode means none.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn read(&self) -> Result<PortsDocument, Error> {
        let node = self.tree.find(&self.path).await?;
        self.parse(&node.map(|node| node.data).unwrap_or_default())
    }

    /// Opens a range. Opening it again changes nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Ports`] if there would be too many, and the failures of the
    /// store.
    pub async fn open(&self, range: PortRange) -> Result<(), Error> {
        self.update(|document| document.open(range)).await
    }

    /// Closes a range. A closed range is fine, and so is a removed unit: its last hook may call
    /// this.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn close(&self, range: PortRange) -> Result<(), Error> {
        let closed = self.update(|document| {
            document.close(range);
            Ok(())
        });
        match closed.await {
            Err(Error::Tree(tree::Error::NoNode(_))) => Ok(()),
            done => done,
        }
    }

    async fn update(
        &self,
        change: impl Fn(&mut PortsDocument) -> Result<(), InvalidPorts>,
    ) -> Result<(), Error> {
        update(self.tree, &self.path, |node| {
            let mut document = self.parse(&node.data)?;
            change(&mut document).map_err(Error::Ports)?;
            Ok(Change::Set(document.to_bytes().map_err(Error::Ports)?, ()))
        })
        .await
    }

    fn parse(&self, data: &[u8]) -> Result<PortsDocument, Error> {
        PortsDocument::parse(data).map_err(|e| corrupt(&self.path, e.to_string()))
    }
}
