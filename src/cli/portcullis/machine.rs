//! `portcullis machine`: the agent of one machine. It holds the machine's lease, runs its units,
//! sends its beats and, with `--firewall`, manages its firewall. Decisions are in `firewall` and
//! `unit`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{FutureExt as _, TryFutureExt as _};
use portcullis_provider::Nftables;
use portcullis_provider::nftables::{Mode, TableName, TableSettings};
use tokio::sync::watch;
use tracing::{error, info};

use crate::cli::args::agent::jitter;
use crate::cli::args::environment::{Globals, wait_for_store};
use crate::cli::args::metrics;
use crate::cli::args::own_firewall::{FirewallArgs, Kind};
use crate::cli::args::units::UnitArgs;
use crate::cli::error::{Refusal, Usage, parse_arg};
use crate::cli::output;
use crate::cli::portcullis::checkpoint_file;
use crate::cli::portcullis::leave::{Leaving, Removed};
use crate::cli::portcullis::machine_file;
use crate::cli::portcullis::node_agent::{NodeAgent, SystemdArgs};
use crate::cli::portcullis::up;
use crate::firewall::controller::{FirewallController, PolicyReader};
use crate::firewall::leader_loop::Progress;
use crate::firewall::local_loop;
use crate::firewall::local_provider::LocalProvider;
use crate::firewall::metrics::Metrics;
use crate::firewall::policy::Policy;
use crate::heartbeat::client::BeatClient;
use crate::heartbeat::core::params::url_of;
use crate::heartbeat::discovery::follow_trackers;
use crate::identity::files::MachineIdentity;
use crate::identity::machine::Machine as Applicant;
use crate::machine::file::{Directories, MachineFile};
use crate::machine::host::{HostReport, address_toward};
use crate::machine::number;
use crate::machine::presence::{self, MachineClaim};
use crate::model::{EnvironmentName, HostAddress, MachineId};
use crate::net::http::client::Client;
use crate::net::tls::{ClientFiles, ClientTls, MachineFiles};
use crate::runtime::metrics::Registry;
use crate::runtime::reconcile::STORE_PAUSE;
use crate::runtime::service::{OnEnd, Service, stopped, until_stopped};
use crate::runtime::trusted_path;
use crate::store::lease::Lease;
use crate::store::rollback::RollbackGuard;
use crate::store::{Identity, ZkTree};
use crate::unit::host::UnitHost;
use crate::unit::{machine_problem, supervisor};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    globals: Globals,
    /// Number of this machine
    #[arg(long, value_name = "N")]
    id: String,
    /// File with the machine's credentials [default: the saved one]
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Address that other machines reach this one at, for `juju status`; may be repeated, the first
    /// is shown [default: those of the network interfaces]
    #[arg(long, value_name = "ADDR")]
    address: Vec<String>,
    /// Remove the machine's units, their processes, its firewall table and its credentials from
    /// this host, and exit. The store is not used. The machine file names the directories, and is
    /// also looked for below /etc/portcullis
    #[arg(long)]
    leave: bool,
    /// Tracker to send beats to, http://HOST:PORT or https://HOST:PORT; may be repeated, and the
    /// next one is tried when one does not answer [default: the trackers listed in the store]
    #[arg(long, value_name = "URL")]
    beat_to: Vec<String>,
    /// CA certificates (PEM) to trust for https:// trackers, besides the environment's and, with
    /// --beat-to, those of the system
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    #[command(flatten)]
    firewall: FirewallArgs,
    #[command(flatten)]
    units: UnitArgs,
    #[command(flatten)]
    systemd: SystemdArgs,
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let id: MachineId = parse_arg(&args.id)?;
    let environment = args.globals.environment()?;
    let addresses = args.address.iter().map(|text| parse_arg(text)).collect::<Result<_, _>>()?;
    args.firewall.check()?;
    if args.leave {
        return leave(args, &environment, id).await;
    }
    let file = machine_file::ensure(&args.globals, id, args.credentials.as_deref()).await?;
    let trackers =
        args.beat_to.iter().map(|url| url_of(url).map_err(|problem| Usage::new(format!("{url}: {problem}"))));
    let (found, trackers) = watch::channel(trackers.collect::<Result<Vec<_>, _>>()?);
    let sender = BeatClient::new(id, &file.credential.expose(), trackers);
    let data = up::data_dir(&environment, None)?;
    let mut agent = prepare(&environment, id, file, (&args.firewall, &args.units), (Kind::None, &data))?;
    let machine = Some(agent.machine_files());
    // The trackers in the store and the managers have certificates of the environment's CA.
    let of_node = ClientFiles { machine, ..ClientFiles::default() };
    let of_beats =
        ClientFiles { system_roots: !args.beat_to.is_empty(), ca: args.ca_file.clone(), ..of_node.clone() };
    let (of_node, tls) = (ClientTls::load(of_node)?, ClientTls::load(of_beats)?);
    let sender = sender.with_certificate(tls.clone());
    agent.trackers = args.beat_to.is_empty().then_some(found);
    agent.addresses = addresses;
    agent.node = args.systemd.agent(&of_node, agent.file.address.is_loopback())?;
    let path = machine_file::path(&args.globals, id, args.credentials.as_deref())?;
    if args.credentials.is_none() {
        let data = std::path::absolute(&data)?;
        machine_file::save_directories(&path, Directories { units: agent.host.directory.clone(), data });
    }
    agent.machine_file = Some(path);
    let registry = Registry::default();
    agent.add_metrics(&registry);
    args.firewall.metrics().start(&mut service, &registry).await?;
    service.next_stage();
    service.start("machine", OnEnd::StopOthers, |stop| agent.run(stop));
    start_beats(&mut service, sender, Client::new(tls));
    service.run().await
}

