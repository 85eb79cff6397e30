//! `juju destroy-environment`: removes an environment. The controller removes its instances and
//! groups, then the tree is removed, then the saved files of its machines and units on this host.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

use crate::cli::args::environment::{Globals, Settings};
use crate::cli::config::{Role, SavedEnvironment};
use crate::cli::error::{Refusal, Usage};
use crate::cli::juju::adopt_groups::answered;
use crate::cli::output;
use crate::model::MachineId;
use crate::store::records::Placement;
use crate::store::requests::Request;
use crate::store::{Environment, Termination, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Confirm the removal; without it the command refuses
    #[arg(long)]
    yes: bool,
    /// Destroy its services and terminate its machines first
    #[arg(long)]
    force: bool,
    /// Do not wait for a controller; instances and groups that exist at the provider are left there
    #[arg(long)]
    leave_instances: bool,
    /// Seconds to wait for the controller
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    globals.in_environment(async |settings, environment| destroy(settings, environment, args).await).await
}

async fn destroy(settings: &Settings, environment: &Environment<ZkTree>, args: &Args) -> anyhow::Result<()> {
    let name = &settings.environment;
    let services = environment.service_names().await?;
    let machines = provided_machines(environment).await?;
    let in_use = !services.is_empty() || !machines.is_empty();
    if in_use && !args.force {
        let services = services.iter().map(ToString::to_string).collect();
        let machines = machines.iter().map(ToString::to_string).collect();
        return Err(Refusal::EnvironmentInUse { environment: name.clone(), services, machines }.into());
    }
    if !args.yes {
        let what = format!("this removes environment '{name}' and everything in it; confirm with --yes");
        return Err(Usage::new(what).into());
    }
    for service in &services {
        environment.destroy_service(service).await?;
        output::message(&format!("Service '{service}' destroyed."));
    }
    if !machines.is_empty() {
        environment.terminate(&machines, Termination::Forced).await?;
        let shown: Vec<String> = machines.iter().map(ToString::to_string).collect();
        output::message(&format!("Machines terminated: {}", shown.join(", ")));
    }
    if environment.info().placement != Placement::Local && !args.leave_instances {
        output::message("Waiting until the controller has removed instances and security groups.");
        answered(environment, Request::Clear, Duration::from_secs(args.timeout)).await?;
    }
    environment.remove().await?;
    forget(settings)?;
    output::message(&format!("Environment '{name}' destroyed."));
    Ok(())
}

/// All machines except the local one of `portcullis up`.
async fn provided_machines(environment: &Environment<ZkTree>) -> anyhow::Result<Vec<MachineId>> {
    let mut machines = environment.machine_ids().await?;
    if environment.info().placement == Placement::Local {
        machines.retain(|machine| *machine != crate::cli::portcullis::up::LOCAL_MACHINE);
    }
    Ok(machines)
}

/// Removes the files of the environment on this host. The credentials stay, without the tree's id:
/// they still own the root of the store, and the next `juju bootstrap` uses them.
fn forget(settings: &Settings) -> anyhow::Result<()> {
    let (config, name) = (&settings.config, &settings.environment);
    for role in [Role::Operator, Role::Controller] {
        if let Some(saved) = config.read(name, role)? {
            config.replace(name, role, &SavedEnvironment { cluster_id: None, ..saved })?;
        }
    }
    for directory in [config.machines(name), config.units(name), config.idempotency_notes(name)] {
        remove(&directory).with_context(|| format!("cannot remove {}", directory.display()))?;
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
