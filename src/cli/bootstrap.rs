//! `juju bootstrap`: makes an environment in a store, with its credentials.
//!
//! Credentials are written before the tree is: a crash in between leaves a file that the next run takes up again,
//! never a tree that nobody can enter.

use anyhow::Context as _;
use clap::{Args, ValueEnum};

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
    let remembered = config.read(environment, Role::Operator)?;
    let path = config.path(environment, Role::Operator)?;
    let by_other = || Refusal::BootstrappedByOther { address: address.to_string(), path: path.clone() };
    let tree = ZkTree::connect(address, remembered.as_ref().map(|remembered| &remembered.credential)).await?;
    match Environment::open(tree).await {
        Ok(opened) => {
            opened.expect(environment, None)?;
            return Ok((opened, Made::Already));
        }
        Err(store::Error::NotBootstrapped) => {}
        Err(error) if is_refused(&error) => return Err(by_other().into()),
        Err(error) => return Err(error).context("cannot tell whether the store is bootstrapped"),
    }
    let operator = ensure_role(config, environment, address, Role::Operator)?;
    let controller = ensure_role(config, environment, address, Role::Controller)?;
    let wanted = Bootstrap {
        environment: environment.clone(),
        placement,
        operator: operator.credential.identity(),
        controller: controller.credential.identity(),
    };
    let tree = ZkTree::connect(address, Some(&operator.credential)).await?;
    match Environment::bootstrap(tree, &wanted).await {
        Ok(made) => Ok((made, Made::New)),
        Err(error) => {
            // After a clear refusal, what was written here a moment ago opens nothing.
            if remembered.is_none() && !may_have_been_made(&error) {
                config.forget(environment, Role::Operator, &operator)?;
                config.forget(environment, Role::Controller, &controller)?;
            }
            match error {
                store::Error::AlreadyBootstrapped(_) => Err(by_other().into()),
                error => Err(error).with_context(|| format!("cannot bootstrap environment '{environment}'")),
            }
        }
    }
}

/// Whether the tree may be there, or be made by a second run, with the credentials that were written for it.
fn may_have_been_made(error: &store::Error) -> bool {
    matches!(error, store::Error::Tree(inner) if inner.is_retryable())
}

/// What is remembered for a role afterwards: what was there, or something new.
fn ensure_role(
    config: &ConfigDir,
    environment: &EnvironmentName,
    address: &Address,
    role: Role,
) -> anyhow::Result<Remembered> {
    let user = match role {
        Role::Operator => "operator",
        Role::Controller => "controller",
    };
    let made = Remembered { zookeeper: address.to_string(), credential: Credential::generate(user)? };
    Ok(config.ensure(environment, role, &made)?)
}
