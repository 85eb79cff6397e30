//! `juju status`: one read of the environment, shown or written to a file.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use tokio::time::Instant;

use crate::cli::args::environment::Globals;
use crate::cli::error::Refusal;
use crate::cli::file;
use crate::cli::output;
use crate::runtime::shutdown::Shutdown;
use crate::status::render::{dot, json, svg, tabular, yaml};
use crate::status::sections::{Machines, Nodes, Services};
use crate::status::{Scope, View};
use crate::store::changes::{Watched, gather_burst};
use crate::store::tree::{self, Feed};
use crate::store::{self, Snapshot, ZkTree};
use crate::{firewall, heartbeat};

/// Pause before an unreachable store is read again.
const AGAIN: Duration = Duration::from_secs(1);

/// Time to gather events after the first one, so that a burst causes one read.
const GATHER: Duration = Duration::from_millis(20);

/// Interval between two screens that differ only in the times of heartbeats.
const BEATS_AGAIN: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Services, or units if it has a slash; `*`, `?` and `[..]` are wildcards [default:
    /// everything]
    #[arg(value_name = "SCOPE")]
    scopes: Vec<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Yaml)]
    format: Format,
    /// Write to FILE instead of stdout, atomically
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show the status again after every change, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
}

impl Args {
    /// Whether the command runs until it is interrupted.
    pub(super) fn is_endless(&self) -> bool {
        self.watch
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Yaml,
    Json,
    Tabular,
    /// A graph for Graphviz
    Dot,
    /// An SVG image
    Svg,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    if args.watch {
        return globals.in_environment(async |_, environment| watch(environment.tree(), args).await).await;
    }
    let view = globals.in_environment(async |_, environment| look(environment.tree(), args).await).await?;
    show(args, &rendered(&view, args.format))?;
    // Everything readable was shown; the error and the exit code report that the status is
    // incomplete.
    let problems: Vec<String> = view.errors().into_iter().map(str::to_owned).collect();
    if problems.is_empty() { Ok(()) } else { Err(Refusal::Unreadable { problems }.into()) }
}

async fn look(tree: &ZkTree, args: &Args) -> anyhow::Result<View> {
    let snapshot = Snapshot::read(tree).await?;
    let firewall = firewall::status_section::of(&snapshot);
    let heartbeat = heartbeat::status_section::read(tree, snapshot.machines.keys().copied()).await?;
    let nodes = Nodes(store::fleet::nodes(tree).await?);
    let scope = Scope::new(args.scopes.iter().map(String::as_str));
    Ok(View::new(&[&Machines(&snapshot), &Services(&snapshot), &firewall, &heartbeat, &nodes], &scope))
}

fn rendered(view: &View, format: Format) -> String {
    match format {
        Format::Yaml => yaml::render(&view.document()),
        Format::Json => json::render(&view.document()),
        Format::Tabular => tabular::render(view),
        Format::Dot => dot::render(view),
        Format::Svg => svg::render(view),
    }
}

fn show(args: &Args, text: &str) -> anyhow::Result<()> {
    match &args.output {
        None => output::data(text).context("cannot write to stdout"),
        Some(path) => file::write_output(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display())),
    }
}

/// Shows the status, and again after every change. Waits while the store is unreachable.
async fn watch(tree: &ZkTree, args: &Args) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    // All changes count: reports of controllers and trackers are shown, too. The first event is
    // always present.
    let mut feed = Watched::Everything.feed(tree).await?;
    let (mut shown, mut again) = (None, None);
    loop {
        tokio::select! {
            changed = heard_of(&mut feed) => changed?,
            () = sleep_until(again) => {}
            _ = shutdown.asked() => return Ok(()),
        }
        again = None;
        let picture = match look(tree, args).await {
            Ok(view) => Picture { text: rendered(&view, args.format), view: view.without_last_beats() },
            Err(error) if store::is_transient(error.as_ref()) => {
                output::message(&format!("{error:#}; retrying"));
                again = Some(Instant::now() + AGAIN);
                continue;
            }
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        match paint_at(shown.as_ref(), &picture, now) {
            Some(at) if at <= now => {
                let text = &picture.text;
                show(args, &if args.output.is_none() { output::screen(text) } else { text.clone() })?;
                shown = Some((picture, now));
            }
            later => again = later,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Picture {
    text: String,
    /// Without the times of heartbeats.
    view: View,
}

/// Returns when to show the screen, given the last one and its time; `None` if it has not changed.
fn paint_at(shown: Option<&(Picture, Instant)>, picture: &Picture, now: Instant) -> Option<Instant> {
    match shown {
        Some((before, _)) if before.text == picture.text => None,
        Some((before, at)) if before.view == picture.view => Some(*at + BEATS_AGAIN),
        _ => Some(now),
    }
}

/// Waits for a change and gathers those that follow at once. Cancel-safe, since an event only means
/// that the tree has to be read again.
async fn heard_of(feed: &mut impl Feed) -> Result<(), tree::Error> {
    feed.next().await?;
    gather_burst(feed, GATHER, |_| {}).await
}

async fn sleep_until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MachineId;
    use crate::status::sections::{Health, Heartbeat};

    #[test]
    fn screens_that_differ_only_in_beats_are_throttled() {
        let picture = |health: &str, last_beat: &str| {
            let health =
                Health { health: health.to_owned(), flag: "OK".to_owned(), last_beat: last_beat.to_owned() };
            let mut snapshot = Snapshot::default();
            let record = Err("unreadable".to_owned());
            let firewall_reports = [Ok(None), Ok(None)];
            let agent = store::snapshot::Presence::Never;
            let machine =
                store::snapshot::StoredMachine { record, agent, host: None, firewall_reports, problem: None };
            snapshot.machines.insert(MachineId::new(0), machine);
            let heartbeat = Heartbeat([(MachineId::new(0), Ok(health))].into());
            let view = View::new(&[&Machines(&snapshot), &heartbeat], &Scope::new([]));
            Picture { text: rendered(&view, Format::Yaml), view: view.without_last_beats() }
        };
        let begun = Instant::now();
        assert_eq!(paint_at(None, &picture("ok", "1"), begun), Some(begun));
        let shown = (picture("ok", "1"), begun);
        for ms in [0, 1_000, 60_000] {
            let now = begun + Duration::from_millis(ms);
            assert_eq!(paint_at(Some(&shown), &picture("ok", "1"), now), None, "nothing new");
            let beats = paint_at(Some(&shown), &picture("ok", "2"), now);
            assert_eq!(beats, Some(begun + BEATS_AGAIN), "a while after the last time");
            assert_eq!(paint_at(Some(&shown), &picture("warned", "1"), now), Some(now));
            assert_eq!(paint_at(Some(&shown), &picture("dead", "2"), now), Some(now), "news with a beat");
        }
    }
}