/// Removes the machine from this host without a store, from the directories that its agent used.
async fn leave(args: &Args, environment: &EnvironmentName, id: MachineId) -> anyhow::Result<()> {
    let named = args.credentials.as_deref();
    let (file, machine_file) = machine_file::installed(&args.globals, id, named)?;
    let (units, data) = match file.directories.clone() {
        Some(Directories { units, data }) => (Some(units), data),
        None => (None, up::data_dir(environment, None)?),
    };
    // The directories of an agent with named credentials are not saved.
    let is_known = units.is_some() || args.units.names_directory() || named.is_none();
    let units = args.units.or_directory(units);
    let agent = prepare(environment, id, file, (&args.firewall, &units), (Kind::None, &data))?;
    if !is_known && !agent.host.directory.exists() {
        let (environment, directory) = (environment.clone(), agent.host.directory);
        return Err(Refusal::NoUnitsDirectory { environment, machine: id, directory }.into());
    }
    let leaving = Leaving { host: agent.host, identity: agent.identity, machine_file };
    let (_stop, stopped) = watch::channel(false);
    let Removed { units, table } = leaving.leave(stopped).await?;
    let table = if table { " and the firewall table" } else { "" };
    output::message(&format!("Machine {id} has left: {units} units{table} removed."));
    output::hint(&format!("`juju terminate-machine {id} --force` removes it from the environment"));
    Ok(())
}

/// Sends heartbeats for the machine, and a last one when it stops.
pub(super) fn start_beats(service: &mut Service<anyhow::Error>, sender: BeatClient, client: Client) {
    service.start("beats", OnEnd::Continue, |stop| sender.run(Arc::new(client), stop).map(Ok));
}

/// An agent that is ready to run, with all arguments checked.
pub(super) struct MachineAgent {
    id: MachineId,
    file: MachineFile,
    policy: Policy,
    /// Reads the policy file again.
    reader: Option<PolicyReader>,
    resync: Duration,
    /// `None` if the firewall is not managed.
    firewall: Option<LocalFirewall>,
    metrics: Metrics,
    progress: watch::Sender<Progress>,
    host: UnitHost,
    guard: Arc<RollbackGuard>,
    /// Receives the addresses of trackers from the store.
    trackers: Option<watch::Sender<Vec<String>>>,
    /// The files of the machine's certificate.
    identity: MachineIdentity,
    /// Addresses to report instead of those of the network interfaces.
    addresses: Vec<HostAddress>,
    /// `None` if the environment's manager does not control systemd of this machine.
    node: Option<NodeAgent>,
    /// Removed when the machine leaves its environment; `None` for a machine that cannot be
    /// terminated.
    machine_file: Option<PathBuf>,
}

