//! `portcullis machine`: the agent of one machine. It holds the machine, so that status can say that somebody does, and
//! looks after its firewall if it is told to. What is opened is decided in `firewall`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use portcullis_provider::Nftables;
use portcullis_provider::nftables::{Mode, Settings as TableSettings, TableName};
use portcullis_provider::rule::Protocol;
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::checkpoint_file;
use super::failure::{Usage, typed};
use super::heartbeat_role::read_ca;
use super::machine_file::{self, MachineFile};
use super::metrics::{self, Watched};
use super::settings::Globals;
use super::unit_options::UnitOptions;
use super::up;
use super::upkeep::{Upkeep, jitter, until_stopped};
use crate::firewall::agent::{Agent, PolicyReader};
use crate::firewall::apply::number;
use crate::firewall::here::Here;
use crate::firewall::machine::{Claim, run as run_machine};
use crate::firewall::metrics::Metrics;
use crate::firewall::policy::Policy;
use crate::firewall::run::Progress;
use crate::heartbeat::announce::follow;
use crate::heartbeat::notify::Http;
use crate::heartbeat::params::url_of;
use crate::heartbeat::sender::Sender;
use crate::heartbeat::tls::Trust;
use crate::model::{EnvironmentName, MachineId, PortRange, ports};
use crate::runtime::shutdown::Shutdown;
use crate::store::election::Leadership;
use crate::store::rollback::RollbackGuard;
use crate::store::{Address, ZkTree};
use crate::unit::site::Site;
use crate::unit::{problem, units};

/// How often a store that is not there yet is looked for.
const STORE_PAUSE: Duration = Duration::from_secs(1);

const SSH: u16 = 22;

#[derive(Debug, Args)]
pub(super) struct Typed {
    #[command(flatten)]
    globals: Globals,
    /// Machine that this is
    #[arg(long, value_name = "N")]
    id: String,
    /// Who this machine is to the store [default: what is remembered for it]
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Tracker to beat to, http://HOST:PORT or https://HOST:PORT; of several the next is tried when one does not answer
    /// [default: those that said in the store where they are]
    #[arg(long, value_name = "URL")]
    beat_to: Vec<String>,
    /// Certificates in PEM of who else is believed when an https:// tracker is beaten to, besides those of this system
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    #[command(flatten)]
    own: Own,
    #[command(flatten)]
    units: UnitOptions,
}

/// How a machine's own firewall is looked after.
#[derive(Debug, Clone, Args)]
pub(super) struct Own {
    /// How this machine's own firewall is looked after [default: dry-run for `up`, none for `machine`]
    #[arg(long, value_enum, value_name = "HOW")]
    firewall: Option<Kind>,
    /// A port that stays open, whatever is asked for: PORT[-PORT][/PROTOCOL]; ssh, the store's and our own always do
    #[arg(long, value_name = "PORT")]
    protect: Vec<String>,
    /// Where a tracker in the same process listens.
    #[arg(skip)]
    tracker: Option<u16>,
    #[command(flatten)]
    upkeep: Upkeep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// Not at all
    None,
    /// Says what nftables would be told to open and to close, and tells it nothing
    DryRun,
    /// nftables: what nobody asked for is rejected
    Nftables,
    /// nftables: what was asked for is accepted, and the rest left to others
    NftablesAcceptOnly,
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let shutdown = Shutdown::listen().context("cannot catch signals")?;
    let id: MachineId = typed(&args.id)?;
    let environment = args.globals.environment()?;
    args.own.check()?;
    let trust = args.ca_file.as_deref().map_or_else(|| Ok(Trust::default()), read_ca)?;
    let file = machine_file::ensure(&args.globals, id, args.credentials.as_deref()).await?;
    let trackers =
        args.beat_to.iter().map(|url| url_of(url).map_err(|problem| Usage::new(format!("{url}: {problem}"))));
    let (found, trackers) = watch::channel(trackers.collect::<Result<Vec<_>, _>>()?);
    let sender = Sender::new(id, &file.credential.expose(), trackers);
    let data = up::data_dir(&environment, None)?;
    let mut agent = prepare(&environment, id, file, (&args.own, &args.units), (Kind::None, &data))?;
    agent.trackers = args.beat_to.is_empty().then_some(found);
    let (stop, stopped) = watch::channel(false);
    // Ends with its runtime if the agent does not end in order.
    let beating = tokio::spawn(sender.run(Arc::new(Http::trusting(trust)), stop.subscribe()));
    let mut running = std::pin::pin!(agent.run(stopped));
    let mut shutdown = shutdown;
    tokio::select! {
        ended = &mut running => ended,
        signal = shutdown.asked() => {
            info!(signal, "stopping");
            stop.send_replace(true);
            beating.await.context("the beats ended badly")?;
            running.await
        }
    }
}

