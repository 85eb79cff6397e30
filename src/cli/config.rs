//! Saved environments: the address of the store and the credentials, one file per environment and
//! role, mode 0600, in the user's configuration directory. No store is contacted here.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file::{self, Privacy};
use crate::model::{EnvironmentName, MachineId};
use crate::runtime::trusted_file::{self, ReadError};
use crate::store::Credential;

/// Maximum size of a file; addresses, a secret and a certificate need much less.
const MAX_BYTES: usize = 64 * 1024;

/// The ends of the names of an environment's other files.
const RESERVED: [&str; 2] = ["-controller", "-authority"];

/// Role that the credentials in a file belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Operator,
    /// Of the controller and the heartbeat tracker.
    Controller,
}

impl Role {
    /// The user of the credentials, and the DNS name of the certificate.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Controller => "controller",
        }
    }
}

/// The contents of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SavedEnvironment {
    /// The connect string, with its chroot if it has one.
    pub(super) zookeeper: String,
    pub(super) credential: Credential,
    /// Id of the tree that the environment was created in; `None` before that. A tree with another
    /// id is another environment.
    pub(super) cluster_id: Option<String>,
    /// The CA certificate (PEM) of the store's servers, for a `tls://` address.
    pub(super) ca: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConfigError {
    #[error("cannot find the configuration directory: neither XDG_CONFIG_HOME nor HOME is an absolute path")]
    NoHome,
    #[error(
        "invalid environment name '{0}': names that end in '-controller' or '-authority' are reserved for \
         files of other environments"
    )]
    ReservedName(EnvironmentName),
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The parser's message is left out, since it could quote the secret.
    #[error("{} is not an environment file: {problem} at line {line}", path.display())]
    Garbage { path: PathBuf, problem: &'static str, line: usize },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

#[derive(Serialize, Deserialize)]
struct Wire {
    zookeeper: String,
    auth: String,
    #[serde(rename = "cluster-id", default, skip_serializing_if = "Option::is_none")]
    cluster_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca: Option<String>,
}

/// The directory with the files of all environments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConfigDir(PathBuf);

impl ConfigDir {
    pub(super) fn of_this_user() -> Result<Self, ConfigError> {
        Self::from_vars(env::var_os("XDG_CONFIG_HOME"), env::var_os("HOME"))
    }

    /// The directory of installed services.
    pub(super) fn of_services() -> Self {
        Self::below(Path::new("/etc"))
    }

    /// Below a directory that replaces the user's own.
    pub(super) fn below(base: &Path) -> Self {
        Self(base.join("portcullis"))
    }

    /// The XDG rule: a relative or empty value counts as unset.
    fn from_vars(xdg: Option<OsString>, home: Option<OsString>) -> Result<Self, ConfigError> {
        let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute(xdg).or_else(|| absolute(home).map(|home| home.join(".config")));
        base.map(|base| Self(base.join("portcullis"))).ok_or(ConfigError::NoHome)
    }

    pub(super) fn path(&self, environment: &EnvironmentName, role: Role) -> Result<PathBuf, ConfigError> {
        if RESERVED.iter().any(|end| environment.as_str().ends_with(end)) {
            return Err(ConfigError::ReservedName(environment.clone()));
        }
        Ok(self.0.join(match role {
            Role::Operator => format!("{environment}.json"),
            Role::Controller => format!("{environment}-controller.json"),
        }))
    }

    /// File with the key of the environment's authority.
    pub(super) fn authority(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-authority.json"))
    }

    /// Directory with the certificates of the operator and the controller.
    pub(super) fn identity(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-identity"))
    }

    /// Directory with notes of commands whose outcome is unknown.
    pub(super) fn idempotency_notes(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-unanswered"))
    }

    /// File with the credentials of a machine, for its agent.
    pub(super) fn machine(&self, environment: &EnvironmentName, id: MachineId) -> PathBuf {
        self.machines(environment).join(format!("{}.json", id.key()))
    }

    pub(super) fn machines(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-machines"))
    }

    /// Directory with the credentials of operators that were added on this host.
    pub(super) fn operators(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-operators"))
    }

    /// Directory in which `hook-env` saves the credentials of units.
    pub(super) fn units(&self, environment: &EnvironmentName) -> PathBuf {
        self.0.join(format!("{environment}-units"))
    }

    pub(super) fn read(
        &self,
        environment: &EnvironmentName,
        role: Role,
    ) -> Result<Option<SavedEnvironment>, ConfigError> {
        let path = self.path(environment, role)?;
        trusted_file::read_secret(&path, MAX_BYTES)?.map(|bytes| parse(&path, &bytes)).transpose()
    }

    /// Saves `made` unless a file exists already, and returns the contents of the file. Two
    /// processes that call this at the same time return the same contents.
    pub(super) fn ensure(
        &self,
        environment: &EnvironmentName,
        role: Role,
        made: &SavedEnvironment,
    ) -> Result<SavedEnvironment, ConfigError> {
        let path = self.path(environment, role)?;
        let failed = |source| ConfigError::Write { path: path.clone(), source };
        file::ensure_private_dir(&self.0).map_err(failed)?;
        let created = file::create_new(&path, render(made).as_bytes(), Privacy::Secret).map_err(failed)?;
        if created {
            return Ok(made.clone());
        }
        match self.read(environment, role)? {
            Some(saved) => Ok(saved),
            None => Err(failed(std::io::ErrorKind::NotFound.into())),
        }
    }

    /// Removes a file if it still has these `contents`.
    pub(super) fn forget(
        &self,
        environment: &EnvironmentName,
        role: Role,
        contents: &SavedEnvironment,
    ) -> Result<(), ConfigError> {
        if self.read(environment, role)?.as_ref() != Some(contents) {
            return Ok(());
        }
        let path = self.path(environment, role)?;
        std::fs::remove_file(&path).map_err(|source| ConfigError::Write { path, source })
    }

    /// Replaces the contents of a file.
    pub(super) fn replace(
        &self,
        environment: &EnvironmentName,
        role: Role,
        saved: &SavedEnvironment,
    ) -> Result<(), ConfigError> {
        let path = self.path(environment, role)?;
        let failed = |source| ConfigError::Write { path: path.clone(), source };
        file::ensure_private_dir(&self.0).map_err(failed)?;
        file::replace(&path, render(saved).as_bytes(), Privacy::Secret).map_err(failed)
    }
}

pub(super) fn render(saved: &SavedEnvironment) -> String {
    let wire = Wire {
        zookeeper: saved.zookeeper.clone(),
        auth: saved.credential.expose(),
        cluster_id: saved.cluster_id.clone(),
        ca: saved.ca.clone(),
    };
    // A struct of strings always serializes.
    let mut text = serde_json::to_string(&wire).expect("strings");
    text.push('\n');
    text
}

fn parse(path: &Path, bytes: &[u8]) -> Result<SavedEnvironment, ConfigError> {
    let garbage = |problem, line| ConfigError::Garbage { path: path.to_owned(), problem, line };
    let wire: Wire = serde_json::from_slice(bytes).map_err(|error| {
        let problem =
            if error.is_data() { "\"zookeeper\" or \"auth\" is missing or not a string" } else { "not JSON" };
        garbage(problem, error.line())
    })?;
    let credential = Credential::parse(&wire.auth).map_err(|_| garbage("\"auth\" is not USER:SECRET", 1))?;
    Ok(SavedEnvironment { zookeeper: wire.zookeeper, credential, cluster_id: wire.cluster_id, ca: wire.ca })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn environment(name: &str) -> EnvironmentName {
        name.parse().unwrap()
    }

    fn saved(secret: &str) -> SavedEnvironment {
        SavedEnvironment {
            zookeeper: "127.0.0.1:2181".into(),
            credential: Credential::parse(&format!("operator:{secret}")).unwrap(),
            cluster_id: None,
            ca: None,
        }
    }

    #[test]
    fn the_directory_follows_xdg() {
        let dir = |xdg: &str, home: &str| {
            let set = |text: &str| (!text.is_empty()).then(|| OsString::from(text));
            ConfigDir::from_vars(set(xdg), set(home)).map(|dir| dir.0)
        };
        assert_eq!(dir("/x", "/home/u").unwrap(), Path::new("/x/portcullis"));
        assert_eq!(dir("", "/home/u").unwrap(), Path::new("/home/u/.config/portcullis"));
        assert_eq!(dir("rel", "/home/u").unwrap(), Path::new("/home/u/.config/portcullis"));
        assert!(matches!(dir("", ""), Err(ConfigError::NoHome)));
    }

    #[test]
    fn the_first_saved_credentials_stay() {
        let home = tempfile::tempdir().unwrap();
        let dir = ConfigDir(home.path().join("portcullis"));
        let local = environment("local");
        assert_eq!(dir.read(&local, Role::Operator).unwrap(), None);
        assert_eq!(dir.ensure(&local, Role::Operator, &saved("one")).unwrap(), saved("one"));
        assert_eq!(dir.ensure(&local, Role::Operator, &saved("two")).unwrap(), saved("one"));
        assert_eq!(dir.read(&local, Role::Operator).unwrap(), Some(saved("one")));
        assert_eq!(dir.read(&local, Role::Controller).unwrap(), None);
        dir.replace(&local, Role::Operator, &saved("three")).unwrap();
        assert_eq!(dir.read(&local, Role::Operator).unwrap(), Some(saved("three")));
        let path = dir.path(&local, Role::Operator).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"zookeeper\":\"127.0.0.1:2181\",\"auth\":\"operator:three\"}\n");
        let made = SavedEnvironment { cluster_id: Some("c1".to_owned()), ..saved("three") };
        dir.replace(&local, Role::Operator, &made).unwrap();
        assert_eq!(dir.read(&local, Role::Operator).unwrap(), Some(made));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&dir.0)), (0o600, 0o700));
    }

    #[test]
    fn invalid_files_are_named_but_not_quoted() {
        let home = tempfile::tempdir().unwrap();
        let dir = ConfigDir(home.path().to_owned());
        let local = environment("local");
        let path = dir.path(&local, Role::Operator).unwrap();
        for (contents, problem) in [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("\"operator:hunter2\"", "\"zookeeper\" or \"auth\" is missing or not a string"),
            (
                "{\"zookeeper\": \"a\", \"auth\": [\"hunter2\"]}",
                "\"zookeeper\" or \"auth\" is missing or not a string",
            ),
            ("{\"zookeeper\": \"a\", \"auth\": \"hunter2\"}", "\"auth\" is not USER:SECRET"),
        ] {
            file::replace(&path, contents.as_bytes(), Privacy::Secret).unwrap();
            let text = dir.read(&local, Role::Operator).expect_err("refused").to_string();
            assert!(text.contains(problem) && text.contains("local.json"), "{text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn environment_names_of_other_files_are_reserved() {
        let dir = ConfigDir("/nowhere".into());
        for name in ["prod-controller", "prod-authority"] {
            assert!(dir.path(&environment(name), Role::Operator).is_err());
        }
    }
}
