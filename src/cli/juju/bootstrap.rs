//! `juju bootstrap`: creates an environment in a store, with its credentials.
//!
//! Credentials are saved before the tree is created: after a crash in between, the next run uses
//! the saved file, and no tree exists without saved credentials.

use anyhow::Context as _;
use clap::ValueEnum;
use tracing::info;

use crate::cli::args::environment::{Globals, Target, is_refused};
use crate::cli::authority;
use crate::cli::config::{ConfigDir, Role, SavedEnvironment};
use crate::cli::error::Refusal;
use crate::cli::output;
use crate::model::EnvironmentName;
use crate::store::records::Placement;
use crate::store::{self, Address, Bootstrap, Credential, Environment, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where to place units that are deployed without --to
    #[arg(long, value_enum, default_value_t = PlacementArg::Unassigned)]
    placement: PlacementArg,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PlacementArg {
    /// A machine without units, or a new one
    Unassigned,
    /// Machine 0
    Local,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let target = globals.target()?;
    refuse_other_store(&target)?;
    let placement = match args.placement {
        PlacementArg::Unassigned => Placement::Unassigned,
        PlacementArg::Local => Placement::Local,
    };
    let (opened, made) = ensure(&target.config, &target.environment, &target.address, placement).await?;
    opened.into_tree().close().await;
    output::message(&match made {
        Made::New => format!("Environment '{}' was bootstrapped.", target.environment),
        Made::Already => format!("Environment '{}' was already bootstrapped.", target.environment),
    });
    Ok(())
}

/// Refuses a second store for a saved environment: its file holds the only credentials of the
/// first.
fn refuse_other_store(target: &Target) -> anyhow::Result<()> {
    let Some(saved) = &target.saved else { return Ok(()) };
    let address = saved.zookeeper.parse::<Address>().ok();
    if address.is_some_and(|address| address.to_string() == target.address.to_string()) {
        return Ok(());
    }
    Err(Refusal::OtherStore {
        environment: target.environment.clone(),
        saved: saved.zookeeper.clone(),
        path: target.path()?,
    }
    .into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum Made {
    New,
    Already,
}

/// Opens the environment, and creates it first if necessary, with saved credentials.
pub(in crate::cli) async fn ensure(
    config: &ConfigDir,
    environment: &EnvironmentName,
    address: &Address,
    placement: Placement,
) -> anyhow::Result<(Environment<ZkTree>, Made)> {
    let location = Location { config, environment, address };
    let mut saved = location.saved()?;
    loop {
        match location.look(saved.as_ref()).await? {
            Look::Ours(opened) => {
                location.note(&opened)?;
                close_root(&opened).await?;
                authority::ensure(config, environment, &opened).await?;
                return Ok((opened, Made::Already));
            }
            // A new tree would be empty, and agents with the old credentials would act on that
            // state.
            Look::Nothing if saved.as_ref().is_some_and(|saved| saved.cluster_id.is_some()) => {
                return Err(location.lost()?.into());
            }
            Look::Nothing => {
                let made = location.make(placement, saved.is_none()).await?;
                location.note(&made)?;
                close_root(&made).await?;
                authority::ensure(config, environment, &made).await?;
                return Ok((made, Made::New));
            }
            Look::Anothers => {
                // Another process of this user may have created it since the file was read.
                let now = location.saved()?;
                if now == saved {
                    return Err(location.by_other()?.into());
                }
                saved = now;
            }
        }
    }
}

/// Closes the root of a keeper above the environment's chroot: otherwise every client could create
/// znodes there.
async fn close_root(opened: &Environment<ZkTree>) -> anyhow::Result<()> {
    let closed = opened.tree().close_keeper_root(&opened.info().roles.operators()).await;
    if closed.context("cannot close the root of the keeper")? {
        info!("root of the keeper closed to all but this environment's operator");
    }
    Ok(())
}

/// Location of an environment: its saved files and its store.
struct Location<'a> {
    config: &'a ConfigDir,
    environment: &'a EnvironmentName,
    address: &'a Address,
}

/// State of the store at that location.
enum Look {
    Nothing,
    Ours(Environment<ZkTree>),
    Anothers,
}

impl Location<'_> {
    fn saved(&self) -> anyhow::Result<Option<SavedEnvironment>> {
        Ok(self.config.read(self.environment, Role::Operator)?)
    }

    fn by_other(&self) -> anyhow::Result<Refusal> {
        let path = self.config.path(self.environment, Role::Operator)?;
        Ok(Refusal::BootstrappedByOther { address: self.address.to_string(), path })
    }

    fn lost(&self) -> anyhow::Result<Refusal> {
        let path = self.config.path(self.environment, Role::Operator)?;
        Ok(Refusal::LostTree {
            environment: self.environment.clone(),
            address: self.address.to_string(),
            path,
        })
    }

    /// Saves the id of the tree after its creation.
    fn note(&self, opened: &Environment<ZkTree>) -> anyhow::Result<()> {
        for role in [Role::Operator, Role::Controller] {
            if let Some(known) = self.config.read(self.environment, role)?
                && known.cluster_id.is_none()
            {
                let cluster_id = Some(opened.info().cluster_id.clone());
                self.config.replace(self.environment, role, &SavedEnvironment { cluster_id, ..known })?;
            }
        }
        Ok(())
    }

    async fn look(&self, saved: Option<&SavedEnvironment>) -> anyhow::Result<Look> {
        let tree = ZkTree::connect(self.address, saved.map(|saved| &saved.credential)).await?;
        match Environment::open(tree).await {
            Ok(opened) => {
                opened.verify_identity(self.environment, saved.and_then(|it| it.cluster_id.as_deref()))?;
                Ok(Look::Ours(opened))
            }
            Err(store::Error::NotBootstrapped) => Ok(Look::Nothing),
            Err(error) if is_refused(&error) => Ok(Look::Anothers),
            Err(error) => Err(error).context("cannot determine whether the store is bootstrapped"),
        }
    }

    async fn make(&self, placement: Placement, first_time: bool) -> anyhow::Result<Environment<ZkTree>> {
        let operator = self.ensure_role(Role::Operator)?;
        let controller = self.ensure_role(Role::Controller)?;
        let wanted = Bootstrap {
            environment: self.environment.clone(),
            placement,
            operator: operator.credential.identity(),
            controller: controller.credential.identity(),
        };
        let tree = ZkTree::connect(self.address, Some(&operator.credential)).await?;
        let error = match Environment::bootstrap(tree, &wanted).await {
            Ok(made) => return Ok(made),
            Err(error) => error,
        };
        // After a definite refusal, the credentials that were just saved are useless.
        if first_time && !may_have_been_made(&error) {
            self.config.forget(self.environment, Role::Operator, &operator)?;
            self.config.forget(self.environment, Role::Controller, &controller)?;
        }
        // No environment, and no right to create one: the parent of the chroot belongs to another
        // user.
        if matches!(error, store::Error::WrongCredentials)
            && matches!(self.look(Some(&operator)).await?, Look::Nothing)
        {
            return Err(Refusal::NotOurs { address: self.address.to_string() }.into());
        }
        match error {
            store::Error::AlreadyBootstrapped(_) | store::Error::WrongCredentials => {
                Err(self.by_other()?.into())
            }
            error => {
                Err(error).with_context(|| format!("cannot bootstrap environment '{}'", self.environment))
            }
        }
    }

    /// Returns the saved credentials of a role, and creates them first if necessary.
    fn ensure_role(&self, role: Role) -> anyhow::Result<SavedEnvironment> {
        let made = SavedEnvironment {
            zookeeper: self.address.to_string(),
            credential: Credential::generate(role.name())?,
            cluster_id: None,
            ca: self.address.ca().map(str::to_owned),
        };
        Ok(self.config.ensure(self.environment, role, &made)?)
    }
}

/// Whether the tree may exist, or a second run may create it, with the saved credentials.
fn may_have_been_made(error: &store::Error) -> bool {
    error.is_transient()
}
