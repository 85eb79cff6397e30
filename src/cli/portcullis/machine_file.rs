//! The machine file: address and credentials of a machine's agent, mode 0600. It comes with the
//! machine's user data, is copied by hand, or is created where the operator's credentials are.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tracing::warn;

use crate::cli::args::environment::{Globals, Target};
use crate::cli::config::ConfigDir;
use crate::cli::error::Refusal;
use crate::cli::file::{self, Privacy};
use crate::machine::file::{Directories, MachineFile};
use crate::model::MachineId;
use crate::runtime::trusted_file;
use crate::store::{self, Address, Environment, ZkTree};

/// Maximum size of the file; addresses, a secret, hashes and a certificate need much less.
const MAX_BYTES: usize = 64 * 1024;

/// Reads the machine's credential as the operator or the controller.
pub(in crate::cli) async fn of_machine(
    environment: &Environment<ZkTree>,
    address: &Address,
    machine: MachineId,
) -> anyhow::Result<MachineFile> {
    let credential = environment.machine_credential(machine).await?;
    let (address, roles) = (address.clone(), environment.info().roles.clone());
    Ok(MachineFile { address, credential, roles, directories: None })
}

/// Returns None if there is no such file. No message quotes its content.
pub(in crate::cli) fn read(path: &Path) -> anyhow::Result<Option<MachineFile>> {
    let Some(bytes) = trusted_file::read_secret(path, MAX_BYTES)? else { return Ok(None) };
    let file = MachineFile::parse(&bytes)
        .map_err(|error| Refusal::GarbledMachineFile { path: path.to_owned(), problem: error.0 })?;
    Ok(Some(file))
}

/// Returns the path of a machine file: the named one, or that of the configuration directory.
pub(in crate::cli) fn path(
    globals: &Globals,
    machine: MachineId,
    named: Option<&Path>,
) -> anyhow::Result<PathBuf> {
    match named {
        Some(path) => Ok(path.to_owned()),
        None => Ok(globals.config()?.machine(&globals.environment()?, machine)),
    }
}

/// Returns the saved machine file, without a connection to the store.
fn saved(path: PathBuf, machine: MachineId) -> anyhow::Result<MachineFile> {
    Ok(read(&path)?.ok_or(Refusal::NoMachineFile { machine, path })?)
}

/// Returns the saved machine file and its path: the named one, or that of the configuration
/// directory or, if there is none, that of an installed service.
pub(in crate::cli) fn installed(
    globals: &Globals,
    machine: MachineId,
    named: Option<&Path>,
) -> anyhow::Result<(MachineFile, PathBuf)> {
    let mut path = path(globals, machine, named)?;
    if named.is_none() && !path.exists() {
        let of_service = ConfigDir::of_services().machine(&globals.environment()?, machine);
        path = Some(of_service).filter(|path| path.exists()).unwrap_or(path);
    }
    Ok((saved(path.clone(), machine)?, path))
}

/// Saves the directories of the agent in its machine file, if there is one.
pub(in crate::cli) fn save_directories(path: &Path, directories: Directories) {
    if let Ok(Some(kept)) = read(path) {
        save(path, &MachineFile { directories: Some(directories), ..kept });
    }
}

/// Returns the machine file: the named one; or one from the tree, if this user is the operator,
/// which is also saved for times without a store; or the saved one.
pub(in crate::cli) async fn ensure(
    globals: &Globals,
    machine: MachineId,
    named: Option<&Path>,
) -> anyhow::Result<MachineFile> {
    let target = globals.target()?;
    let path = path(globals, machine, named)?;
    if named.is_none() && target.saved.is_some() {
        let work = async |target: &Target, environment: &Environment<ZkTree>| {
            of_machine(environment, &target.address, machine).await
        };
        match globals.in_environment(work).await {
            Ok(mut made) => {
                made.directories = read(&path).ok().flatten().and_then(|kept| kept.directories);
                save(&path, &made);
                return Ok(made);
            }
            // The agent of a terminated machine reads its tombstone with the saved file.
            Err(error) if is_not_found(&error) && path.exists() => {}
            Err(error) if !store::is_transient(error.as_ref()) => return Err(error),
            Err(error) => warn!("store unreachable, using the saved machine file: {error:#}"),
        }
    }
    let kept = saved(path, machine)?;
    let ca = kept.address.ca().map(str::to_owned);
    let address = globals.address_arg()?.map(|given| match given.ca() {
        None => given.with_ca(ca.as_deref()),
        Some(_) => given,
    });
    let address = address.unwrap_or(kept.address);
    Ok(MachineFile { address, ..kept })
}

fn is_not_found(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(store::Error::MachineNotFound(_)))
}

/// Saves the file if it has changed. The agent also runs without the saved file, for example on a
/// full disk.
fn save(path: &Path, made: &MachineFile) {
    if matches!(read(path), Ok(Some(kept)) if kept == *made) {
        file::remove_unfinished(path);
        return;
    }
    if let Err(error) = write(path, made) {
        warn!("machine file not saved; without the store, the next start will fail: {error:#}");
    }
}

pub(in crate::cli) fn write(path: &Path, contents: &MachineFile) -> anyhow::Result<()> {
    let directory = path.parent().unwrap_or(path);
    file::ensure_private_dir(directory)
        .and_then(|()| file::replace(path, contents.render().as_bytes(), Privacy::Secret))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a file, if it exists.
pub(in crate::cli) fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.with_context(|| format!("cannot remove {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::store::Credential;
    use crate::store::acl::Roles;

    #[test]
    fn invalid_machine_files_are_refused_without_quoting_them() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("machines").join("machine.json");
        assert_eq!(read(&path).unwrap(), None);
        let identity = |user: &str| Credential::generate(user).unwrap().identity();
        let file = MachineFile {
            address: "zk1:2181,zk2:2181/prod".parse().unwrap(),
            credential: Credential::parse("machine-0000000003:hunter2").unwrap(),
            roles: Roles { operator: identity("operator"), controller: identity("controller") },
            directories: None,
        };
        write(&path, &file).unwrap();
        assert_eq!(read(&path).unwrap(), Some(file.clone()));
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
            let refusal = format!("{:#}", read(&path).unwrap_err());
            assert!(refusal.contains("machine.json") && !refusal.contains("hunter2"), "{refusal}");
        }
        file::replace(&path, whole.as_bytes(), Privacy::Plain).unwrap();
        assert!(read(&path).is_err(), "others can read it");
        save(&path, &file);
        assert_eq!(read(&path).unwrap(), Some(file.clone()));
        let number = || fs::metadata(&path).unwrap().ino();
        let before = number();
        save(&path, &file);
        assert_eq!(number(), before, "an unchanged file is not written again");
        let directories = Directories { units: "/var/lib/u".into(), data: "/var/lib/d".into() };
        save_directories(&path, directories.clone());
        let kept = MachineFile { directories: Some(directories), ..file };
        assert_eq!(read(&path).unwrap(), Some(kept));
        save_directories(
            &home.path().join("none.json"),
            Directories { units: "/u".into(), data: "/d".into() },
        );
        assert!(!home.path().join("none.json").exists());
    }
}