/// The settings of the machine's own firewall.
struct LocalFirewall {
    table: TableSettings,
    dry: bool,
    /// The kind of firewall, for the report.
    kind: &'static str,
}

/// Checks all arguments. `usual` is the default of `--firewall`, and `data` the data directory.
pub(super) fn prepare(
    environment: &EnvironmentName,
    id: MachineId,
    file: MachineFile,
    (own, units): (&FirewallArgs, &UnitArgs),
    (usual, data): (Kind, &Path),
) -> anyhow::Result<MachineAgent> {
    let base = Policy::for_own_machine(own.ports(&file.address));
    let policy = own.agent_args.policy(base.clone())?;
    let reader = own.agent_args.policy_reader(base);
    let mode = match own.firewall.unwrap_or(usual) {
        Kind::None => None,
        Kind::DryRun => Some((Mode::Enforce, true, "a dry run for nftables on the machine itself")),
        Kind::Nftables => Some((Mode::Enforce, false, "nftables on the machine itself")),
        Kind::NftablesAcceptOnly => {
            Some((Mode::AcceptOnly, false, "nftables on the machine itself, accepting only"))
        }
    };
    let firewall = match mode {
        None => None,
        Some((mode, dry, kind)) => {
            let table = TableName::for_instance(environment.as_str()).map_err(Usage::new)?;
            let (protected, protected_from) = own.protected(&file.address)?;
            let table = TableSettings { table, mode, protected, protected_from };
            Some(LocalFirewall { table, dry, kind })
        }
    };
    let resync = own.agent_args.resync();
    let host = units.host(environment, id, &file, data, resync)?;
    let identity = file.credential.identity();
    let memory = checkpoint_file::open(environment, &id.key(), identity.as_str());
    let guard = Arc::new(RollbackGuard::of_machine(id, &file.roles, &identity, memory));
    Ok(MachineAgent {
        id,
        file,
        policy,
        reader,
        resync,
        firewall,
        metrics: Metrics::default(),
        progress: watch::Sender::new(Progress::default()),
        host,
        guard,
        trackers: None,
        identity: identity_files(data, id)?,
        addresses: Vec::new(),
        node: None,
        machine_file: None,
    })
}

/// Returns the files of a machine's certificate, and creates their directory.
pub(super) fn identity_files(data: &Path, id: MachineId) -> anyhow::Result<MachineIdentity> {
    let directory = data.join("identity");
    trusted_path::ensure_directory(&directory, 0o700)
        .with_context(|| format!("cannot use directory {}", directory.display()))?;
    Ok(MachineIdentity::new(directory, id))
}

impl MachineAgent {
    /// The files of the machine's certificate, for its clients.
    pub(super) fn machine_files(&self) -> MachineFiles {
        self.identity.machine_files()
    }

    /// Runs the agent of the machine's node as well.
    pub(super) fn with_node(self, node: Option<NodeAgent>) -> Self {
        Self { node, ..self }
    }

    pub(super) fn add_metrics(&self, registry: &Registry) {
        metrics::add_firewall(registry, "machine", &self.metrics, &self.progress.subscribe());
    }

    /// Keeps the checkpoint in this directory instead of the user's data directory.
    pub(super) fn with_checkpoint_in(mut self, directory: &Path) -> Self {
        let identity = self.file.credential.identity();
        let memory = checkpoint_file::open_in(directory, &self.id.key(), identity.as_str());
        self.guard = Arc::new(RollbackGuard::of_machine(self.id, &self.file.roles, &identity, memory));
        self
    }

    async fn claim(&mut self, identity: &Identity) -> anyhow::Result<MachineClaim> {
        Ok(MachineClaim {
            machine: self.id,
            acl: self.file.roles.machine_agent(identity),
            holder: holder()?,
            resync: self.resync,
            host: Some(HostReport {
                acl: self.file.roles.machine_host(identity),
                given: std::mem::take(&mut self.addresses),
                preferred: address_toward(&self.file.address).await,
            }),
        })
    }

