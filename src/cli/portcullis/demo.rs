//! `portcullis demo`: deploys, exposes and unexposes a service, and controls systemd on two nodes,
//! in a directory that is removed afterwards and, where the kernel allows it, in a private network
//! with a real firewall. It runs the commands that an operator would type and shows them; this
//! user's own settings are neither read nor written.

mod hook_tools;
mod network;
#[cfg(feature = "fleet")]
mod nodes;

use std::ffi::OsStr;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::Parser;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::cli::args::own_firewall::{self, FirewallArgs};
use crate::cli::args::units::UnitArgs;
use crate::cli::config::ConfigDir;
use crate::cli::juju;
use crate::cli::output;
use crate::cli::portcullis::machine;
use crate::cli::portcullis::machine_file;
use crate::cli::portcullis::up;
use crate::firewall::status_section;
use crate::keeper::Config;
use crate::model::UnitName;
use crate::runtime::shutdown::Shutdown;
use crate::status::sections::{Machines, Services};
use crate::status::view::Unit;
use crate::status::{Scope, View};
use crate::store::{Environment, Snapshot, UnitPorts, ZkTree};
use network::{Client, Kind};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// This process is in namespaces that the demo made
    #[arg(long = network::FLAG, hide = true)]
    in_namespace: bool,
}

/// The charm, in the binary, so that the demo needs no charm directory.
const CHARM: &[(&str, &str, u32)] = &[
    ("metadata.yaml", include_str!("../../../fixtures/charms/hello/metadata.yaml"), 0o644),
    ("server.py", include_str!("../../../fixtures/charms/hello/server.py"), 0o644),
    ("hooks/install", include_str!("../../../fixtures/charms/hello/hooks/install"), 0o755),
    ("hooks/start", include_str!("../../../fixtures/charms/hello/hooks/start"), 0o755),
    ("hooks/exposed", include_str!("../../../fixtures/charms/hello/hooks/exposed"), 0o755),
    ("hooks/unexposed", include_str!("../../../fixtures/charms/hello/hooks/unexposed"), 0o755),
    ("hooks/stop", include_str!("../../../fixtures/charms/hello/hooks/stop"), 0o755),
];
const UNIT: &str = "hello/0";

/// Time limit of each step; only a hang reaches it.
const TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The defaults of `portcullis up`.
#[derive(Debug, Parser)]
struct Defaults {
    #[command(flatten)]
    firewall: FirewallArgs,
    #[command(flatten)]
    units: UnitArgs,
}

/// Omits warnings about missing isolation between units: the demo's only unit runs the demo's own
/// charm.
pub(super) fn log_filter(level: &str) -> String {
    format!("{level},portcullis::unit::supervisor=error,portcullis::cli::args::units=error")
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let client = if args.in_namespace {
        Client::neighbour()?
    } else {
        hook_tools::ensure()?;
        let reason = network::enter();
        say(&format!("# A dry run, which changes no firewall: {reason}."))?;
        Client::Localhost
    };
    // Before anything exists that has to be removed.
    let mut shutdown = Shutdown::listen().context("cannot listen for signals")?;
    let place = DemoDir::make()?;
    let told = tell(&place, Arc::new(client), &mut shutdown).await;
    let removed =
        fs::remove_dir_all(&place.0).with_context(|| format!("cannot remove {}", place.0.display()));
    told.and(removed)
}

