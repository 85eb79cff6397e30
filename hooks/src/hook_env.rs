//! Reads the environment of a hook: the unit, the address of the store, and the unit's secret,
//! which is in a file that only its owner may read. The secret never comes from an argument and is
//! never printed.

use crate::Tool;
use portcullis::model::{EnvironmentName, InvalidName, UnitId, UnitName};
use portcullis::store::tree;
use portcullis::store::{Address, Credential};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const UNIT: &str = "JUJU_UNIT_NAME";
const STORE: &str = "JUJU_ZOOKEEPER";
const ENVIRONMENT: &str = "JUJU_ENV";
const CREDENTIALS: &str = "JUJU_CREDENTIALS";

/// Size limit of the credentials file, far above the size of a valid one.
const MAX_FILE: u64 = 64 * 1024;

#[derive(Debug)]
pub(crate) struct HookEnv {
    pub(crate) unit: UnitId,
    pub(crate) address: Address,
    pub(crate) credential: Credential,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum HookEnvError {
    #[error("{name} is not set; {tool} is for hooks to call")]
    Missing { name: &'static str, tool: &'static str },
    #[error("{0} is not UTF-8")]
    NotText(&'static str),
    #[error("{name}")]
    Name { name: &'static str, source: InvalidName },
    #[error("{STORE}")]
    Address(#[source] tree::Error),
    #[error("cannot read the credentials in {}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error(
        "the credentials in {} can be read by others: the mode is {mode:03o}, and must be 600",
        path.display()
    )]
    Open { path: PathBuf, mode: u32 },
    /// Does not quote the content, which may hold a secret.
    #[error("the credentials in {} are not {{\"unit\": ..., \"auth\": \"unit-...:SECRET\"}}", path.display())]
    Malformed { path: PathBuf },
    #[error("the credentials in {} are those of {found}, not of {wanted}", path.display())]
    OtherUnit { path: PathBuf, found: UnitName, wanted: UnitName },
}

impl HookEnv {
    pub(crate) fn read(tool: Tool, env: impl Fn(&str) -> Option<OsString>) -> Result<Self, HookEnvError> {
        let raw = |name: &'static str| {
            env(name)
                .filter(|value| !value.is_empty())
                .ok_or(HookEnvError::Missing { name, tool: tool.name() })
        };
        let text = |name: &'static str| raw(name)?.into_string().map_err(|_| HookEnvError::NotText(name));
        let unit: UnitName =
            text(UNIT)?.parse().map_err(|source| HookEnvError::Name { name: UNIT, source })?;
        let address = text(STORE)?.parse().map_err(HookEnvError::Address)?;
        // Not needed here, but an invalid name means that this is not the environment of a hook.
        text(ENVIRONMENT)?
            .parse::<EnvironmentName>()
            .map_err(|source| HookEnvError::Name { name: ENVIRONMENT, source })?;
        let (id, credential, ca) = read_credentials(Path::new(&raw(CREDENTIALS)?), &unit)?;
        Ok(Self { unit: id, address: Address::with_ca(address, ca.as_deref()), credential })
    }
}

/// Returns the unit's id, its credential, and the CA of the store's servers if the file has one.
fn read_credentials(
    path: &Path,
    unit: &UnitName,
) -> Result<(UnitId, Credential, Option<String>), HookEnvError> {
    let unreadable = |source| HookEnvError::Unreadable { path: path.to_owned(), source };
    let malformed = || HookEnvError::Malformed { path: path.to_owned() };
    // Opening a pipe, for example, could block forever.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(malformed());
    }
    let file = File::open(path).map_err(unreadable)?;
    // Of the open file: the path may refer to another file by now.
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.mode() & 0o077 != 0 {
        return Err(HookEnvError::Open { path: path.to_owned(), mode: metadata.mode() & 0o777 });
    }
    let mut data = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut data).map_err(unreadable)?;
    if data.len() as u64 > MAX_FILE {
        return Err(malformed());
    }
    let value: Value = serde_json::from_slice(&data).map_err(|_| malformed())?;
    let text = |key: &str| value.get(key).and_then(Value::as_str).ok_or_else(malformed);
    let found: UnitName = text("unit")?.parse().map_err(|_| malformed())?;
    let credential = Credential::parse(text("auth")?).map_err(|_| malformed())?;
    let id = UnitId::from_key(credential.user()).map_err(|_| malformed())?;
    if found != *unit {
        return Err(HookEnvError::OtherUnit { path: path.to_owned(), found, wanted: unit.clone() });
    }
    Ok((id, credential, value.get("ca").and_then(Value::as_str).map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    struct Given {
        dir: tempfile::TempDir,
        unit: Option<&'static str>,
        store: &'static str,
        environment: &'static str,
        file: &'static str,
        mode: u32,
    }

    const FILE: &str = r#"{"unit": "web/0", "auth": "unit-0000000007:hunter2"}"#;

    fn given() -> Given {
        let dir = tempfile::tempdir().unwrap();
        Given { dir, unit: Some("web/0"), store: "a:1", environment: "local", file: FILE, mode: 0o600 }
    }

    impl Given {
        fn read(&self) -> Result<HookEnv, String> {
            let path = self.dir.path().join("credentials");
            fs::write(&path, self.file).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(self.mode)).unwrap();
            HookEnv::read(Tool::OpenPort, |name| match name {
                UNIT => self.unit.map(OsString::from),
                STORE => Some(self.store.into()),
                ENVIRONMENT => Some(self.environment.into()),
                CREDENTIALS => Some(path.clone().into()),
                _ => None,
            })
            .map_err(|e| {
                let chain = e.to_string()
                    + &std::error::Error::source(&e).map_or(String::new(), |s| format!(": {s}"));
                assert!(!chain.contains("hunter2"), "a secret in {chain}");
                chain.replace(&self.dir.path().display().to_string(), "DIR")
            })
        }
    }

    #[test]
    fn environment_of_a_hook_is_read() {
        let read = given().read().unwrap();
        assert_eq!(read.unit, UnitId::new(7));
        assert_eq!(read.address.to_string(), "a:1");
        assert_eq!(read.credential.expose(), "unit-0000000007:hunter2");
    }

    #[test]
    fn errors_name_the_invalid_value() {
        let malformed =
            "the credentials in DIR/credentials are not {\"unit\": ..., \"auth\": \"unit-...:SECRET\"}";
        for (given, text) in [
            (Given { unit: None, ..given() }, "JUJU_UNIT_NAME is not set; open-port is for hooks to call"),
            (
                Given { unit: Some(""), ..given() },
                "JUJU_UNIT_NAME is not set; open-port is for hooks to call",
            ),
            (
                Given { unit: Some("web"), ..given() },
                "JUJU_UNIT_NAME: Invalid unit name \"web\": it has the form SERVICE/NUMBER",
            ),
            (
                Given { store: "a:b", ..given() },
                "JUJU_ZOOKEEPER: 'a:b' is not the address of a store: a port is not a number",
            ),
            (
                Given { environment: "a/b", ..given() },
                "JUJU_ENV: Invalid environment name \"a/b\": it takes letters, digits, '-', '_' \
                 and '.', and starts \
                 with a letter or a digit",
            ),
            (
                Given { mode: 0o640, ..given() },
                "the credentials in DIR/credentials can be read by others: the mode is 640, and must be 600",
            ),
            (
                Given { mode: 0o604, ..given() },
                "the credentials in DIR/credentials can be read by others: the mode is 604, and must be 600",
            ),
            (Given { file: "", ..given() }, malformed),
            (Given { file: "hunter2", ..given() }, malformed),
            (Given { file: r#"{"unit": "web/0", "auth": "operator:hunter2"}"#, ..given() }, malformed),
            (Given { file: r#"{"unit": "web/0", "auth": ["hunter2"]}"#, ..given() }, malformed),
            (
                Given { unit: Some("web/1"), ..given() },
                "the credentials in DIR/credentials are those of web/0, not of web/1",
            ),
        ] {
            assert_eq!(given.read().map(|_| ()), Err(text.to_owned()));
        }
        let mut large = given();
        let file = FILE.to_owned() + &" ".repeat(70_000);
        large.file = file.leak();
        assert_eq!(large.read().map(|_| ()), Err(malformed.to_owned()));
    }

    #[test]
    fn error_names_a_missing_file() {
        let result = HookEnv::read(Tool::OpenPort, |name| {
            let value = match name {
                UNIT => "web/0",
                STORE => "a:1",
                ENVIRONMENT => "local",
                _ => "/nonexistent/credentials",
            };
            Some(value.into())
        });
        assert_eq!(
            result.unwrap_err().to_string(),
            "cannot read the credentials in /nonexistent/credentials"
        );
    }
}