impl Own {
    /// Refuses what makes no sense before anything is touched.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        self.protected(&"127.0.0.1".parse()?).map(drop)
    }

    /// With a tracker in the same process.
    pub(super) fn beside(self, tracker: Option<u16>) -> Self {
        Own { tracker, ..self }
    }

    /// The store's, and those that this process listens on.
    fn ports(&self, store: &Address) -> impl Iterator<Item = u16> {
        store.ports().chain(self.upkeep.watched.port()).chain(self.tracker)
    }

    fn protected(&self, store: &Address) -> anyhow::Result<Vec<PortRange>> {
        let own = std::iter::once(SSH).chain(self.ports(store));
        let own = own.map(|port| PortRange::single(port, Protocol::Tcp).map_err(Usage::new));
        let named = self.protect.iter().map(|text| ports::parse_argument(text).map_err(Usage::new));
        Ok(own.chain(named).collect::<Result<_, _>>()?)
    }
}

/// An agent that is ready to run: nothing that was typed can be wrong any more.
pub(super) struct MachineAgent {
    id: MachineId,
    file: MachineFile,
    policy: Policy,
    /// Reads the policy file again.
    reader: Option<PolicyReader>,
    resync: Duration,
    /// None if the firewall is not looked after.
    firewall: Option<Looked>,
    watched: Watched,
    site: Site,
    guard: Arc<RollbackGuard>,
    /// Who wants to know where trackers are.
    trackers: Option<watch::Sender<Vec<String>>>,
}

/// How a firewall is looked after.
struct Looked {
    table: TableSettings,
    dry: bool,
    /// What it is made of, for the report.
    words: &'static str,
}

/// `usual` is how the firewall is looked after unless it was said, and `data` where files go.
pub(super) fn prepare(
    environment: &EnvironmentName,
    id: MachineId,
    file: MachineFile,
    (own, units): (&Own, &UnitOptions),
    (usual, data): (Kind, &Path),
) -> anyhow::Result<MachineAgent> {
    let base = Policy::for_own_machine(own.ports(&file.address));
    let policy = own.upkeep.policy(base.clone())?;
    let reader = own.upkeep.policy_reader(base);
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
        Some((mode, dry, words)) => {
            let table = TableName::for_instance(environment.as_str()).map_err(Usage::new)?;
            let table = TableSettings { table, mode, protected: own.protected(&file.address)? };
            Some(Looked { table, dry, words })
        }
    };
    let (resync, watched) = (own.upkeep.resync(), own.upkeep.watched.clone());
    let site = units.site(environment, id, &file, data, resync)?;
    let identity = file.credential.identity();
    let memory = checkpoint_file::open(environment, &id.key(), identity.as_str());
    let guard = Arc::new(RollbackGuard::of_machine(id, &file.roles, &identity, memory));
    Ok(MachineAgent { id, file, policy, reader, resync, firewall, watched, site, guard, trackers: None })
}

impl MachineAgent {
    /// With its checkpoint in this directory instead of the user's data directory.
    pub(super) fn with_checkpoint_in(mut self, directory: &Path) -> Self {
        let identity = self.file.credential.identity();
        let memory = checkpoint_file::open_in(directory, &self.id.key(), identity.as_str());
        self.guard = Arc::new(RollbackGuard::of_machine(self.id, &self.file.roles, &identity, memory));
        self
    }

