//! The machine file: the store's address, the machine's credential and the identities that may read
//! what the machine writes. The agent of the machine reads it at its start. Pure. Reading and
//! writing the file, and its permissions, are the caller's task.

use serde::{Deserialize, Serialize};

use crate::store::acl::Roles;
use crate::store::{Address, Credential, Identity};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineFile {
    pub address: Address,
    pub credential: Credential,
    /// Hashes, not secrets.
    pub roles: Roles,
}

/// Why the content of a file is not a machine file. It never quotes the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidMachineFile(pub &'static str);

#[derive(Serialize, Deserialize)]
struct Wire {
    zookeeper: String,
    auth: String,
    operator: String,
    controller: String,
    /// The CA certificate (PEM) of the store's servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca: Option<String>,
}

impl MachineFile {
    pub fn render(&self) -> String {
        let wire = Wire {
            zookeeper: self.address.to_string(),
            auth: self.credential.expose(),
            operator: self.roles.operator.as_str().to_owned(),
            controller: self.roles.controller.as_str().to_owned(),
            ca: self.address.ca().map(str::to_owned),
        };
        // Encoding strings as JSON cannot fail.
        let mut text = serde_json::to_string(&wire).expect("strings");
        text.push('\n');
        text
    }

    /// # Errors
    /// Names the part of the file that is missing or invalid.
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidMachineFile> {
        let wire: Wire = serde_json::from_slice(bytes).map_err(|_| InvalidMachineFile("a key is missing"))?;
        let identity = |text: &str, problem| Identity::parse(text).map_err(|_| InvalidMachineFile(problem));
        let operator = identity(&wire.operator, "\"operator\" is not an identity")?;
        let controller = identity(&wire.controller, "\"controller\" is not an identity")?;
        let address: Result<Address, _> = wire.zookeeper.parse();
        Ok(Self {
            address: address
                .map_err(|_| InvalidMachineFile("\"zookeeper\" is not an address"))?
                .with_ca(wire.ca.as_deref()),
            credential: Credential::parse(&wire.auth)
                .map_err(|_| InvalidMachineFile("\"auth\" is not a credential"))?,
            roles: Roles { operator, controller },
        })
    }
}
