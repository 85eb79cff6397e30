//! `juju bootstrap`: makes an environment in a store, with its credentials.
//!
//! Credentials are written before the tree is: a crash in between leaves a file that the next run takes up again,
//! never a tree that nobody can enter.

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use tracing::info;

use super::config::{ConfigDir, Remembered, Role};
use super::failure::Refusal;
use super::output;
use super::settings::{Globals, Settings, is_refused};
use crate::model::EnvironmentName;
use crate::store::records::Placement;
use crate::store::{self, Address, Bootstrap, Credential, Environment, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Where units go that are not placed by hand
    #[arg(long, value_enum, default_value_t = TypedPlacement::Unassigned)]
    placement: TypedPlacement,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TypedPlacement {
    /// A machine without units, or a new one
    Unassigned,
    /// Machine 0
    Local,
}

pub(super) async fn run(globals: &Globals, typed: &Typed) -> anyhow::Result<()> {
    let settings = globals.settings()?;
    refuse_other_store(&settings)?;
    let placement = match typed.placement {
        TypedPlacement::Unassigned => Placement::Unassigned,
        TypedPlacement::Local => Placement::Local,
    };
    let (opened, made) =
        ensure(&settings.config, &settings.environment, &settings.address, placement).await?;
    opened.into_tree().close().await;
    output::message(&match made {
        Made::New => format!("Environment '{}' was bootstrapped.", settings.environment),
        Made::Already => format!("Environment '{}' was already bootstrapped.", settings.environment),
    });
    Ok(())
}

/// What is remembered belongs to one store; a second one under the same name would lose the way back to it.
fn refuse_other_store(settings: &Settings) -> anyhow::Result<()> {
    let Some(remembered) = &settings.remembered else { return Ok(()) };
    if remembered.zookeeper.parse::<Address>().ok().as_ref() == Some(&settings.address) {
        return Ok(());
    }
    Err(Refusal::OtherStore {
        environment: settings.environment.clone(),
        remembered: remembered.zookeeper.clone(),
        path: settings.path()?,
    }
    .into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    New,
    Already,
}

/// An environment that is there afterwards, and open, with its credentials remembered.
pub(super) async fn ensure(
    config: &ConfigDir,
    environment: &EnvironmentName,
    address: &Address,
    placement: Placement,
) -> anyhow::Result<(Environment<ZkTree>, Made)> {
    let place = Place { config, environment, address };
    let mut remembered = place.remembered()?;
    loop {
        match place.look(remembered.as_ref()).await? {
            Look::Ours(opened) => {
                place.note(&opened)?;
                close_root(&opened).await?;
                return Ok((opened, Made::Already));
            }
            // Made anew, it would be empty, and whoever still holds its credentials would take that for its state.
            Look::Nothing
                if remembered.as_ref().is_some_and(|remembered| remembered.cluster_id.is_some()) =>
            {
                return Err(place.lost()?.into());
            }
            Look::Nothing => {
                let made = place.make(placement, remembered.is_none()).await?;
                place.note(&made)?;
                close_root(&made).await?;
                return Ok((made, Made::New));
            }
            Look::Anothers => {
                // Or ours after all, made by another process of this user since the file was read.
                let now = place.remembered()?;
                if now == remembered {
                    return Err(place.by_other()?.into());
                }
                remembered = now;
            }
        }
    }
}

/// Closes the root of a keeper above the environment's chroot. Otherwise everybody could fill the store from there.
async fn close_root(opened: &Environment<ZkTree>) -> anyhow::Result<()> {
    let closed = opened.tree().close_keeper_root(&opened.info().roles.operators()).await;
    if closed.context("cannot close the root of the keeper")? {
        info!("root of the keeper closed to all but this environment's operator");
    }
    Ok(())
}

/// Where an environment is to be.
struct Place<'a> {
    config: &'a ConfigDir,
    environment: &'a EnvironmentName,
    address: &'a Address,
}

/// What is there.
enum Look {
    Nothing,
    Ours(Environment<ZkTree>),
    Anothers,
}

impl Place<'_> {
    fn remembered(&self) -> anyhow::Result<Option<Remembered>> {
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

    /// Remembers which tree it is, once there is one.
    fn note(&self, opened: &Environment<ZkTree>) -> anyhow::Result<()> {
        for role in [Role::Operator, Role::Controller] {
            if let Some(known) = self.config.read(self.environment, role)?
                && known.cluster_id.is_none()
            {
                let cluster_id = Some(opened.info().cluster_id.clone());
                self.config.replace(self.environment, role, &Remembered { cluster_id, ..known })?;
            }
        }
        Ok(())
    }

    async fn look(&self, remembered: Option<&Remembered>) -> anyhow::Result<Look> {
        let tree = ZkTree::connect(self.address, remembered.map(|remembered| &remembered.credential)).await?;
        match Environment::open(tree).await {
            Ok(opened) => {
                opened.expect(self.environment, remembered.and_then(|it| it.cluster_id.as_deref()))?;
                Ok(Look::Ours(opened))
            }
            Err(store::Error::NotBootstrapped) => Ok(Look::Nothing),
            Err(error) if is_refused(&error) => Ok(Look::Anothers),
            Err(error) => Err(error).context("cannot tell whether the store is bootstrapped"),
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
        // After a clear refusal, what was written here a moment ago opens nothing.
        if first_time && !may_have_been_made(&error) {
            self.config.forget(self.environment, Role::Operator, &operator)?;
            self.config.forget(self.environment, Role::Controller, &controller)?;
        }
        // No environment, and no right to make one: what is above the chroot belongs to another.
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

    /// What is remembered for a role afterwards: what was there, or something new.
    fn ensure_role(&self, role: Role) -> anyhow::Result<Remembered> {
        let user = match role {
            Role::Operator => "operator",
            Role::Controller => "controller",
        };
        let made = Remembered {
            zookeeper: self.address.to_string(),
            credential: Credential::generate(user)?,
            cluster_id: None,
        };
        Ok(self.config.ensure(self.environment, role, &made)?)
    }
}

/// Whether the tree may be there, or be made by a second run, with the credentials that were written for it.
fn may_have_been_made(error: &store::Error) -> bool {
    matches!(error, store::Error::Tree(inner) if inner.is_retryable())
}
