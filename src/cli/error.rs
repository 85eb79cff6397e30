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
use crate::machine::join_token::InvalidToken;
use crate::model::{Cidr, EnvironmentName, MachineId};
use crate::net::tls::probe::HandshakeFailure;
use crate::runtime::trusted_file::ReadError;
use crate::runtime::trusted_path;
use crate::store;
use crate::store::joining::JoinError;
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

/// Hint after a lost response: a repeated command line is the same operation (`idempotency_notes`).
const RUN_AGAIN: &str = "run the same command again; changes that were already made are not repeated";

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
        } else if let Some(refusal) = link.downcast_ref::<JoinError>() {
            join_hint(refusal)
        } else if let Some(InvalidToken::Expired { .. } | InvalidToken::FromTheFuture { .. }) =
            link.downcast_ref::<InvalidToken>()
        {
            Some("check the clock of this machine; `juju machine token N` makes a new token".to_owned())
        } else if let Some(refusal) = link.downcast_ref::<KeeperError>() {
            keeper_hint(refusal)
        } else if let Some(refusal) = link.downcast_ref::<tree::Error>() {
            tree_hint(refusal)
        } else {
            node_hint(link)
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
        Refusal::NoMachineFile { machine, .. } => Some(format!(
            "`juju machine token {machine}` makes a token, with which `portcullis join` writes that file here"
        )),
        Refusal::OtherAuthority { path } => {
            Some(format!("move {} away, or copy the file of the host that bootstrapped", path.display()))
        }
        Refusal::NoListenerCertificate { .. } | Refusal::NoAuthority { .. } => Some(
            "copy that file from the host that bootstrapped, or listen on loopback and name --tls-listen, \
             --tls-cert and --tls-key; --allow-plain-tcp serves plain text"
                .to_owned(),
        ),
        Refusal::NoRequest { machine } => {
            Some(format!("its agent requests one when it starts: `portcullis machine --id {machine}`"))
        }
        Refusal::NoIssuer { .. } => Some(
            "start `portcullis up` or `portcullis controller` where ENV-authority.json is, or run this \
             command there"
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
        Refusal::AlreadyJoined { environment, machine, .. } => Some(format!(
            "`portcullis machine -e {environment} --id {machine} --leave` removes the machine from this host"
        )),
        Refusal::NoUnitsDirectory { environment, machine, .. } => Some(format!(
            "name the --units-dir of its agent: `portcullis machine -e {environment} --id {machine} --leave \
             --units-dir DIR`"
        )),
        Refusal::ServiceNeedsRoot => {
            Some("run the command as root, or without --service; the token was not used".to_owned())
        }
        Refusal::NoSystemd => {
            Some("run the command without --service, and start `portcullis machine`".to_owned())
        }
        Refusal::OtherStoreThanToken { machine, why: HandshakeFailure::OtherCa, .. } => {
            Some(format!("`juju machine token {machine}` makes a token for the store as it is now"))
        }
        Refusal::OtherStoreThanToken { host, why, .. } => handshake_hint(host, why),
        Refusal::NoCaToVerify { host } => handshake_hint(host, &HandshakeFailure::NoCa),
        Refusal::SeveralCas { .. } => {
            Some("name a file with this certificate alone with --ca or JUJU_CA".to_owned())
        }
        Refusal::UntrustedTombstone { machine, .. } => {
            Some(format!("`portcullis machine --id {machine} --leave` removes its units and leaves"))
        }
        Refusal::NoController { .. } => Some(
            "start `portcullis controller`, then run this again; destroy-environment takes --leave-instances"
                .to_owned(),
        ),
        Refusal::NotAnswered { .. } => {
            Some("run the command again, or wait longer with --timeout".to_owned())
        }
        Refusal::TooSlow { .. } => Some(RUN_AGAIN.to_owned()),
        Refusal::HostBits { text, block } => {
            let address = text.split('/').next().unwrap_or_default();
            Some(format!("--to {block} is the whole block, --to {address} only that address"))
        }
        #[cfg(not(feature = "ec2"))]
        Refusal::NoEc2 => Some("build without --no-default-features to include EC2".to_owned()),
        #[cfg(not(feature = "fleet"))]
        Refusal::NoFleet => Some("build with --features fleet to include D-Bus".to_owned()),
        #[cfg(feature = "fleet")]
        Refusal::NoNode { .. } => Some("`juju status` shows the nodes".to_owned()),
        #[cfg(feature = "fleet")]
        Refusal::NoManager { environment } => Some(format!(
            "start `portcullis manager -e {environment}`, or name the bus of another manager with --bus"
        )),
        #[cfg(feature = "fleet")]
        Refusal::NoOperatorCertificate { .. } => {
            Some("copy it from the host where `juju bootstrap` or `juju operator add` was run".to_owned())
        }
        #[cfg(feature = "fleet")]
        Refusal::SystemdJob { unit, node, .. } => {
            Some(format!("`juju node status {node} {unit}` shows its state"))
        }
        #[cfg(feature = "fleet")]
        Refusal::NoSystemdUnit { node, .. } => Some(format!("`juju node units {node}` lists loaded units")),
        Refusal::NoMetadata { .. }
        | Refusal::GarbledMachineFile { .. }
        | Refusal::GarbledAuthority { .. }
        | Refusal::NoCertificate { .. }
        | Refusal::Left { .. }
        | Refusal::Unreadable { .. }
        | Refusal::NotAccepted { .. }
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
        store::Error::AgentDown(machine) => Some(format!(
            "start its agent, or run `juju terminate-machine --force {machine}`; an agent that returns then \
             removes its units and leaves"
        )),
        store::Error::OtherEnvironment { found, .. } => {
            Some(format!("the store contains environment '{found}': select it with -e {found}"))
        }
        store::Error::Tree(inner) => tree_hint(inner),
        _ => None,
    }
}

