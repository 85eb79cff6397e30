//! The errors of the typed operations, as the operator reads them.

use super::paths::NodePath;
use super::tree;
use crate::model::ports::InvalidPorts;
use crate::model::{CharmHash, MachineId, NodeName, OperatorName, ServiceName, UnitName};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("the environment is not bootstrapped")]
    NotBootstrapped,
    #[error("the environment is bootstrapped already, as '{0}'")]
    AlreadyBootstrapped(String),
    #[error("the store holds environment '{found}', not '{wanted}'")]
    OtherEnvironment { found: String, wanted: String },
    #[error("the store is not the one that this environment was made in (cluster id {found}, not {wanted})")]
    OtherCluster { found: String, wanted: String },
    #[error("the store refuses these credentials")]
    WrongCredentials,
    #[error("Service '{0}' was not found")]
    ServiceNotFound(ServiceName),
    #[error("Service '{0}' already exists")]
    ServiceExists(ServiceName),
    #[error("Unit '{0}' was not found")]
    UnitNotFound(UnitName),
    #[error("Machine {0} was not found")]
    MachineNotFound(MachineId),
    #[error("Machine '{0}' already exists")]
    MachineExists(NodeName),
    #[error(
        "'{0}' cannot be the name of a machine: reserved are numbers, names that begin with 'machine-' or \
         'operator-', operator, controller, keeper, store, tracker, manager and localhost"
    )]
    ReservedMachineName(NodeName),
    #[error("'{address}' is the name of machine {machine}, so it cannot be the address of another one")]
    AddressIsName { address: NodeName, machine: MachineId },
    #[error("'{name}' is an address of machine {machine}, so it cannot be the name of another one")]
    NameIsAddress { name: NodeName, machine: MachineId },
    #[error(
        "the agent of machine {0} is down, so its units, processes and firewall rules cannot be removed from \
         it now"
    )]
    AgentDown(MachineId),
    #[error("Resources are currently assigned to machine {0}")]
    MachineInUse(MachineId),
    #[error("Operator '{0}' already exists")]
    OperatorExists(OperatorName),
    #[error("Operator '{0}' was not found")]
    OperatorNotFound(OperatorName),
    #[error("operator '{0}' was removed from the environment, or its credentials are not valid")]
    OperatorRemoved(OperatorName),
    #[error("{given} units are more than the {limit} that can be made at once")]
    TooManyUnits { given: u32, limit: u32 },
    #[error("{given} sources are more than the {limit} that a service can be exposed to")]
    TooManySources { given: usize, limit: usize },
    #[error("a charm of {bytes} bytes is more than the {limit} that can be kept")]
    CharmTooLarge { bytes: usize, limit: usize },
    #[error("charm {0} is not in the store")]
    NoCharm(CharmHash),
    #[error("charm {0} is not what its hash says")]
    OtherCharm(CharmHash),
    #[error("Machine {0} is the one that this environment runs on")]
    LocalMachine(MachineId),
    #[error("the store's root holds '{0}', which is not ours; add a chroot to the address, HOST:PORT/NAME")]
    ForeignNodes(String),
    #[error("the parent of the address's chroot does not exist")]
    NoChrootParent,
    /// A change that would exceed the limits of the ports znode.
    #[error(transparent)]
    Ports(InvalidPorts),
    /// A znode with invalid content. Never treated as an empty one.
    #[error("{path}: {problem}")]
    Corrupt { path: NodePath, problem: String },
    #[error("{path}: still contended after {attempts} attempts")]
    Contended { path: NodePath, attempts: u32 },
    #[error("no random bytes from the system")]
    Random(#[source] getrandom::Error),
    #[error(transparent)]
    Tree(#[from] tree::Error),
}

impl Error {
    /// Whether the same request may succeed later: the store was unreachable, or had no space.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Tree(err) if err.is_transient())
    }
}

/// Whether a chain of errors has a failure of the store that may pass.
pub fn is_transient(error: &(dyn std::error::Error + 'static)) -> bool {
    tree_error_in(error).is_some_and(tree::Error::is_transient)
}

/// The failure of the store in a chain of errors, if there is one.
pub fn tree_error_in<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a tree::Error> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| {
        match error.downcast_ref::<Error>() {
            Some(Error::Tree(inner)) => Some(inner),
            _ => error.downcast_ref(),
        }
    })
}
