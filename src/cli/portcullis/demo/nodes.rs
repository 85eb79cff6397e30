//! The act with two nodes, each with a systemd of its own, and a manager of both. It starts,
//! watches and stops a systemd unit on each node, and shows a unit of one node that depends on a
//! unit of the other. Where no systemd can be started, one line gives the reason.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{Instant, sleep};

use super::{POLL_INTERVAL, TIMEOUT, say, write};
use crate::cli::juju::Transcript;
use crate::cli::portcullis::install::proxy;
use crate::fleet::client::Client;
use crate::fleet::dbus::bus::Bus;

const NODES: [&str; 2] = ["n1", "n2"];
const UNIT: &str = "hello.service";
const SYSTEMD: &str = "/usr/lib/systemd/systemd";
const SCRIPT: &str = include_str!("node.sh");

/// The units of a node.
const UNITS: &[(&str, &str)] = &[
    (UNIT, "[Unit]\nDescription=A unit of the demo\n[Service]\nExecStart=/bin/sleep infinity\n"),
    ("db.service", "[Service]\nExecStart=/bin/sleep infinity\n"),
    (
        "need-db.service",
        "[Unit]\nWants=hirte-proxy@n2_db.service\nAfter=hirte-proxy@n2_db.service\n\
         [Service]\nExecStart=/bin/sleep infinity\n",
    ),
    ("basic.target", "[Unit]\nDefaultDependencies=no\n"),
    ("shutdown.target", "[Unit]\nDefaultDependencies=no\n"),
    ("default.target", "[Unit]\nRequires=dbus.service\nAfter=dbus.service\n"),
    ("dbus.socket", "[Socket]\nListenStream=%t/bus\n"),
    (
        "dbus.service",
        "[Unit]\nRequires=dbus.socket\n[Service]\nType=notify\nNotifyAccess=main\n\
         ExecStart=/usr/bin/dbus-daemon --config-file=/run/node/units/bus.conf --address=systemd: \
         --nofork --nopidfile --systemd-activation\n",
    ),
    (
        "bus.conf",
        "<busconfig><type>session</type><listen>systemd:</listen><policy context=\"default\">\
         <allow send_destination=\"*\" eavesdrop=\"true\"/><allow eavesdrop=\"true\"/><allow own=\"*\"/>\
         </policy></busconfig>\n",
    ),
];

/// A process that ends when its input ends, or is killed.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // A node ends with all of its processes; a program has no input.
        if self.0.stdin.take().is_none() {
            // It may have ended already.
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}

/// Plays the act. `is_private` is whether this process is in namespaces of its own.
pub(super) async fn act(story: &Transcript, place: &Path, is_private: bool) -> anyhow::Result<()> {
    if !is_private {
        return not_shown("they need namespaces of their own");
    }
    for program in [SYSTEMD, "/usr/bin/dbus-daemon"] {
        if !Path::new(program).exists() {
            return not_shown(&format!("{program} is not installed"));
        }
    }
    let mut nodes = Vec::new();
    for name in NODES {
        match start_node(&place.join(name)).await? {
            Ok(node) => nodes.push(node),
            Err(reason) => return not_shown(&reason),
        }
    }
    say("# Two nodes, each with a systemd of its own, and a manager of both on the bus of the first.")?;
    let buses = NODES.map(|name| format!("unix:path={}", place.join(name).join("run/bus").display()));
    let fleet = start_fleet(place, &buses).await?;
    let bus = buses[0].as_str();
    let client = Client::on_bus(&Bus::Address(bus.to_owned()), TIMEOUT).await?;
    until("the nodes are not online", async || {
        let nodes = client.nodes().await?;
        Ok(nodes.iter().all(|node| node.status == "online"))
    })
    .await?;
    story.juju(&["node", "--bus", bus, "list"]).await?;
    for name in NODES {
        story.juju(&["node", "--bus", bus, "start", name, UNIT]).await?;
    }
    // The monitor runs until the units have stopped, and its last lines are printed.
    let watch = ["node", "--bus", bus, "monitor", "*", UNIT];
    tokio::select! {
        ended = story.juju(&watch) => ended?,
        stopped = stop(story, &client, bus) => stopped?,
    }
    proxy_service(story, &client, bus).await?;
    // The programs end before the nodes.
    drop(fleet);
    tokio::task::spawn_blocking(move || drop(nodes)).await.context("the end of a node has panicked")
}