    /// Runs until the role is asked to stop, or fails in a way that a retry does not cure. Open
    /// ports stay open.
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        // The machine may be up before its store is.
        let connect = || ZkTree::connect(&self.file.address, Some(&self.file.credential)).map_err(Into::into);
        let tree = tokio::select! {
            tree = wait_for_store(connect) => tree?,
            () = stopped(&mut stop) => return Ok(()),
        };
        let identity = self.file.credential.identity();
        let claim = self.claim(&identity).await?;
        let firewall = match self.firewall {
            Some(LocalFirewall { table, dry, kind }) => {
                let nftables = Nftables::new(number(self.id), table);
                Some((if dry { LocalProvider::dry(nftables) } else { LocalProvider::Real(nftables) }, kind))
            }
            None => None,
        };
        let mut agent = firewall.map(|(firewall, kind)| {
            let acl = self.file.roles.machine_firewall(&identity);
            FirewallController::for_machine(tree.clone(), firewall, self.policy, (self.id, acl, kind), jitter)
                .with_policy_reader(self.reader)
                .with_metrics(self.metrics)
                .with_guard(Arc::clone(&self.guard))
        });
        let following =
            self.trackers.map(|found| tokio::spawn(follow_trackers(tree.clone(), self.id, found)));
        let certificates = {
            let applicant =
                Applicant { id: self.id, identity: identity.clone(), roles: self.file.roles.clone() };
            let (tree, files) = (tree.clone(), self.identity.clone());
            tokio::spawn(async move { applicant.keep_certificate(&tree, &files).await })
        };
        let node = self.node.map(|node| tokio::spawn(node.run(tree.clone(), self.id, stop.clone())));
        let progress = self.progress;
        let seen = progress.subscribe();
        info!(machine = %self.id, "machine ready");
        let working = async {
            let holding = async {
                let ended = local_loop::run(agent.as_mut(), &tree, &claim, &progress, stop.clone()).await;
                drop(progress);
                ended
            };
            tokio::join!(holding, run_units(&tree, &self.host, &self.guard, seen)).0
        };
        let mut ended: anyhow::Result<()> = until_stopped(working, stop.clone()).await;
        drop(agent);
        certificates.abort();
        if let Some(node) = node {
            node.abort();
        }
        if let (Err(error), Some(machine_file)) = (&ended, self.machine_file)
            && matches!(error.downcast_ref(), Some(presence::Error::NoMachine(_)))
        {
            let leaving = Leaving { host: self.host, identity: self.identity, machine_file };
            // A store that cannot be read is no tombstone.
            match leaving.leave_if_terminated(&tree, &self.guard, stop).await {
                Ok(Some(left)) => ended = Err(left.into()),
                Ok(None) => {}
                Err(error) => error!(error = format!("{error:#}"), "the machine cannot leave"),
            }
        }
        if let Some(following) = following {
            following.abort();
        }
        // Ends the session, so that the next agent does not wait for its timeout.
        tree.close().await;
        ended
    }
}

/// Runs the machine's units while this process holds the machine. A failure of units does not stop
/// the firewall.
async fn run_units(
    tree: &ZkTree,
    host: &UnitHost,
    guard: &RollbackGuard,
    mut held: watch::Receiver<Progress>,
) {
    let mut logged = String::new();
    while held.wait_for(|progress| progress.leading).await.is_ok() {
        let (stop, stopped) = watch::channel(false);
        let mut running = std::pin::pin!(supervisor::run(tree, host, guard, stopped));
        let ended = tokio::select! {
            ended = &mut running => Some(ended),
            // Also if the sender is gone.
            () = async { drop(held.wait_for(|progress| !progress.leading).await) } => None,
        };
        let ended = match ended {
            Some(ended) => ended,
            None => {
                stop.send_replace(true);
                running.await
            }
        };
        if let Err(error) = ended {
            let problem = format!("units are not managed: {:#}", anyhow::Error::new(error));
            machine_problem::report(tree, host, Some(&problem)).await;
            // Logged once, not at every retry.
            if problem != logged {
                error!("{problem}");
                logged = problem;
            }
            tokio::time::sleep(STORE_PAUSE).await;
        }
    }
}

/// Names this process to another one that wants the machine. The name is unique.
fn holder() -> anyhow::Result<String> {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().into_owned();
    Ok(format!("process {} on {host} ({})", std::process::id(), Lease::token()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_holders_are_unique() {
        let (one, two) = (holder().unwrap(), holder().unwrap());
        assert_ne!(one, two);
        assert!(one.starts_with(&format!("process {} on ", std::process::id())), "{one}");
    }
}
