//! Which environment, which store, and as whom: from flags, variables and what is remembered, in this order.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use super::config::{ConfigDir, Remembered, Role};
use super::failure::{Refusal, typed};
use crate::model::EnvironmentName;
use crate::store::{self, Address, Environment, Operation, ZkTree, tree};

const DEFAULT_ENVIRONMENT: &str = "local";
const DEFAULT_ADDRESS: &str = "127.0.0.1:2181";

/// What was typed, for every command that talks to a store.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct Globals {
    /// Environment to work on [default: local]
    #[arg(short, long, global = true, value_name = "ENV", env = "JUJU_ENV", hide_env_values = true)]
    environment: Option<String>,
    /// Store to talk to: HOST[:PORT],...[/CHROOT] [default: the one remembered, else 127.0.0.1:2181]
    #[arg(long, global = true, value_name = "HOSTS", env = "JUJU_ZOOKEEPER", hide_env_values = true)]
    zookeeper: Option<String>,
    /// Where to remember, if not where this user does.
    #[arg(skip)]
    home: Option<ConfigDir>,
    /// What this run is for, where a second run must not do it twice.
    #[arg(skip)]
    operation: Option<Operation>,
}

/// What it means.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) environment: EnvironmentName,
    /// Whose credentials these are.
    pub(super) role: Role,
    pub(super) config: ConfigDir,
    pub(super) address: Address,
    /// None on a machine that has no credentials for this environment.
    pub(super) remembered: Option<Remembered>,
}

impl Globals {
    /// With an environment at most, for who brings the store along.
    pub(super) fn of(environment: Option<String>) -> Self {
        Self { environment, ..Self::default() }
    }

    /// The same, remembering elsewhere.
    pub(super) fn at(mut self, home: ConfigDir) -> Self {
        self.home = Some(home);
        self
    }

    /// The same, for one operation.
    pub(super) fn marked(&self, operation: Operation) -> Self {
        Self { operation: Some(operation), ..self.clone() }
    }

    pub(super) fn config(&self) -> anyhow::Result<ConfigDir> {
        Ok(self.home.clone().map_or_else(ConfigDir::of_this_user, Ok)?)
    }

    pub(super) fn environment(&self) -> anyhow::Result<EnvironmentName> {
        Ok(typed(given(self.environment.as_deref()).unwrap_or(DEFAULT_ENVIRONMENT))?)
    }

    /// The store that was named, if one was.
    pub(super) fn typed_address(&self) -> anyhow::Result<Option<Address>> {
        Ok(given(self.zookeeper.as_deref()).map(typed).transpose()?)
    }

    /// As the operator.
    pub(super) fn settings(&self) -> anyhow::Result<Settings> {
        self.settings_of(Role::Operator)
    }

    pub(super) fn settings_of(&self, role: Role) -> anyhow::Result<Settings> {
        let environment = self.environment()?;
        let config = self.config()?;
        let remembered = config.read(&environment, role)?;
        let address = match (given(self.zookeeper.as_deref()), &remembered) {
            (Some(hosts), _) => typed(hosts)?,
            (None, Some(remembered)) => {
                let path = config.path(&environment, role)?;
                let wrong = || format!("{} has a store that is none", path.display());
                remembered.zookeeper.parse().with_context(wrong)?
            }
            (None, None) => typed(DEFAULT_ADDRESS)?,
        };
        Ok(Settings { environment, role, config, address, remembered })
    }

    /// Opens the environment, does the work, and ends the session whatever came of it.
    pub(super) async fn in_environment<R>(
        &self,
        work: impl AsyncFnOnce(&Settings, &Environment<ZkTree>) -> anyhow::Result<R>,
    ) -> anyhow::Result<R> {
        let settings = self.settings()?;
        let mut environment = settings.open().await?;
        if let Some(operation) = &self.operation {
            environment = environment.marked(operation.clone());
        }
        let result = work(&settings, &environment).await;
        environment.into_tree().close().await;
        result
    }
}

/// An empty variable counts as unset.
fn given(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}

impl Settings {
    pub(super) fn path(&self) -> anyhow::Result<PathBuf> {
        Ok(self.config.path(&self.environment, self.role)?)
    }

    /// The environment, open, with the rights of whoever is remembered.
    pub(super) async fn open(&self) -> anyhow::Result<Environment<ZkTree>> {
        let credential = self.remembered.as_ref().map(|remembered| &remembered.credential);
        let tree = ZkTree::connect(&self.address, credential).await?;
        match Environment::open(tree).await {
            Ok(opened) => {
                let cluster_id = self.remembered.as_ref().and_then(|it| it.cluster_id.as_deref());
                opened.expect(&self.environment, cluster_id)?;
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

    fn why_refused(&self, error: store::Error) -> anyhow::Result<anyhow::Error> {
        let path = self.path()?;
        Ok(match self.remembered {
            None => Refusal::NoCredentials { environment: self.environment.clone(), path }.into(),
            Some(_) => anyhow::Error::new(error).context(format!(
                "cannot enter {} with {}",
                self.address,
                path.display()
            )),
        })
    }
}

pub(super) fn is_refused(error: &store::Error) -> bool {
    use store::Error::{Tree, WrongCredentials};
    matches!(error, WrongCredentials | Tree(tree::Error::NoAuth(_) | tree::Error::AuthFailed { .. }))
}