    /// Runs until `stop` says so and a last pass is over or hangs, or until it fails in a way that waiting does not cure. What is
    /// open stays so.
    pub(super) async fn run(self, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        let (progress, watching) = watch::channel(Progress::default());
        let metrics = Metrics::default();
        // Before the store is there: somebody may want to know that it is not.
        let door = self.watched.open(&metrics, watching, stop.clone()).await?;
        let Some(tree) = self.connect(&mut stop).await? else { return Ok(()) };
        let identity = self.file.credential.identity();
        let claim = Claim {
            machine: self.id,
            acl: self.file.roles.machine_agent(&identity),
            holder: holder()?,
            resync: self.resync,
        };
        let firewall = match self.firewall {
            Some(Looked { table, dry, words }) => {
                let nftables = Nftables::new(number(self.id), table);
                Some((if dry { Here::dry(nftables) } else { Here::Real(nftables) }, words))
            }
            None => None,
        };
        let mut agent = firewall.map(|(firewall, words)| {
            let acl = self.file.roles.machine_firewall(&identity);
            Agent::of_machine(tree.clone(), firewall, self.policy, (self.id, acl, words), jitter)
                .with_policy_reader(self.reader)
                .with_metrics(metrics)
                .with_guard(Arc::clone(&self.guard))
        });
        let following = self.trackers.map(|found| tokio::spawn(follow(tree.clone(), self.id, found)));
        let seen = progress.subscribe();
        info!(machine = %self.id, "machine ready");
        let working = async {
            let holding = async {
                let ended = run_machine(agent.as_mut(), &tree, &claim, &progress, stop.clone()).await;
                drop(progress);
                ended
            };
            tokio::join!(holding, tend_units(&tree, &self.site, &self.guard, seen)).0
        };
        let ended = until_stopped(working, stop.clone()).await;
        drop(agent);
        if let Some(following) = following {
            following.abort();
        }
        // Ends the session, so that the next agent need not wait for it.
        tree.close().await;
        metrics::shut(door).await;
        ended
    }

    /// A machine may well be up before its store is.
    async fn connect(&self, stop: &mut watch::Receiver<bool>) -> anyhow::Result<Option<ZkTree>> {
        let mut told = false;
        loop {
            match ZkTree::connect(&self.file.address, Some(&self.file.credential)).await {
                Ok(tree) => return Ok(Some(tree)),
                Err(error) if error.is_retryable() => {
                    if !told {
                        warn!(%error, "waiting for the store");
                        told = true;
                    }
                }
                Err(error) => return Err(error.into()),
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_PAUSE) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(None),
            }
        }
    }
}

/// Runs the machine's units for as long as we hold the machine. What stops them does not stop the firewall.
async fn tend_units(tree: &ZkTree, site: &Site, guard: &RollbackGuard, mut held: watch::Receiver<Progress>) {
    let mut said = String::new();
    while held.wait_for(|progress| progress.leading).await.is_ok() {
        let (stop, stopped) = watch::channel(false);
        let mut running = std::pin::pin!(units::run(tree, site, guard, stopped));
        let ended = tokio::select! {
            ended = &mut running => Some(ended),
            // Also if nobody is left to say so.
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
            let problem = format!("units are not looked after: {:#}", anyhow::Error::new(error));
            problem::tell(tree, site, Some(&problem)).await;
            // It is tried again and again, and said once.
            if problem != said {
                error!("{problem}");
                said = problem;
            }
            tokio::time::sleep(STORE_PAUSE).await;
        }
    }
}

/// Who we are to somebody else who wants the machine, and unlike any other.
fn holder() -> anyhow::Result<String> {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().into_owned();
    Ok(format!("process {} on {host} ({})", std::process::id(), Leadership::token()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(firewall: Kind, protect: &[&str]) -> Own {
        let upkeep = Upkeep { resync: 60, policy: None, watched: Watched::default() };
        let protect = protect.iter().map(|&text| text.to_owned()).collect();
        Own { firewall: Some(firewall), protect, tracker: None, upkeep }
    }

    #[test]
    fn the_way_in_stays_open_and_more_if_it_is_asked_for() {
        let store: Address = "127.0.0.1:4711,zk2:2182/prod".parse().unwrap();
        let words = |own: &Own| -> Vec<String> {
            own.protected(&store).unwrap().iter().map(ToString::to_string).collect()
        };
        assert_eq!(words(&own(Kind::Nftables, &[])), ["22/tcp", "4711/tcp", "2182/tcp"]);
        let more = words(&own(Kind::Nftables, &["51820/udp", "9100-9110"]));
        assert_eq!(more[3..], ["51820/udp", "9100-9110/tcp"]);
        let beside = own(Kind::Nftables, &[]).beside(Some(9400));
        assert_eq!(words(&beside)[3..], ["9400/tcp"]);
        let refused = own(Kind::None, &["eighty"]).check().unwrap_err();
        assert!(refused.is::<Usage>(), "{refused}");
    }

    #[test]
    fn two_holders_are_never_the_same() {
        let (one, two) = (holder().unwrap(), holder().unwrap());
        assert_ne!(one, two);
        assert!(one.starts_with(&format!("process {} on ", std::process::id())), "{one}");
    }
}