fn join_hint(refusal: &JoinError) -> Option<String> {
    match refusal {
        JoinError::Unknown(machine) | JoinError::Used { machine, .. } | JoinError::Expired(machine) => {
            Some(format!("`juju machine token {machine}` makes a new one"))
        }
        JoinError::Store(error) => store_hint(error),
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

#[cfg(not(feature = "fleet"))]
fn node_hint(_: &(dyn std::error::Error + 'static)) -> Option<String> {
    None
}

/// The hint after an error of a manager, an agent or systemd on a node.
#[cfg(feature = "fleet")]
fn node_hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    use crate::fleet::client::ClientError;
    use crate::fleet::dbus::errors::{JOB_QUEUED, NO_SUCH_NODE, NO_SUCH_UNIT, OFFLINE, UNIT_MASKED};
    let hint = match error.downcast_ref::<ClientError>()? {
        ClientError::Bus { .. } => "--bus takes system, user or a D-Bus address such as unix:path=/run/bus",
        ClientError::NoManager => "start `portcullis manager`, or select another bus with --bus",
        ClientError::NoSuchNode(_) => "`juju node list` lists the nodes",
        ClientError::Denied => "run the command as root, or as a member of the manager's --bus-group",
        ClientError::ManagerLost => {
            "the work on the node may have been done; `juju node status` shows the state of a systemd unit"
        }
        ClientError::NoReply { .. } => "`juju node list` shows which nodes are online",
        ClientError::JobGoesOn { .. } => "wait longer with --timeout, or follow it with `juju node monitor`",
        ClientError::Call(error) => match error.name.as_str() {
            NO_SUCH_NODE => "`juju node list` lists the nodes",
            OFFLINE => "`juju node list` shows which nodes are online, and when each was last seen",
            NO_SUCH_UNIT => "`juju node units` lists the units that systemd has loaded",
            UNIT_MASKED => "`systemctl unmask` on the node makes it available again",
            JOB_QUEUED => "wait for that job, or replace it with --mode replace",
            _ => return None,
        },
        _ => return None,
    };
    Some(hint.to_owned())
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
        tree::Error::Tls { host, why } => handshake_hint(host, why),
        tree::Error::Ambiguous { .. } => Some(RUN_AGAIN.to_owned()),
        _ => None,
    }
}

/// The hint after a failed handshake with the store at `HOST:PORT`.
fn handshake_hint(host: &str, why: &HandshakeFailure) -> Option<String> {
    match why {
        HandshakeFailure::OtherCa => {
            Some("name the CA certificate of that store with --ca or JUJU_CA".to_owned())
        }
        HandshakeFailure::NoCa => Some(format!(
            "append the CA certificate to the certificate file of {host}, as `cat ca.pem >> server.pem` does"
        )),
        HandshakeFailure::Expired | HandshakeFailure::NotYetValid => Some(format!(
            "compare the clock of this machine with that of {host}, where a restart of the store renews its \
             certificate"
        )),
        HandshakeFailure::OtherName(name) => {
            Some(format!("use another name of the store, or start it with --tls-name {name}"))
        }
        HandshakeFailure::NotTls => Some(format!("--zookeeper {host}, if that store is to be plain text")),
        HandshakeFailure::Other(_) => None,
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
