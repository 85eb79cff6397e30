//! The environment, store and credentials of a command: from flags, environment variables and saved
//! files, in this order.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use tracing::warn;

use crate::cli::authority;
use crate::cli::config::{ConfigDir, Role, SavedEnvironment};
use crate::cli::error::{Refusal, Usage, parse_arg};
use crate::model::EnvironmentName;
use crate::runtime::clock::wall_ms;
use crate::runtime::reconcile::STORE_PAUSE;
use crate::runtime::trusted_file;
use crate::store::operators::{Acting, FIRST_OPERATOR, shared_credential};
use crate::store::{self, Address, Credential, Environment, IdempotencyKey, Tree as _, ZkTree, tree};

const DEFAULT_ENVIRONMENT: &str = "local";
const DEFAULT_ADDRESS: &str = "127.0.0.1:2181";

/// Maximum size of the file with the store's CA certificate.
const MAX_CA_BYTES: usize = 32 * 1024;

/// Flags of every command that connects to a store.
#[derive(Debug, Clone, Default, Args)]
pub(in crate::cli) struct Globals {
    /// Environment to work on [default: local]
    #[arg(short, long, global = true, value_name = "ENV", env = "JUJU_ENV", hide_env_values = true)]
    environment: Option<String>,
    /// Store to connect to: [tls://]HOST[:PORT],...[/CHROOT] [default: the saved address, else
    /// 127.0.0.1:2181]
    #[arg(long, global = true, value_name = "HOSTS", env = "JUJU_ZOOKEEPER", hide_env_values = true)]
    zookeeper: Option<String>,
    /// CA certificate (PEM) to verify a store at tls:// with [default: the saved one]
    #[arg(long, global = true, value_name = "FILE", env = "JUJU_CA", hide_env_values = true)]
    ca: Option<PathBuf>,
    /// Configuration directory to use instead of the user's own.
    #[arg(skip)]
    home: Option<ConfigDir>,
    /// Id of this run's operation, for commands whose repetition must have no effect.
    #[arg(skip)]
    operation: Option<IdempotencyKey>,
}

/// The resolved environment, store address and credentials.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Target {
    pub(in crate::cli) environment: EnvironmentName,
    /// Role that the credentials belong to.
    pub(in crate::cli) role: Role,
    pub(in crate::cli) config: ConfigDir,
    pub(in crate::cli) address: Address,
    /// `None` on a host without credentials for this environment.
    pub(in crate::cli) saved: Option<SavedEnvironment>,
}

impl Globals {
    /// For commands that start the store themselves.
    pub(in crate::cli) fn of(environment: Option<String>) -> Self {
        Self { environment, ..Self::default() }
    }

    /// With another configuration directory.
    pub(in crate::cli) fn at(mut self, home: ConfigDir) -> Self {
        self.home = Some(home);
        self
    }

    /// For one operation.
    pub(in crate::cli) fn marked(&self, operation: IdempotencyKey) -> Self {
        Self { operation: Some(operation), ..self.clone() }
    }

    pub(in crate::cli) fn config(&self) -> anyhow::Result<ConfigDir> {
        Ok(self.home.clone().map_or_else(ConfigDir::of_this_user, Ok)?)
    }

    pub(in crate::cli) fn environment(&self) -> anyhow::Result<EnvironmentName> {
        Ok(parse_arg(given(self.environment.as_deref()).unwrap_or(DEFAULT_ENVIRONMENT))?)
    }

    /// The store address of the command line or of the environment variable.
    pub(in crate::cli) fn address_arg(&self) -> anyhow::Result<Option<Address>> {
        let address = given(self.zookeeper.as_deref()).map(parse_arg::<Address>).transpose()?;
        let ca = self.ca()?;
        Ok(address.map(|address| address.with_ca(ca.as_deref())))
    }

    /// The CA certificate of the command line or of the environment variable.
    fn ca(&self) -> anyhow::Result<Option<String>> {
        let Some(path) = self.ca.as_deref().filter(|path| !path.as_os_str().is_empty()) else {
            return Ok(None);
        };
        let missing = || Usage::new(format!("{} does not exist", path.display()));
        let bytes = trusted_file::read_trusted(path, MAX_CA_BYTES)?.ok_or_else(missing)?;
        let text = String::from_utf8(bytes);
        Ok(Some(text.map_err(|_| Usage::new(format!("{} is not a PEM file", path.display())))?))
    }

    /// Resolves the flags with the operator's credentials.
    pub(in crate::cli) fn target(&self) -> anyhow::Result<Target> {
        self.target_of(Role::Operator)
    }

