//! The hints after errors: what the operator can do about each. They depend on the type of the
//! error, never on its text.

use std::io;

use super::Refusal;
use crate::cli::config::ConfigError;
use crate::keeper::KeeperError;
use crate::keeper::log::StorageError;
use crate::machine::join_token::InvalidToken;
use crate::net::tls::probe::HandshakeFailure;
use crate::runtime::trusted_file::ReadError;
use crate::runtime::trusted_path;
use crate::store;
use crate::store::joining::JoinError;
use crate::store::tree;

/// Hint after a lost response: a repeated command line is the same operation (`idempotency_notes`).
const RUN_AGAIN: &str = "run the same command again; changes that were already made are not repeated";

pub(in crate::cli) fn hint(error: &anyhow::Error) -> Option<String> {
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

/// Every refusal is named here, so that a new one gets a hint or is listed as one without.
fn refusal_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::NotBootstrapped { .. }
        | Refusal::NoCredentials { .. }
        | Refusal::BootstrappedByOther { .. }
        | Refusal::OtherStore { .. }
        | Refusal::LostTree { .. }
        | Refusal::OtherStoreThanToken { .. }
        | Refusal::NoCaToVerify { .. }
        | Refusal::SeveralCas { .. }
        | Refusal::EnvironmentInUse { .. }
        | Refusal::TooSlow { .. } => environment_hint(refusal),
        Refusal::OtherAuthority { .. }
        | Refusal::NoListenerCertificate { .. }
        | Refusal::NoAuthority { .. }
        | Refusal::NoRequest { .. }
        | Refusal::NoIssuer { .. } => certificate_hint(refusal),
        Refusal::NoMachineFile { .. }
        | Refusal::AlreadyJoined { .. }
        | Refusal::NoUnitsDirectory { .. }
        | Refusal::ServiceNeedsRoot
        | Refusal::NoSystemd
        | Refusal::UntrustedTombstone { .. }
        | Refusal::NoHookTools { .. } => machine_hint(refusal),
        Refusal::NoController { .. } | Refusal::NotAnswered { .. } | Refusal::HostBits { .. } => {
            request_hint(refusal)
        }
        #[cfg(not(feature = "ec2"))]
        Refusal::NoEc2 => Some("build without --no-default-features to include EC2".to_owned()),
        #[cfg(not(feature = "fleet"))]
        Refusal::NoFleet => Some("build with --features fleet to include D-Bus".to_owned()),
        #[cfg(feature = "fleet")]
        Refusal::NoManager { .. }
        | Refusal::NoNode { .. }
        | Refusal::NoOperatorCertificate { .. }
        | Refusal::SystemdJob { .. }
        | Refusal::NoSystemdUnit { .. } => fleet_hint(refusal),
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

/// Returns the hint after a refusal that concerns environments and stores.
fn environment_hint(refusal: &Refusal) -> Option<String> {
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
        Refusal::EnvironmentInUse { .. } => Some(
            "remove them with `juju destroy-service` and `juju terminate-machine`, or all of them with \
                 --force"
                .to_owned(),
        ),
        Refusal::OtherStoreThanToken { machine, why: HandshakeFailure::OtherCa, .. } => {
            Some(format!("`juju machine token {machine}` makes a token for the store as it is now"))
        }
        Refusal::OtherStoreThanToken { host, why, .. } => handshake_hint(host, why),
        Refusal::NoCaToVerify { host } => handshake_hint(host, &HandshakeFailure::NoCa),
        Refusal::SeveralCas { .. } => {
            Some("name a file with this certificate alone with --ca or JUJU_CA".to_owned())
        }
        Refusal::TooSlow { .. } => Some(RUN_AGAIN.to_owned()),
        _ => None,
    }
}

/// Returns the hint after a refusal that concerns authorities and certificates.
fn certificate_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
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
        _ => None,
    }
}

/// Returns the hint after a refusal that concerns a machine and its host.
fn machine_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::NoMachineFile { machine, .. } => Some(format!(
            "`juju machine token {machine}` makes a token, with which `portcullis join` writes that file here"
        )),
        Refusal::NoHookTools { .. } => {
            Some("`cargo build --no-default-features --workspace` builds them beside this program".to_owned())
        }
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
        Refusal::UntrustedTombstone { machine, .. } => {
            Some(format!("`portcullis machine --id {machine} --leave` removes its units and leaves"))
        }
        _ => None,
    }
}

/// Returns the hint after a refusal that concerns requests to a controller, and arguments.
fn request_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::NoController { .. } => Some(
            "start `portcullis controller`, then run this again; destroy-environment takes --leave-instances"
                .to_owned(),
        ),
        Refusal::NotAnswered { .. } => {
            Some("run the command again, or wait longer with --timeout".to_owned())
        }
        Refusal::HostBits { text, block } => {
            let address = text.split('/').next().unwrap_or_default();
            Some(format!("--to {block} is the whole block, --to {address} only that address"))
        }
        _ => None,
    }
}

/// Returns the hint after a refusal that concerns nodes.
#[cfg(feature = "fleet")]
fn fleet_hint(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::NoNode { .. } => Some("`juju status` shows the nodes".to_owned()),
        Refusal::NoManager { environment } => Some(format!(
            "start `portcullis manager -e {environment}`, or name the bus of another manager with --bus"
        )),
        Refusal::NoOperatorCertificate { .. } => {
            Some("copy it from the host where `juju bootstrap` or `juju operator add` was run".to_owned())
        }
        Refusal::SystemdJob { unit, node, .. } => {
            Some(format!("`juju node status {node} {unit}` shows its state"))
        }
        Refusal::NoSystemdUnit { node, .. } => Some(format!("`juju node units {node}` lists loaded units")),
        _ => None,
    }
}

fn read_hint(refusal: &ReadError) -> Option<String> {
    match refusal {
        ReadError::NotPrivate { path, .. } => Some(format!("chmod 600 {}", path.display())),
        ReadError::Untrusted(refusal) => refusal.repair(),
        _ => None,
    }
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
