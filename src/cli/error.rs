//! Errors of commands, and the exit code of each. It depends on the type of the error, never on its
//! text.

mod hints;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use crate::cli::output;
use crate::model::{Cidr, EnvironmentName, MachineId};
use crate::net::tls::probe::HandshakeFailure;
use crate::store;
use crate::store::tree;

pub(super) use self::hints::hint;

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
    #[error("the store was not accepted for {}", unreadable_words(problems))]
    NotAccepted { problems: Vec<String> },
    #[error("no credentials for machine {machine}: {} does not exist", path.display())]
    NoMachineFile { machine: MachineId, path: PathBuf },
    #[error("machine {machine} has no directory {} with units", directory.display())]
    NoUnitsDirectory { environment: EnvironmentName, machine: MachineId, directory: PathBuf },
    #[error("{} is not a machine file: {problem}", path.display())]
    GarbledMachineFile { path: PathBuf, problem: &'static str },
    #[error("{} is not the file of an authority: {problem}", path.display())]
    GarbledAuthority { path: PathBuf, problem: String },
    #[error("{} holds the key of another authority than the environment's", path.display())]
    OtherAuthority { path: PathBuf },
    #[error(
        "environment '{environment}' has an authority, according to {}, but {} does not exist",
        shown_by.display(), path.display()
    )]
    NoAuthority { environment: EnvironmentName, shown_by: PathBuf, path: PathBuf },
    #[error("no certificate for the listener on {listen}: {} does not exist", path.display())]
    NoListenerCertificate { listen: std::net::SocketAddr, path: PathBuf },
    #[error("machine {machine} has not requested a certificate")]
    NoRequest { machine: MachineId },
    #[error("no controller with the authority's key answered the request of machine {machine}")]
    NoIssuer { machine: MachineId },
    #[error("no certificate for machine {machine}: {reason}")]
    NoCertificate { machine: MachineId, reason: String },
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
    #[cfg(not(feature = "fleet"))]
    #[error("this build does not support D-Bus")]
    NoFleet,
    #[cfg(feature = "fleet")]
    #[error("{verb} of '{unit}' on node '{node}' ended with the result '{result}'")]
    SystemdJob { verb: String, unit: String, node: String, result: String },
    #[cfg(feature = "fleet")]
    #[error("no machine is the node '{name}'")]
    NoNode { name: crate::model::NodeName },
    #[cfg(feature = "fleet")]
    #[error("no manager has led in environment '{environment}'")]
    NoManager { environment: EnvironmentName },
    #[cfg(feature = "fleet")]
    #[error("no certificate of the operator: {} does not exist", path.display())]
    NoOperatorCertificate { path: PathBuf },
    #[cfg(feature = "fleet")]
    #[error("node '{node}' has no systemd unit '{unit}'")]
    NoSystemdUnit { unit: String, node: String },
    #[error("'{text}' has bits set outside its prefix")]
    HostBits { text: String, block: Cidr },
    #[error("machine {machine} was terminated; it has left its environment, and {units} units were removed")]
    Left { machine: MachineId, units: usize },
    #[error("machine {machine} was terminated, but nothing is removed: {reason}")]
    UntrustedTombstone { machine: MachineId, reason: String },
    #[error("this host is machine {machine} already: {} exists", path.display())]
    AlreadyJoined { environment: EnvironmentName, machine: MachineId, path: PathBuf },
    #[error("--service installs a systemd service, which requires root")]
    ServiceNeedsRoot,
    #[error("--service requires systemd, which does not run on this host")]
    NoSystemd,
    #[error("{host} is not the store that the token is for: {why}")]
    OtherStoreThanToken { machine: MachineId, host: String, why: HandshakeFailure },
    #[error("the token cannot verify the store at {host}: {}", HandshakeFailure::NoCa)]
    NoCaToVerify { host: String },
    #[error(
        "the CA file of the store has {count} certificates, and a token names the only one that signs the \
         store's certificate"
    )]
    SeveralCas { count: usize },
    #[error("the store at {address} did not answer in {seconds} s")]
    TooSlow { address: String, seconds: u64 },
}

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

/// Exit code of an agent that has left its environment or has no credentials: its service is not
/// started again.
const LEFT: u8 = 3;

fn code(error: &anyhow::Error) -> u8 {
    let is_usage = |link: &(dyn std::error::Error + 'static)| {
        link.is::<Usage>() || matches!(link.downcast_ref(), Some(Refusal::HostBits { .. }))
    };
    let has_left = |link: &(dyn std::error::Error + 'static)| {
        matches!(link.downcast_ref(), Some(Refusal::Left { .. } | Refusal::NoMachineFile { .. }))
    };
    match () {
        () if error.chain().any(is_usage) => 2,
        () if error.chain().any(has_left) => LEFT,
        () => 1,
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

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
