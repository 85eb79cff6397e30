//! The ports of one unit, as its own identity sees them: what the hook tools call. Needs no right on anything but the
//! ports node itself.

use super::error::Error;
use super::paths::{self, NodePath};
use super::records::corrupt;
use super::retry::Attempts;
use super::tree::{self, Tree, Write};
use crate::model::ports::{InvalidPorts, PortsDocument};
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

    /// What is open. A node that is not there has nothing open.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn read(&self) -> Result<PortsDocument, Error> {
        match self.tree.get(&self.path).await {
            Ok(node) => self.parse(&node.data),
            Err(tree::Error::NoNode(_)) => self.parse(&[]),
            Err(e) => Err(e.into()),
        }
    }

    /// Opening what is open changes nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Ports`] if there would be too many, and the failures of the store.
    pub async fn open(&self, range: PortRange) -> Result<(), Error> {
        self.update(|document| document.open(range)).await
    }

    /// Closing what is not open is fine, also for a unit that is gone with all it had open: its last hook may try.
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

    /// Reads, changes and writes back until nobody came between. Needs no read-back after a lost answer: `change` is
    /// the same done twice.
    async fn update(
        &self,
        change: impl Fn(&mut PortsDocument) -> Result<(), InvalidPorts>,
    ) -> Result<(), Error> {
        let mut attempts = Attempts::at(self.path.clone());
        loop {
            let node = self.tree.get(&self.path).await?;
            let mut document = self.parse(&node.data)?;
            change(&mut document).map_err(Error::Ports)?;
            let data = document.to_bytes().map_err(Error::Ports)?;
            if data == node.data {
                return Ok(());
            }
            let write = Write::SetIfVersion { path: self.path.clone(), data, version: node.version };
            match self.tree.write(vec![write]).await {
                Ok(()) => return Ok(()),
                Err(e) => attempts.after(e).await?,
            }
        }
    }

    fn parse(&self, data: &[u8]) -> Result<PortsDocument, Error> {
        PortsDocument::parse(data).map_err(|e| corrupt(&self.path, e.to_string()))
    }
}
