//! `portcullis demo`: the whole story by itself, in a directory that is gone afterwards. It types what an operator
//! would type, and shows it; nothing of this user's own settings is read or written.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, Parser};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::config::ConfigDir;
use super::unit_options::UnitOptions;
use super::{hook_env, juju, machine, machine_file, output, status, up};
use crate::keeper::Config;
use crate::model::ports::parse_argument;
use crate::model::{UnitId, UnitName};
use crate::runtime::shutdown::Shutdown;
use crate::status::view::Unit;
use crate::status::{Scope, View, collect};
use crate::store::{Environment, UnitPorts, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {}

/// The charm of the story, in the binary, so that the demo needs no file beside it.
const CHARM: &[(&str, &str, u32)] = &[
    ("metadata.yaml", include_str!("../../fixtures/charms/hello/metadata.yaml"), 0o644),
    ("server.py", include_str!("../../fixtures/charms/hello/server.py"), 0o644),
    ("hooks/install", include_str!("../../fixtures/charms/hello/hooks/install"), 0o755),
    ("hooks/start", include_str!("../../fixtures/charms/hello/hooks/start"), 0o755),
    ("hooks/exposed", include_str!("../../fixtures/charms/hello/hooks/exposed"), 0o755),
    ("hooks/unexposed", include_str!("../../fixtures/charms/hello/hooks/unexposed"), 0o755),
    ("hooks/stop", include_str!("../../fixtures/charms/hello/hooks/stop"), 0o755),
];
const UNIT: &str = "hello/0";

/// Hooks take a moment; this is for a machine that has no Python, say.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What `portcullis up` has if nothing is typed.
#[derive(Debug, Parser)]
struct Defaults {
    #[command(flatten)]
    own: machine::Own,
    #[command(flatten)]
    units: UnitOptions,
}

pub(super) async fn run(_: &Typed) -> anyhow::Result<()> {
    // Before there is anything to clear away.
    let mut shutdown = Shutdown::listen().context("cannot listen for signals")?;
    let place = Place::make()?;
    let told = tell(&place, &mut shutdown).await;
    let removed =
        fs::remove_dir_all(&place.0).with_context(|| format!("cannot remove {}", place.0.display()));
    told.and(removed)
}

async fn tell(place: &Place, shutdown: &mut Shutdown) -> anyhow::Result<()> {
    say(&format!("# Everything is in {}, and gone at the end.", place.0.display()))?;
    let data = place.0.join("data");
    say(&format!("$ portcullis up --data-dir {} --listen 127.0.0.1:0 &", data.display()))?;
    let story = juju::Story::new(place.config());
    let wanted = Config::new(data.clone(), (Ipv4Addr::LOCALHOST, 0).into());
    let keeper = up::start(story.globals(), &story.globals().environment()?, wanted).await?;
    super::keeper::announce(&keeper)?;
    let units = place.0.join("units");
    let (stop, agent) = start_agent(&story, &data, &units).await?;
    let told = play(&story, place, &units, shutdown).await;
    // Whatever came of it: no process of the charm is left behind, and the store goes last.
    let cleared = clear_away(&units).await;
    stop.send_replace(true);
    agent.await.context("the machine's agent has died")??;
    keeper.stop_handle().stop();
    tokio::task::spawn_blocking(move || keeper.wait()).await.context("the keeper's thread is gone")??;
    told.and(cleared)
}

/// Machine 0, as `up` has it, with all of its files in one place.
async fn start_agent(
    story: &juju::Story,
    data: &Path,
    units: &Path,
) -> anyhow::Result<(watch::Sender<bool>, JoinHandle<anyhow::Result<()>>)> {
    let globals = story.globals();
    let environment = globals.environment()?;
    let file = machine_file::ensure(globals, up::LOCAL_MACHINE, None).await?;
    let prepare = |more: &[&OsStr]| {
        let typed = ["portcullis up", "--units-dir"].map(OsStr::new).into_iter().chain([units.as_os_str()]);
        let typed = Defaults::try_parse_from(typed.chain(more.iter().copied()))?;
        let usual = (machine::Kind::DryRun, data);
        machine::prepare(&environment, up::LOCAL_MACHINE, file.clone(), (&typed.own, &typed.units), usual)
    };
    let agent = prepare(&[]).or_else(|error| {
        // A temporary directory that is closed to others, say. The charm is our own, so the story goes on.
        say(&format!("# Its hooks run as root here: {error:#}"))?;
        prepare(&["--hook-user", "0:0"].map(OsStr::new))
    })?;
    let (stop, stopped) = watch::channel(false);
    Ok((stop, tokio::spawn(agent.run(stopped))))
}

async fn play(
    story: &juju::Story,
    place: &Place,
    units: &Path,
    shutdown: &mut Shutdown,
) -> anyhow::Result<()> {
    let tool = hook_env::tools_dir()?.join("open-port").is_file();
    let charm = place.charm(tool)?;
    story.juju(&["deploy", &charm.to_string_lossy()]).await?;
    let acted = tokio::select! {
        acted = act(story, (!tool).then_some(units)) => acted,
        // Whoever has seen enough leaves nothing behind either.
        signal = shutdown.asked() => Err(anyhow!("the story was cut short by {signal}")),
    };
    let destroyed = story.juju(&["destroy-service", "hello"]).await;
    acted.and(destroyed)
}

/// Without the hook tools beside this program, the port is opened from here, and `without_tools` is where to find it.
async fn act(story: &juju::Story, without_tools: Option<&Path>) -> anyhow::Result<()> {
    say(
        "# The machine runs the charm's hooks: install, then start, which serves a page on a free port and opens it.",
    )?;
    becomes(story, |unit| unit.agent_state.as_deref() == Some("started")).await?;
    if let Some(units) = without_tools {
        let file = units.join("units").join(UnitId::new(0).key()).join("charm/port");
        let port = fs::read_to_string(file).context("the charm has no port")?;
        open_port(story, &format!("{port}/tcp")).await?;
    }
    story.juju(&["status"]).await?;
    say("# The port is asked for, and not to be opened: the service is not exposed.")?;
    say(
        "# (What follows is a dry run, which leaves this machine's firewall alone: --firewall nftables is for earnest.)",
    )?;
    story.juju(&["expose", "hello"]).await?;
    let unit = becomes(story, |unit| unit.open_ports.as_ref().is_some_and(|ports| !ports.is_empty())).await?;
    let port = unit.open_ports.iter().flatten().next().map_or(0, |range| range.from());
    fetch(port, "Hello world").await?;
    // What would be done is told a moment after it is known what is asked for.
    becomes(story, |unit| unit.firewall.iter().any(|told| told.contains("dry run: "))).await?;
    story.juju(&["status", "hello"]).await?;
    story.juju(&["unexpose", "hello"]).await?;
    fetch(port, "Hello from").await?;
    story.juju(&["status", "--format", "tabular"]).await?;
    say("# Done. `portcullis up` starts an environment that stays.")
}

/// Waits until the unit of the story is as wanted.
async fn becomes(story: &juju::Story, wanted: impl Fn(&Unit) -> bool) -> anyhow::Result<Unit> {
    let patience = Instant::now() + PATIENCE;
    loop {
        let look = async |_: &_, environment: &Environment<ZkTree>| Ok(collect(environment.tree()).await?);
        let mut snapshot = story.globals().in_environment(look).await?;
        snapshot.notes = status::notes(&snapshot);
        let view = View::new(&snapshot, &Scope::default());
        let unit = view.services.get("hello").and_then(|service| service.units.get(UNIT)).cloned();
        match unit {
            Some(unit) if wanted(&unit) => return Ok(unit),
            Some(Unit { failure: Some((failure, output)), .. }) => bail!("{failure}: {}", output.join(" ")),
            _ if Instant::now() >= patience => bail!("{UNIT} takes more than {} s", PATIENCE.as_secs()),
            _ => sleep(LOOK_AGAIN).await,
        }
    }
}

/// Asks for the page until it says what it should, and shows it.
async fn fetch(port: u16, wanted: &str) -> anyhow::Result<()> {
    let patience = Instant::now() + PATIENCE;
    loop {
        let page = tokio::task::spawn_blocking(move || get(port)).await.context("the request has died")?;
        match page {
            Ok(page) if page.starts_with(wanted) => {
                say(&format!("$ curl http://localhost:{port}/"))?;
                return output::data(&page).context("cannot write to stdout");
            }
            _ if Instant::now() >= patience => bail!("no page on port {port}"),
            _ => sleep(LOOK_AGAIN).await,
        }
    }
}

fn get(port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(64 * 1024).read_to_string(&mut answer)?;
    Ok(answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// Waits until nothing of the unit is left on the machine.
async fn clear_away(units: &Path) -> anyhow::Result<()> {
    let patience = Instant::now() + PATIENCE;
    let runs = units.join("runs");
    while fs::read_dir(&runs).is_ok_and(|mut units| units.next().is_some()) {
        if Instant::now() >= patience {
            bail!("the unit's processes do not end");
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// What the charm's hook would do, where the tool is not installed.
async fn open_port(story: &juju::Story, port: &str) -> anyhow::Result<()> {
    say(&format!("# open-port is not beside this program; the same, with the credentials of {UNIT}:"))?;
    say(&format!("$ open-port {port}"))?;
    let name: UnitName = UNIT.parse()?;
    let (address, credential, id) = story
        .globals()
        .in_environment(async |settings, environment| {
            let (id, _) = environment.unit(&name).await?;
            Ok((settings.address.clone(), environment.unit_credential(&name).await?, id))
        })
        .await?;
    let tree = ZkTree::connect(&address, Some(&credential)).await?;
    UnitPorts::new(&tree, id).open(parse_argument(port)?).await?;
    tree.close().await;
    Ok(())
}

fn say(line: &str) -> anyhow::Result<()> {
    output::data(&format!("{line}\n")).context("cannot write to stdout")
}

/// The directory of the story.
struct Place(PathBuf);

impl Place {
    fn make() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("portcullis-demo-{}", std::process::id()));
        // Passed through by the users of hooks; what is secret has a directory of its own.
        let made = fs::DirBuilder::new().mode(0o711).create(&path);
        made.with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    fn config(&self) -> ConfigDir {
        ConfigDir::below(&self.0.join("config"))
    }

    /// Writes the charm out. Where there are no hook tools its hooks do not call them.
    fn charm(&self, tools: bool) -> anyhow::Result<PathBuf> {
        let directory = self.0.join("hello");
        for (name, text, mode) in CHARM {
            let path = directory.join(name);
            let text = if tools { (*text).to_owned() } else { text.replace("open-port ", ": open-port ") };
            write(&path, &text, *mode).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(directory)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
