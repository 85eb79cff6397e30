//! `juju destroy-environment`: removes an environment. The controller removes its instances and
//! groups, then the tree is removed, then the saved files of its machines and units on this host,
//! and the key of its authority: machine numbers begin again in the next environment, so the
//! certificates of this one must not be valid there.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

use crate::cli::args::environment::{Globals, Target};
use crate::cli::authority;
use crate::cli::config::{Role, SavedEnvironment};
use crate::cli::error::{Refusal, Usage};
use crate::cli::juju::adopt_groups::send_and_wait;
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
    globals.in_environment(async |target, environment| destroy(target, environment, args).await).await
}

async fn destroy(target: &Target, environment: &Environment<ZkTree>, args: &Args) -> anyhow::Result<()> {
    let name = &target.environment;
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
        send_and_wait(environment, Request::Clear, Duration::from_secs(args.timeout)).await?;
    }
    environment.remove().await?;
    let has_new_ca = forget(target)?;
    output::message(&format!("Environment '{name}' destroyed."));
    if has_new_ca {
        output::hint(&format!(
            "restart the store at {} before `juju bootstrap`: its certificate was issued by the removed \
             authority",
            target.address
        ));
    }
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
/// they still own the root of the store, and the next `juju bootstrap` uses them. Returns whether
/// the store's certificate was issued by the environment's authority, which is removed.
fn forget(target: &Target) -> anyhow::Result<bool> {
    let (config, name) = (&target.config, &target.environment);
    let authority = authority::read(config, name)?;
    let is_own = |ca: &str| authority.as_ref().is_some_and(|authority| authority.certificate() == ca);
    for role in [Role::Operator, Role::Controller] {
        if let Some(saved) = config.read(name, role)? {
            // The store has a certificate of the next authority once it has restarted.
            let ca = saved.ca.clone().filter(|ca| !is_own(ca));
            config.replace(name, role, &SavedEnvironment { cluster_id: None, ca, ..saved })?;
        }
    }
    let own_files = [
        config.machines(name),
        config.units(name),
        config.operators(name),
        config.idempotency_notes(name),
        config.identity(name),
        config.authority(name),
    ];
    for path in own_files {
        remove(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(target.address.ca().is_some_and(is_own))
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
