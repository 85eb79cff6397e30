//! A [`Tree`](super::Tree) over the wire, for the embedded keeper and for a ZooKeeper ensemble alike. The only file
//! that knows the client library.

use super::address::Address;
use super::credentials::Credential;
use super::tree::Error;

/// A connection to a store, made once and used for as long as it lasts.
#[derive(Debug)]
pub struct ZkTree {
    hosts: String,
}

impl ZkTree {
    /// Connects, within a few seconds or not at all.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if nothing answers.
    pub async fn connect(address: &Address, _credential: Option<&Credential>) -> Result<Self, Error> {
        Err(Error::Unreachable { hosts: address.hosts() })
    }

    pub fn hosts(&self) -> &str {
        &self.hosts
    }
}
