//! Who a machine is to the store: one file, 0600, that its agent starts from. It comes with the machine's user data, is
//! copied there by hand, or is made on the spot where the operator's own credentials are.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::failure::Refusal;
use super::file::{self, Privacy};
use super::settings::{Globals, Settings};
use crate::model::MachineId;
use crate::store::acl::Roles;
use crate::store::{self, Address, Credential, Environment, Identity, ZkTree, tree};

/// More than addresses, a secret and two hashes will ever need.
const MAX_BYTES: usize = 16 * 1024;

/// What a machine's agent starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MachineFile {
    pub(super) address: Address,
    pub(super) credential: Credential,
    /// Who else may read what the machine writes. Hashes, not secrets.
    pub(super) roles: Roles,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    zookeeper: String,
    auth: String,
    operator: String,
    controller: String,
}

impl MachineFile {
    /// As whoever may read the machine's secret.
    pub(super) async fn of(
        environment: &Environment<ZkTree>,
        address: &Address,
        machine: MachineId,
    ) -> anyhow::Result<Self> {
        let credential = environment.machine_credential(machine).await?;
        Ok(Self { address: address.clone(), credential, roles: environment.info().roles.clone() })
    }

    pub(super) fn render(&self) -> String {
        let wire = Wire {
            zookeeper: self.address.to_string(),
            auth: self.credential.expose(),
            operator: self.roles.operator.as_str().to_owned(),
            controller: self.roles.controller.as_str().to_owned(),
        };
        // Four strings are always JSON.
        let mut text = serde_json::to_string(&wire).expect("four strings");
        text.push('\n');
        text
    }

    /// None if there is no such file. No message quotes what is in it.
    fn read(path: &Path) -> anyhow::Result<Option<Self>> {
        let Some(bytes) = file::read_secret(path, MAX_BYTES)? else { return Ok(None) };
        let garbage =
            |what: &'static str| move || Refusal::GarbledMachineFile { path: path.to_owned(), problem: what };
        let wire: Wire =
            serde_json::from_slice(&bytes).ok().with_context(garbage("not all keys are there"))?;
        let identity = |text: &str| Identity::parse(text).ok();
        let operator = identity(&wire.operator).with_context(garbage("\"operator\" is no identity"))?;
        let controller = identity(&wire.controller).with_context(garbage("\"controller\" is no identity"))?;
        Ok(Some(Self {
            address: wire.zookeeper.parse().ok().with_context(garbage("\"zookeeper\" is no address"))?,
            credential: Credential::parse(&wire.auth)
                .ok()
                .with_context(garbage("\"auth\" is no credential"))?,
            roles: Roles { operator, controller },
        }))
    }
}

/// Who a machine is: what the file says that was named; or what the tree says, where this user is the operator, kept for
/// a time when the store is not there; or what was kept or copied here.
pub(super) async fn ensure(
    globals: &Globals,
    machine: MachineId,
    named: Option<&Path>,
) -> anyhow::Result<MachineFile> {
    let settings = globals.settings()?;
    let path = match named {
        Some(path) => path.to_owned(),
        None => settings.config.machine(&settings.environment, machine),
    };
    if named.is_none() && settings.remembered.is_some() {
        let work = async |settings: &Settings, environment: &Environment<ZkTree>| {
            MachineFile::of(environment, &settings.address, machine).await
        };
        match globals.in_environment(work).await {
            Ok(made) => {
                write(&path, &made)?;
                return Ok(made);
            }
            Err(error) if !is_away(&error) => return Err(error),
            Err(error) => warn!("the store is away: {error:#}"),
        }
    }
    let kept = MachineFile::read(&path)?.ok_or(Refusal::NoMachineFile { machine, path })?;
    let address = globals.typed_address()?.unwrap_or(kept.address);
    Ok(MachineFile { address, ..kept })
}

fn is_away(error: &anyhow::Error) -> bool {
    let away = |error: &tree::Error| error.is_retryable();
    error.chain().any(|link| match link.downcast_ref::<store::Error>() {
        Some(store::Error::Tree(inner)) => away(inner),
        _ => link.downcast_ref::<tree::Error>().is_some_and(away),
    })
}

pub(super) fn write(path: &Path, contents: &MachineFile) -> anyhow::Result<()> {
    let directory = path.parent().unwrap_or(path);
    file::ensure_private_dir(directory)
        .and_then(|()| file::replace(path, contents.render().as_bytes(), Privacy::Secret))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_or_refused_without_an_echo() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("machines").join("machine.json");
        assert_eq!(MachineFile::read(&path).unwrap(), None);
        let identity = |user: &str| Credential::generate(user).unwrap().identity();
        let file = MachineFile {
            address: "zk1:2181,zk2:2181/prod".parse().unwrap(),
            credential: Credential::parse("machine-0000000003:hunter2").unwrap(),
            roles: Roles { operator: identity("operator"), controller: identity("controller") },
        };
        write(&path, &file).unwrap();
        assert_eq!(MachineFile::read(&path).unwrap(), Some(file.clone()));
        let whole = file.render();
        for broken in [
            whole.replace("machine-0000000003:hunter2", "hunter2"),
            whole.replace("zk1:2181", "zk 1"),
            whole.replace("\"operator\":\"operator:", "\"operator\":\"hunter2"),
            whole.replace("\"controller\"", "\"controler\""),
            "hunter2".to_owned(),
        ] {
            assert_ne!(broken, whole);
            file::replace(&path, broken.as_bytes(), Privacy::Secret).unwrap();
            let refusal = format!("{:#}", MachineFile::read(&path).unwrap_err());
            assert!(refusal.contains("machine.json") && !refusal.contains("hunter2"), "{refusal}");
        }
        file::replace(&path, whole.as_bytes(), Privacy::Plain).unwrap();
        assert!(MachineFile::read(&path).is_err(), "others can read it");
    }
}