async fn tell(place: &DemoDir, client: Arc<Client>, shutdown: &mut Shutdown) -> anyhow::Result<()> {
    say(&format!("# All files are in {} and are removed at the end.", place.0.display()))?;
    let firewall = match *client {
        Client::Neighbour(_) => {
            say(
                "# The network is private, too: this machine and, in a namespace of its own, one neighbour.",
            )?;
            "nftables"
        }
        Client::Localhost => "dry-run",
    };
    let data = place.0.join("data");
    let shown = data.display();
    say(&format!("$ portcullis up --data-dir {shown} --listen 127.0.0.1:0 --firewall {firewall} &"))?;
    let story = juju::Transcript::new(place.config());
    let wanted = Config::new(data.clone(), (Ipv4Addr::LOCALHOST, 0).into());
    let keeper = up::start(story.globals(), &story.globals().environment()?, wanted).await?;
    crate::cli::portcullis::keeper::announce(&keeper, false)?;
    let units = place.0.join("units");
    let (stop, agent) = start_agent(&story, &data, &units, firewall).await?;
    let told = play(&story, place, &client, shutdown).await;
    // Also after a failure: no process of the charm stays, and the store stops last.
    let cleared = clear_away(&units).await;
    stop.send_replace(true);
    agent.await.context("the machine's agent has died")??;
    keeper.stop_handle().stop();
    tokio::task::spawn_blocking(move || keeper.wait())
        .await
        .context("the keeper thread ended unexpectedly")??;
    told.and(cleared)
}

/// Machine 0, as `up` runs it, with all of its files in one directory.
async fn start_agent(
    story: &juju::Transcript,
    data: &Path,
    units: &Path,
    firewall: &str,
) -> anyhow::Result<(watch::Sender<bool>, JoinHandle<anyhow::Result<()>>)> {
    let globals = story.globals();
    let environment = globals.environment()?;
    let file = machine_file::ensure(globals, up::LOCAL_MACHINE, None).await?;
    let prepare = |more: &[&OsStr]| {
        let typed = ["portcullis up", "--firewall", firewall, "--units-dir"].map(OsStr::new);
        let typed = typed.into_iter().chain([units.as_os_str()]).chain(more.iter().copied());
        let typed = Defaults::try_parse_from(typed)?;
        let usual = (own_firewall::Kind::DryRun, data);
        machine::prepare(
            &environment,
            up::LOCAL_MACHINE,
            file.clone(),
            (&typed.firewall, &typed.units),
            usual,
        )
    };
    let agent = prepare(&[]).or_else(|error| {
        // For example, the temporary directory is closed to other users. Root is safe for the
        // demo's own charm.
        say(&format!("# Its hooks run as root here: {error:#}"))?;
        prepare(&["--hook-user", "0:0"].map(OsStr::new))
    })?;
    let agent = agent.with_checkpoint_in(&data.with_file_name("agents"));
    let (stop, stopped) = watch::channel(false);
    Ok((stop, tokio::spawn(agent.run(stopped))))
}

async fn play(
    story: &juju::Transcript,
    place: &DemoDir,
    client: &Arc<Client>,
    shutdown: &mut Shutdown,
) -> anyhow::Result<()> {
    let charm = place.charm()?;
    story.juju(&["deploy", &charm.to_string_lossy()]).await?;
    let acted = tokio::select! {
        acted = act(story, place, client) => acted,
        // An interrupted demo removes everything, too.
        signal = shutdown.asked() => Err(anyhow!("the demo was interrupted by {signal}")),
    };
    let destroyed = story.juju(&["destroy-service", "hello"]).await;
    acted.and(destroyed)
}

async fn act(story: &juju::Transcript, place: &DemoDir, client: &Arc<Client>) -> anyhow::Result<()> {
    say(
        "# The machine runs the charm's hooks: install, then start, which serves a page on a free port and \
         opens it.",
    )?;
    becomes(story, |unit| unit.agent_state.as_deref() == Some("started")).await?;
    let port = port_of_unit(story).await?;
    story.juju(&["status"]).await?;
    let is_real = matches!(**client, Client::Neighbour(_));
    if is_real {
        say("# The unit asked for its port, but the service is not exposed: the firewall refuses the \
             neighbour.")?;
        fetch(client, port, Kind::Refused, "").await?;
    }
    story.juju(&["expose", "hello"]).await?;
    fetch(client, port, Kind::Page, "Hello world").await?;
    if is_real {
        // The report about the firewall is written a moment after the port is open.
        becomes(story, |unit| unit.firewall.is_empty()).await?;
    }
    story.juju(&["status", "hello"]).await?;
    story.juju(&["unexpose", "hello"]).await?;
    if is_real {
        fetch(client, port, Kind::Refused, "").await?;
        hook_has_run(port).await?;
    } else {
        fetch(client, port, Kind::Page, "Hello from").await?;
    }
    story.juju(&["status", "--format", "tabular"]).await?;
    #[cfg(feature = "fleet")]
    nodes::act(story, &place.0.join("nodes"), is_real).await?;
    #[cfg(not(feature = "fleet"))]
    say("# Nodes with systemd are not shown: this build has no fleet.")?;
    say("# Done. `portcullis up` starts an environment that stays.")
}