    pub(in crate::cli) fn target_of(&self, role: Role) -> anyhow::Result<Target> {
        let environment = self.environment()?;
        let config = self.config()?;
        let saved = config.read(&environment, role)?;
        let address: Address = match (given(self.zookeeper.as_deref()), &saved) {
            (Some(hosts), _) => parse_arg(hosts)?,
            (None, Some(saved)) => {
                let path = config.path(&environment, role)?;
                let wrong = || format!("{} contains an invalid store address", path.display());
                saved.zookeeper.parse().with_context(wrong)?
            }
            (None, None) => parse_arg(DEFAULT_ADDRESS)?,
        };
        let ca = match self.ca()?.or_else(|| saved.as_ref()?.ca.clone()) {
            // A keeper of this user has a certificate of the environment's own authority.
            None if address.is_tls() => {
                authority::read(&config, &environment)?.map(|authority| authority.certificate().to_owned())
            }
            ca => ca,
        };
        Ok(Target { environment, role, config, address: address.with_ca(ca.as_deref()), saved })
    }

    /// Opens the environment, runs `work` and closes the session, also after a failure.
    pub(in crate::cli) async fn in_environment<R>(
        &self,
        work: impl AsyncFnOnce(&Target, &Environment<ZkTree>) -> anyhow::Result<R>,
    ) -> anyhow::Result<R> {
        let target = self.target()?;
        let acting = Acting { operator: target.operator(), now_ms: wall_ms() };
        let mut environment = target.open().await?.acting(acting);
        if let Some(operation) = &self.operation {
            environment = environment.with_key(operation.clone());
        }
        let result = work(&target, &environment).await;
        environment.into_tree().close().await;
        result
    }
}

/// An empty variable counts as unset.
fn given(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}

impl Target {
    pub(in crate::cli) fn path(&self) -> anyhow::Result<PathBuf> {
        Ok(self.config.path(&self.environment, self.role)?)
    }

    /// Opens the environment with the saved credentials.
    pub(in crate::cli) async fn open(&self) -> anyhow::Result<Environment<ZkTree>> {
        let credential = self.saved.as_ref().map(|saved| &saved.credential);
        let tree = ZkTree::connect(&self.address, credential).await?;
        if let Some(name) = credential.and_then(Credential::added_operator) {
            tree.prove(&shared_credential(&tree, &name).await?).await?;
        }
        match Environment::open(tree).await {
            Ok(opened) => {
                let cluster_id = self.saved.as_ref().and_then(|it| it.cluster_id.as_deref());
                opened.verify_identity(&self.environment, cluster_id)?;
                Ok(opened)
            }
            Err(error) if is_refused(&error) => Err(self.why_refused(error)?),
            Err(store::Error::NotBootstrapped) => Err(Refusal::NotBootstrapped {
                environment: self.environment.clone(),
                address: self.address.to_string(),
            }
            .into()),
            Err(error) => Err(error.into()),
        }
    }

    /// The name of the operator whose credentials are saved here.
    fn operator(&self) -> String {
        let added = self.saved.as_ref().and_then(|saved| saved.credential.added_operator());
        added.map_or_else(|| FIRST_OPERATOR.to_owned(), |name| name.to_string())
    }

    /// The credential that the rights of all znodes name.
    pub(in crate::cli) async fn shared_credential(&self, tree: &ZkTree) -> anyhow::Result<Credential> {
        let saved = self.saved.as_ref().map(|saved| saved.credential.clone());
        let saved = saved.ok_or(store::Error::WrongCredentials)?;
        match saved.added_operator() {
            Some(name) => Ok(shared_credential(tree, &name).await?),
            None => Ok(saved),
        }
    }

    /// Opens the environment once its store can be reached.
    pub(in crate::cli) async fn wait_and_open(&self) -> anyhow::Result<Environment<ZkTree>> {
        wait_for_store(|| self.open()).await
    }

    fn why_refused(&self, error: store::Error) -> anyhow::Result<anyhow::Error> {
        let path = self.path()?;
        Ok(match self.saved {
            None => Refusal::NoCredentials { environment: self.environment.clone(), path }.into(),
            Some(_) => anyhow::Error::new(error).context(format!(
                "cannot authenticate to {} with {}",
                self.address,
                path.display()
            )),
        })
    }
}

/// Repeats `open` until the store can be reached. Other failures are returned at once.
pub(in crate::cli) async fn wait_for_store<T, F>(mut open: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<T>>,
{
    let mut is_logged = false;
    loop {
        match open().await {
            Err(error) if store::is_transient(error.as_ref()) => {
                if !std::mem::replace(&mut is_logged, true) {
                    warn!(error = format!("{error:#}"), "store unreachable; retrying");
                }
                tokio::time::sleep(STORE_PAUSE).await;
            }
            opened => return opened,
        }
    }
}

pub(in crate::cli) fn is_refused(error: &store::Error) -> bool {
    use store::Error::{Tree, WrongCredentials};
    matches!(error, WrongCredentials | Tree(tree::Error::NoAuth(_) | tree::Error::AuthFailed { .. }))
}
