//! The machine file: the store's address, the machine's credential, the identities that may read
//! what the machine writes, and the directories that its agent uses. The agent of the machine reads
//! it at its start. Pure. Reading and writing the file, and its permissions, are the caller's task.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::store::acl::Roles;
use crate::store::{Address, Credential, Identity};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineFile {
    pub address: Address,
    pub credential: Credential,
    /// Hashes, not secrets.
    pub roles: Roles,
    /// Where the machine's files are on this host; `None` if no agent has used them. A later
    /// command removes them from there, whatever its own arguments and environment variables are.
    pub directories: Option<Directories>,
}

/// The directories of a machine's agent, which are absolute paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directories {
    /// The files of units.
    pub units: PathBuf,
    /// The machine's key and certificate.
    pub data: PathBuf,
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
    #[serde(rename = "units-dir", default, skip_serializing_if = "Option::is_none")]
    units_dir: Option<String>,
    #[serde(rename = "data-dir", default, skip_serializing_if = "Option::is_none")]
    data_dir: Option<String>,
}

impl Directories {
    /// Paths that are not UTF-8 cannot be written as JSON.
    fn to_text(&self) -> Option<[String; 2]> {
        Some([self.units.to_str()?.to_owned(), self.data.to_str()?.to_owned()])
    }

    fn parse(units: Option<String>, data: Option<String>) -> Option<Self> {
        let (units, data) = (PathBuf::from(units?), PathBuf::from(data?));
        (units.is_absolute() && data.is_absolute()).then_some(Self { units, data })
    }
}

impl MachineFile {
    pub fn render(&self) -> String {
        let [units_dir, data_dir] = self
            .directories
            .as_ref()
            .and_then(Directories::to_text)
            .map_or([None, None], |texts| texts.map(Some));
        let wire = Wire {
            zookeeper: self.address.to_string(),
            auth: self.credential.expose(),
            operator: self.roles.operator.as_str().to_owned(),
            controller: self.roles.controller.as_str().to_owned(),
            ca: self.address.ca().map(str::to_owned),
            units_dir,
            data_dir,
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
            directories: Directories::parse(wire.units_dir, wire.data_dir),
        })
    }
}
