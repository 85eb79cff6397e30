//! Errors of commands: the exit code and the hint of each. Both depend on the type of the error,
//! never on its text.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use crate::cli::config::ConfigError;
use crate::cli::output;
use crate::keeper::KeeperError;
use crate::keeper::log::StorageError;
use crate::model::{Cidr, EnvironmentName, MachineId};
use crate::runtime::trusted_file::ReadError;
use crate::runtime::trusted_path;
use crate::store;
use crate::store::tree;

/// Invalid arguments, independent of the state of the store: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct Usage(Box<dyn std::error::Error + Send + Sync>);

impl Usage {
    pub(super) fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(error.into())
    }
}

/// Parses one argument.
pub(super) fn parse_arg<T>(text: &str) -> Result<T, Usage>
where
    T: FromStr,
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    text.parse().map_err(|error: T::Err| Usage(error.into()))
}

/// Errors that commands raise themselves, in addition to those of the store.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("environment '{environment}' is not bootstrapped in the store at {address}")]
    NotBootstrapped { environment: EnvironmentName, address: String },
    #[error("no credentials for environment '{environment}': {} does not exist", path.display())]
    NoCredentials { environment: EnvironmentName, path: PathBuf },
    #[error(
        "the store at {address} is already bootstrapped, with credentials other than those in {}",
        path.display()
    )]
    BootstrappedByOther { address: String, path: PathBuf },
    #[error("only the owner of the store at {address} may create an environment there")]
    NotOurs { address: String },
    #[error("environment '{environment}' belongs to the store at {saved} according to {}", path.display())]
    OtherStore { environment: EnvironmentName, saved: String, path: PathBuf },
    #[error("environment '{environment}' was created in the store at {address}, which no longer contains it")]
    LostTree { environment: EnvironmentName, address: String, path: PathBuf },
    #[error("no charm in {}: metadata.yaml is missing", path.display())]
    NoMetadata { path: PathBuf },
    #[error("policy file {} does not exist", path.display())]
    NoPolicy { path: PathBuf },
    #[error("{}", unreadable_words(problems))]
    Unreadable { problems: Vec<String> },
    #[error("no credentials for machine {machine}: {} does not exist", path.display())]
    NoMachineFile { machine: MachineId, path: PathBuf },
    #[error("{} is not a machine file: {problem}", path.display())]
    GarbledMachineFile { path: PathBuf, problem: &'static str },
    #[error("open-port, close-port and opened-ports are not in {}", directory.display())]
    NoHookTools { directory: PathBuf },
    #[error("environment '{environment}' is in use: {}", used_by(services, machines))]
    EnvironmentInUse { environment: EnvironmentName, services: Vec<String>, machines: Vec<String> },
    #[error("no controller is running for this environment; waited {seconds} s")]
    NoController { seconds: u64 },
    #[error("the controller did not finish in {seconds} s{}", problem_words(problem.as_deref()))]
    NotAnswered { seconds: u64, problem: Option<String> },
    #[error("EC2 settings file {} does not exist", path.display())]
    NoEc2Settings { path: PathBuf },
    #[cfg(not(feature = "ec2"))]
    #[error("this build does not support EC2")]
    NoEc2,
    #[error("'{text}' has bits set outside its prefix")]
    HostBits { text: String, block: Cidr },
    #[error("the store at {address} did not answer in {seconds} s")]
    TooSlow { address: String, seconds: u64 },
}

/// Hint after a lost response: a repeated command line is the same operation (`idempotency_notes`).
const DOUBT: &str = "run the same command again; changes that were already made are not repeated";

/// Whether the command may have taken effect although it failed.
pub(super) fn leaves_doubt(error: &anyhow::Error) -> bool {
    error.chain().any(|link| matches!(link.downcast_ref(), Some(Refusal::TooSlow { .. })))
        || store::tree_error_in(error.as_ref()).is_some_and(tree::Error::is_ambiguous)
}