/// Starts a unit on the first node that depends on a unit of the second, and stops it.
async fn proxy_service(story: &Transcript, client: &Client, bus: &str) -> anyhow::Result<()> {
    if let Err(missing) = proxy::helper(&own_program()?) {
        return say(&format!("# Proxy services are not shown here: {missing}."));
    }
    say("# need-db.service on n1 depends on db.service on n2: it wants hirte-proxy@n2_db.service.")?;
    story.juju(&["node", "--bus", bus, "start", "n1", "need-db.service"]).await?;
    story.juju(&["node", "--bus", bus, "status", "n2", "db.service"]).await?;
    story.juju(&["node", "--bus", bus, "deps"]).await?;
    story.juju(&["node", "--bus", bus, "stop", "n1", "need-db.service"]).await?;
    until("the proxy service has not ended", async || Ok(client.proxies().await?.is_empty())).await
}

async fn stop(story: &Transcript, client: &Client, bus: &str) -> anyhow::Result<()> {
    sleep(MONITOR_PAUSE).await;
    for name in NODES {
        story.juju(&["node", "--bus", bus, "stop", name, UNIT]).await?;
        until("a unit has not stopped", async || {
            Ok(client.unit_state(name, UNIT).await?.active == "inactive")
        })
        .await?;
    }
    sleep(MONITOR_PAUSE).await;
    Ok(())
}

/// The time for the monitor to print what it has received.
const MONITOR_PAUSE: Duration = Duration::from_millis(300);

fn not_shown(reason: &str) -> anyhow::Result<()> {
    say(&format!("# Nodes with a systemd of their own are not shown here: {reason}."))
}

/// Repeats a check until it succeeds.
async fn until(late: &str, is_so: impl AsyncFn() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so().await? {
        if Instant::now() >= deadline {
            bail!("{late} after {} s", TIMEOUT.as_secs());
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Starts a systemd, and waits until its bus accepts connections. Returns the reason if it cannot
/// run here.
async fn start_node(dir: &Path) -> anyhow::Result<Result<Process, String>> {
    for (name, text) in UNITS {
        write(&dir.join("units").join(name), text, 0o644).context("cannot write a unit")?;
    }
    if let Ok(helper) = proxy::helper(&own_program()?) {
        let units = dir.join("units");
        write(&units.join(proxy::PROXY_FILE), &proxy::proxy_unit(&helper, true)?, 0o644)?;
        write(&units.join(proxy::DEP_FILE), &proxy::dep_unit(), 0o644)?;
    }
    let log = dir.join("log");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--cgroup", "sh", "-c", SCRIPT, "sh"]).arg(dir).env("PORTCULLIS_NODE", SCRIPT);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(File::create(&log)?);
    let mut node = Process(command.spawn().context("cannot start unshare")?);
    let bus = Bus::Address(format!("unix:path={}", dir.join("run/bus").display()));
    let deadline = Instant::now() + TIMEOUT;
    while Client::on_bus(&bus, TIMEOUT).await.is_err() {
        let has_ended = node.0.try_wait().context("cannot wait for a node")?.is_some();
        if has_ended || Instant::now() >= deadline {
            let errors = fs::read_to_string(&log).unwrap_or_default();
            let line = errors.lines().find(|line| !line.trim().is_empty());
            let reason = line.unwrap_or("systemd does not start");
            return Ok(Err(reason.trim_end_matches('.').to_owned()));
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(Ok(node))
}

/// Starts the manager and the agents.
async fn start_fleet(place: &Path, buses: &[String; 2]) -> anyhow::Result<Vec<Process>> {
    let config = place.join("manager.ini");
    let [first, second] = NODES;
    let nodes = format!("[hirte]\nAllowedNodeNames={first},{second}\n");
    write(&config, &format!("{nodes}[node {first}]\nAllowDependenciesOn={second}\n"), 0o600)?;
    let state = place.join("state").display().to_string();
    let config = config.display().to_string();
    let mut manager =
        program(&["manager", "--config", &config, "--listen", "127.0.0.1:0", "--bus", &buses[0]])?;
    let printed = manager.0.stdout.take().context("the manager has no output")?;
    let first_line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        BufReader::new(printed).read_line(&mut line).map(|_| line)
    });
    let line = first_line.await.context("the output of the manager cannot be read")??;
    let address = line.trim().strip_prefix("listening on ").context("the manager does not start")?.to_owned();
    say(line.trim())?;
    let mut processes = vec![manager];
    for (name, bus) in NODES.iter().zip(buses) {
        let agent = ["agent", "--name", name, "--manager", &address, "--bus", bus, "--state-dir", &state];
        processes.push(program(&agent)?);
    }
    Ok(processes)
}

fn own_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot determine the program's path")
}

/// Starts this program in the background, and shows the command.
fn program(arguments: &[&str]) -> anyhow::Result<Process> {
    say(&format!("$ portcullis {} &", arguments.join(" ")))?;
    let mut command = Command::new(own_program()?);
    command.args(arguments).env("RUST_LOG", "error").stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(Process(command.spawn().context("cannot start portcullis")?))
}