/// Waits until the unit is in the wanted state.
async fn becomes(story: &juju::Transcript, wanted: impl Fn(&Unit) -> bool) -> anyhow::Result<Unit> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let read =
            async |_: &_, environment: &Environment<ZkTree>| Ok(Snapshot::read(environment.tree()).await?);
        let snapshot = story.globals().in_environment(read).await?;
        let firewall = status_section::of(&snapshot);
        let view = View::new(&[&Machines(&snapshot), &Services(&snapshot), &firewall], &Scope::default());
        let unit = view.services.get("hello").and_then(|service| service.units.get(UNIT)).cloned();
        match unit {
            Some(unit) if wanted(&unit) => return Ok(unit),
            Some(Unit { failure: Some((failure, output)), .. }) => bail!("{failure}: {}", output.join(" ")),
            _ if Instant::now() >= deadline => bail!("{UNIT} takes more than {} s", TIMEOUT.as_secs()),
            _ => sleep(POLL_INTERVAL).await,
        }
    }
}

/// The port that the unit's start hook opened. Status shows it once the service is exposed.
async fn port_of_unit(story: &juju::Transcript) -> anyhow::Result<u16> {
    let name: UnitName = UNIT.parse()?;
    let read = async |_: &_, environment: &Environment<ZkTree>| {
        let (id, _) = environment.unit(&name).await?;
        Ok(UnitPorts::new(environment.tree(), id).read().await?)
    };
    let ports = story.globals().in_environment(read).await?;
    ports.ranges().next().map(|range| range.from()).context("the unit has opened no port")
}

/// Repeats the request until it ends as expected, and shows the last one.
async fn fetch(client: &Arc<Client>, port: u16, kind: Kind, start: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let asking = Arc::clone(client);
        let answer = tokio::task::spawn_blocking(move || asking.get(port)).await;
        let answer = answer.context("the request has panicked")?.context("cannot send a request")?;
        if answer.kind == kind && answer.shown.starts_with(start) {
            let shown = &answer.shown;
            let text = format!("$ curl http://{}:{port}/\n{shown}", client.host());
            return output::data(&text).context("cannot write to stdout");
        }
        if Instant::now() >= deadline {
            bail!("unexpected answer from port {port}: {}", answer.shown.trim());
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits for the page that the `unexposed` hook writes: the port may close before that hook begins,
/// and a service that is destroyed meanwhile never runs it.
async fn hook_has_run(port: u16) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let asking = tokio::task::spawn_blocking(move || network::own_request("127.0.0.1", port));
        if asking.await.context("the request has panicked")?.shown.starts_with("Hello from") {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("the unexposed hook has not run after {} s", TIMEOUT.as_secs());
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until nothing of the unit is left on the machine.
async fn clear_away(units: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let runs = units.join("runs");
    while fs::read_dir(&runs).is_ok_and(|mut units| units.next().is_some()) {
        if Instant::now() >= deadline {
            bail!("the unit's processes do not end");
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

fn say(line: &str) -> anyhow::Result<()> {
    output::data(&format!("{line}\n")).context("cannot write to stdout")
}

/// The directory of the demo.
struct DemoDir(PathBuf);

impl DemoDir {
    fn make() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("portcullis-demo-{}", std::process::id()));
        // Hook users need search permission; secrets are in a directory of their own.
        let made = fs::DirBuilder::new().mode(0o711).create(&path);
        made.with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    fn config(&self) -> ConfigDir {
        ConfigDir::below(&self.0.join("config"))
    }

    fn charm(&self) -> anyhow::Result<PathBuf> {
        let directory = self.0.join("hello");
        for (name, text, mode) in CHARM {
            let path = directory.join(name);
            write(&path, text, *mode).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(directory)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