/// Prints the error with its hint and returns the exit code.
pub(super) fn report(error: &anyhow::Error) -> ExitCode {
    output::error(error);
    if let Some(hint) = hint(error) {
        output::hint(&hint);
    }
    ExitCode::from(code(error))
}

fn code(error: &anyhow::Error) -> u8 {
    let is_usage = |link: &(dyn std::error::Error + 'static)| {
        link.is::<Usage>() || matches!(link.downcast_ref(), Some(Refusal::HostBits { .. }))
    };
    if error.chain().any(is_usage) { 2 } else { 1 }
}

pub(super) fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|link| {
        if let Some(refusal) = link.downcast_ref::<Refusal>() {
            refusal_hint(refusal)
        } else if let Some(ConfigError::Read(refusal)) = link.downcast_ref::<ConfigError>() {
            read_hint(refusal)
        } else if let Some(refusal) = link.downcast_ref::<ReadError>() {
            read_hint(refusal)
        } else if let Some(refusal) = link.downcast_ref::<trusted_path::Error>() {
            refusal.repair()
        } else if let Some(refusal) = link.downcast_ref::<store::Error>() {
            store_hint(refusal)
        } else if let Some(refusal) = link.downcast_ref::<KeeperError>() {
            keeper_hint(refusal)
        } else {
            link.downcast_ref::<tree::Error>().and_then(tree_hint)
        }
    })
}

fn refusal_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::NotBootstrapped { .. } => Some(
            "`juju bootstrap` creates an environment; `portcullis up` runs one on this machine".to_owned(),
        ),
        Refusal::NoCredentials { .. } => Some(
            "copy the file from the host where `juju bootstrap` was run, or name another environment with -e"
                .to_owned(),
        ),
        Refusal::BootstrappedByOther { .. } => Some(
            "a chroot after the hosts, for example HOST:2181/NAME, allows a second environment in that \
             store"
                .to_owned(),
        ),
        Refusal::OtherStore { path, .. } => {
            Some(format!("choose another name with -e, or remove {} if that store is gone", path.display()))
        }
        Refusal::LostTree { path, environment, .. } => Some(format!(
            "restore the store's data; to start again without it, remove {} and the files beside it \
             whose names start with '{environment}-'",
            path.display()
        )),
        Refusal::NoMachineFile { .. } => Some(
            "run `portcullis machine` once on the host with the operator's credentials, then copy the file \
             that it creates"
                .to_owned(),
        ),
        Refusal::NoHookTools { .. } => {
            Some("`cargo build --no-default-features --workspace` builds them beside this program".to_owned())
        }
        Refusal::EnvironmentInUse { .. } => Some(
            "remove them with `juju destroy-service` and `juju terminate-machine`, or all of them with \
                 --force"
                .to_owned(),
        ),
        Refusal::NoController { .. } => Some(
            "start `portcullis controller`, then run this again; destroy-environment takes --leave-instances"
                .to_owned(),
        ),
        Refusal::NotAnswered { .. } => {
            Some("run the command again, or wait longer with --timeout".to_owned())
        }
        Refusal::TooSlow { .. } => Some(DOUBT.to_owned()),
        Refusal::HostBits { text, block } => {
            let address = text.split('/').next().unwrap_or_default();
            Some(format!("--to {block} is the whole block, --to {address} only that address"))
        }
        #[cfg(not(feature = "ec2"))]
        Refusal::NoEc2 => Some("build without --no-default-features to include EC2".to_owned()),
        Refusal::NoMetadata { .. }
        | Refusal::GarbledMachineFile { .. }
        | Refusal::Unreadable { .. }
        | Refusal::NoPolicy { .. }
        | Refusal::NoEc2Settings { .. }
        | Refusal::NotOurs { .. } => None,
    }
}

fn read_hint(refusal: &ReadError) -> Option<String> {
    match refusal {
        ReadError::NotPrivate { path, .. } => Some(format!("chmod 600 {}", path.display())),
        ReadError::Untrusted(refusal) => refusal.repair(),
        _ => None,
    }
}

/// Maximum number of problems in one message.
const SHOWN_PROBLEMS: usize = 5;

fn unreadable_words(problems: &[String]) -> String {
    let shown = problems[..problems.len().min(SHOWN_PROBLEMS)].join("; ");
    match problems.len() - problems.len().min(SHOWN_PROBLEMS) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

fn used_by(services: &[String], machines: &[String]) -> String {
    let list =
        |what: &str, names: &[String]| (!names.is_empty()).then(|| format!("{what} {}", names.join(", ")));
    let parts: Vec<String> =
        [list("services", services), list("machines", machines)].into_iter().flatten().collect();
    parts.join("; ")
}

fn problem_words(problem: Option<&str>) -> String {
    problem.map_or_else(String::new, |problem| format!(": {problem}"))
}

fn store_hint(refusal: &store::Error) -> Option<String> {
    match refusal {
        store::Error::MachineInUse(_) => Some("remove its units first, with `juju remove-unit`".to_owned()),
        store::Error::OtherEnvironment { found, .. } => {
            Some(format!("the store contains environment '{found}': select it with -e {found}"))
        }
        store::Error::Tree(inner) => tree_hint(inner),
        _ => None,
    }
}

fn keeper_hint(refusal: &KeeperError) -> Option<String> {
    match refusal {
        KeeperError::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
            Some("another keeper or ZooKeeper uses this address; choose another with --listen".to_owned())
        }
        KeeperError::Storage(StorageError::InUse { .. }) => {
            Some("a keeper is already running there; choose another directory with --data-dir".to_owned())
        }
        _ => None,
    }
}

fn tree_hint(refusal: &tree::Error) -> Option<String> {
    match refusal {
        tree::Error::Unreachable { .. } => Some(
            "`portcullis up` runs a store on this machine; select another with --zookeeper or JUJU_ZOOKEEPER"
                .to_owned(),
        ),
        tree::Error::NoCa { .. } => Some("name its CA certificate with --ca or JUJU_CA".to_owned()),
        tree::Error::TlsRequired { host } => {
            Some(format!("--zookeeper tls://{host}, and --ca with its CA certificate"))
        }
        tree::Error::Ambiguous { .. } => Some(DOUBT.to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;
    use crate::model::ServiceName;

    #[test]
    fn usage_errors_exit_with_2_and_all_others_with_1() {
        let typed_wrong = anyhow::Error::from(parse_arg::<ServiceName>("a b").expect_err("refused"));
        assert_eq!(code(&typed_wrong), 2);
        assert!(format!("{typed_wrong:#}").starts_with("Invalid service name \"a b\": "), "{typed_wrong:#}");
        let missing: Result<(), _> = Err(store::Error::NotBootstrapped);
        assert_eq!(code(&missing.context("cannot deploy").expect_err("kept")), 1);
    }

    #[test]
    fn host_bits_are_a_usage_error_with_the_canonical_form() {
        let block = "10.0.0.1/8".parse().expect("a block");
        let error = anyhow::Error::from(Refusal::HostBits { text: "10.0.0.1/8".to_owned(), block });
        assert_eq!(code(&error), 2);
        assert_eq!(format!("{error:#}"), "'10.0.0.1/8' has bits set outside its prefix");
        let hint = hint(&error).expect("a hint");
        assert_eq!(hint, "--to 10.0.0.0/8 is the whole block, --to 10.0.0.1 only that address");
    }

    #[test]
    fn hints_are_found_under_any_context() {
        let unreachable = tree::Error::Unreachable { hosts: "a:1".to_owned() };
        for error in [
            anyhow::Error::from(unreachable.clone()),
            anyhow::Error::from(store::Error::from(unreachable)).context("cannot deploy"),
        ] {
            assert!(hint(&error).expect("a hint").contains("portcullis up"));
        }
        assert_eq!(hint(&anyhow::anyhow!("else")), None);
    }
}
