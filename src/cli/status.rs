//! `juju status`: one look at the environment, shown or written to a file. What was said about firewalls is read here, since
//! neither status nor the firewall knows the other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use tokio::time::Instant;

use super::failure::Refusal;
use super::settings::Globals;
use super::{file, output};
use crate::firewall::explain::{Explained, State};
use crate::firewall::observe::{self, Exposure, UnitFacts};
use crate::firewall::report::{NOBODY, NOT_PROVISIONED};
use crate::firewall::told::Told;
use crate::heartbeat::corner;
use crate::heartbeat::name::Name;
use crate::heartbeat::record::bucket_of;
use crate::model::{Cidr, MachineId};
use crate::runtime::clock::utc;
use crate::runtime::shutdown::Shutdown;
use crate::status::render::{dot, json, svg, tabular, yaml};
use crate::status::view::{Heard, Held, Presence, SeenUnit};
use crate::status::{Notes, Scope, Snapshot, View, collect};
use crate::store::tree::{self, Feed, Tree as _};
use crate::store::{self, ZkTree, paths};

/// How soon a store that went away is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// How long events are gathered after the first, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(20);

/// While nothing but the times of beats is new, a picture is painted this often.
const BEATS_AGAIN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Services, or units if it has a slash; `*`, `?` and `[..]` are patterns
    #[arg(value_name = "SCOPE")]
    scopes: Vec<String>,
    /// How to show it
    #[arg(long, value_enum, default_value_t = Format::Yaml)]
    format: Format,
    /// Write to FILE instead, whole or not at all
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show it again whenever something changes, until Ctrl-C
    #[arg(short, long)]
    watch: bool,
}

impl Typed {
    /// Goes on until it is ended.
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
    /// A picture
    Svg,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    if args.watch {
        return globals.in_environment(async |_, environment| watch(environment.tree(), args).await).await;
    }
    let view = globals.in_environment(async |_, environment| look(environment.tree(), args).await).await?;
    show(args, &rendered(&view, args.format))?;
    // Shown all the same: one bad znode hides nothing else, but nobody should take the picture for whole.
    let problems: Vec<String> = view.errors().into_iter().map(str::to_owned).collect();
    if problems.is_empty() { Ok(()) } else { Err(Refusal::Unreadable { problems }.into()) }
}

async fn look(tree: &ZkTree, args: &Typed) -> anyhow::Result<View> {
    let mut snapshot = collect(tree).await?;
    snapshot.heard = heard(tree, snapshot.machines.keys().copied()).await?;
    snapshot.notes = notes(&snapshot);
    Ok(View::new(&snapshot, &Scope::new(args.scopes.iter().map(String::as_str))))
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

fn show(args: &Typed, text: &str) -> anyhow::Result<()> {
    match &args.output {
        None => output::data(text).context("cannot write to stdout"),
        Some(path) => file::write_output(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display())),
    }
}

/// What is wanted and not yet real, held back or frozen, and what is wrong with machines.
pub(super) fn notes(snapshot: &Snapshot) -> Notes {
    let view = firewall_view(snapshot);
    let placed = view.placed();
    let mut notes = Notes::default();
    for (&id, machine) in &snapshot.machines {
        let [controller, own] = machine.said.clone();
        let agent = Ok((machine.agent == Presence::Here).then(Vec::new));
        let on = placed.get(&id).map_or(&[][..], Vec::as_slice);
        for explained in Told::read(id, [controller, own, agent]).explain(&view, on) {
            add(&mut notes, id, explained);
        }
        for path in &snapshot.missing {
            notes.machines.entry(id).or_insert_with(|| format!("{path} is missing from the store"));
        }
    }
    notes
}

fn add(notes: &mut Notes, machine: MachineId, explained: Explained) {
    let problem = explained.problem.filter(|problem| problem != NOBODY && problem != NOT_PROVISIONED);
    if let Some(problem) = &problem {
        notes.machines.entry(machine).or_insert_with(|| problem.clone());
    }
    if let Some(words) = &explained.dry_run {
        notes.dry_runs.entry(machine).or_insert_with(|| words.clone());
    }
    for line in explained.lines {
        let says_something =
            !matches!(line.state, State::Open | State::Closed | State::Foreign | State::DryRun);
        let Some(unit) = line.id.filter(|_| says_something) else { continue };
        let reason = match &problem {
            Some(problem) if matches!(line.state, State::Opening | State::Closing) => {
                format!("{line}; {problem}")
            }
            _ => line.to_string(),
        };
        notes.units.entry(unit).or_default().push(reason);
    }
}

/// The same look, as the firewall has it.
fn firewall_view(snapshot: &Snapshot) -> observe::View {
    let exposure = |exposed: &Option<Held<Vec<Cidr>>>| exposed.clone().map_or(Exposure::No, Exposure::To);
    let facts = |unit: &SeenUnit| {
        let record = unit.record.as_ref().map_err(String::clone);
        let record = record.map(|record| (record.name.clone(), record.service, record.machine));
        UnitFacts { record, ports: unit.ports.clone(), listed_on: None }
    };
    observe::View {
        services: snapshot.services.iter().map(|(id, seen)| (*id, exposure(&seen.exposed))).collect(),
        units: snapshot.units.iter().map(|(id, unit)| (*id, facts(unit))).collect(),
        ..observe::View::default()
    }
}

/// What the trackers say about the machines, by the rule that they judge with.
async fn heard(
    tree: &ZkTree,
    machines: impl Iterator<Item = MachineId> + Clone,
) -> Result<BTreeMap<MachineId, Held<Heard>>, store::Error> {
    let names: BTreeSet<Name> = machines.clone().map(Name::of_machine).collect();
    let corner::Overview { records, problems, .. } = corner::overview_of(tree, &names).await?;
    let unread = machines.filter_map(|machine| {
        let problem = problems.get(&bucket_of(Name::of_machine(machine).as_str()))?;
        Some((machine, Err(problem.to_string())))
    });
    // Without a tracker nobody judges, and what was judged last is no longer anybody's word.
    let judged = records.is_empty() || !corner::replicas(tree).await?.is_empty();
    let heard = records.into_iter().filter_map(|record| {
        let (_, flag) = record.word?.state_and_flag();
        let health = if judged { record.state.as_str() } else { "unknown" }.to_owned();
        Some((
            record.name.machine()?,
            Ok(Heard { health, flag: flag.to_owned(), last_beat: utc(record.beat_at) }),
        ))
    });
    Ok(heard.chain(unread).collect())
}

/// Shows what there is, and again whenever that is something else. A store that is away for a while is waited for.
async fn watch(tree: &ZkTree, args: &Typed) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    // Whatever changes: what the controller and the trackers say is shown as well. The first event is always there.
    let mut feed = tree.watch(&paths::root()).await?;
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
            Err(error) if is_passing(&error) => {
                output::message(&format!("{error:#}; waiting for it"));
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
    /// Without the times of beats.
    view: View,
}

/// When to paint, after what was shown and when, if at all.
fn paint_at(shown: Option<&(Picture, Instant)>, picture: &Picture, now: Instant) -> Option<Instant> {
    match shown {
        Some((before, _)) if before.text == picture.text => None,
        Some((before, at)) if before.view == picture.view => Some(*at + BEATS_AGAIN),
        _ => Some(now),
    }
}

/// Waits for a change, and for those that follow at once. Cancel-safe: an event is only a reason to look.
async fn heard_of(feed: &mut impl Feed) -> Result<(), tree::Error> {
    feed.next().await?;
    let end = Instant::now() + GATHER;
    while let Ok(event) = tokio::time::timeout_at(end, feed.next()).await {
        event?;
    }
    Ok(())
}

async fn sleep_until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when).await,
        None => std::future::pending().await,
    }
}

fn is_passing(error: &anyhow::Error) -> bool {
    let deeper = match error.downcast_ref::<store::Error>() {
        Some(store::Error::Tree(error)) => Some(error),
        _ => None,
    };
    error.downcast_ref::<tree::Error>().or(deeper).is_some_and(tree::Error::is_retryable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::report::Report;
    use crate::model::{PortRange, Protocol, ServiceId, UnitId};
    use crate::status::view::{SeenMachine, SeenService};
    use crate::store::records;
    use serde_json::Map;

    /// One exposed service with a unit on each of two machines, which asks for port 80.
    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::default();
        let record = records::Service {
            name: "web".parse().unwrap(),
            charm: "local:web-1".parse().unwrap(),
            rest: Map::new(),
        };
        let service = SeenService { record: Ok(record), exposed: Some(Ok(Vec::new())) };
        snapshot.services.insert(ServiceId::new(0), service);
        for n in 0..2 {
            let record = records::Unit {
                name: format!("web/{n}").parse().unwrap(),
                service: ServiceId::new(0),
                machine: Some(MachineId::new(n)),
                rest: Map::new(),
            };
            let ports = Ok(vec![PortRange::single(80, Protocol::Tcp).unwrap()]);
            snapshot
                .units
                .insert(UnitId::new(n), SeenUnit { record: Ok(record), ports, state: None, agent: false });
            let record = records::Machine {
                instance_id: Some(format!("i-{n}").parse().unwrap()),
                addresses: Vec::new(),
                adopted: false,
                rest: Map::new(),
            };
            let said = [Ok(Some(report(n, &["0.0.0.0/0", "::/0"]).to_bytes())), Ok(None)];
            snapshot.machines.insert(
                MachineId::new(n),
                SeenMachine { record: Ok(record), agent: Presence::Never, said, problem: None },
            );
        }
        snapshot
    }

    fn report(unit: u32, sources: &[&str]) -> Report {
        let ports = PortRange::single(80, Protocol::Tcp).unwrap();
        let rule = |source: &&str| portcullis_provider::rule::Rule::new(ports, source.parse().unwrap());
        let granted = sources.iter().map(rule).collect();
        Report { granted: [(UnitId::new(unit), granted)].into(), ..Report::default() }
    }

    #[test]
    fn beats_alone_are_painted_now_and_then() {
        let picture = |health: &str, last_beat: &str| {
            let heard =
                Heard { health: health.to_owned(), flag: "OK".to_owned(), last_beat: last_beat.to_owned() };
            let mut snapshot = snapshot();
            snapshot.heard.insert(MachineId::new(0), Ok(heard));
            let view = View::new(&snapshot, &Scope::new([]));
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

    #[test]
    fn a_dry_run_is_said_once_under_its_machine() {
        let pending = report(0, &["0.0.0.0/0"]).granted[&UnitId::new(0)].rules().collect();
        let gone = report(9, &["0.0.0.0/0"]).granted;
        let mut said = report(0, &["0.0.0.0/0", "::/0"]);
        said.granted.extend(gone);
        let words = "would open 80/tcp from 0.0.0.0/0; would close 80/tcp from 0.0.0.0/0";
        let said = Report { pending, dry_run: Some(words.to_owned()), ..said };
        let mut snapshot = snapshot();
        snapshot.machines.get_mut(&MachineId::new(0)).unwrap().said[0] = Ok(Some(said.to_bytes()));
        let idle = Report { dry_run: Some(String::new()), ..report(1, &["0.0.0.0/0", "::/0"]) };
        snapshot.machines.get_mut(&MachineId::new(1)).unwrap().said[0] = Ok(Some(idle.to_bytes()));
        snapshot.notes = notes(&snapshot);
        let dry_runs = [(MachineId::new(0), words.to_owned()), (MachineId::new(1), String::new())].into();
        assert_eq!(snapshot.notes, Notes { dry_runs, ..Notes::default() }, "no problem, nothing pending");
        let view = View::new(&snapshot, &Scope::new([]));
        let yaml = rendered(&view, Format::Yaml);
        assert!(yaml.contains(&format!("    firewall: dry-run\n    firewall-info: {words}\n")), "{yaml}");
        assert_eq!((yaml.matches("firewall: dry-run").count(), yaml.matches("would").count()), (2, 2));
        assert!(!yaml.contains("firewall: pending") && !yaml.contains("problem"), "{yaml}");
        let table = rendered(&view, Format::Tabular);
        assert!(table.contains(&format!("machine 0  dry-run: {words}")), "{table}");
    }

    #[test]
    fn every_kind_of_trouble_is_told_and_touches_nobody_else() {
        assert_eq!(notes(&snapshot()), Notes::default(), "nothing to say");
        let waiting = || Report {
            pending: report(0, &["0.0.0.0/0"]).granted[&UnitId::new(0)].rules().collect(),
            ..report(0, &["0.0.0.0/0", "::/0"])
        };
        let trouble = |problem: &str| Report { problem: Some(problem.to_owned()), ..waiting() };
        for problem in [
            "the provider cannot be used: no credentials",
            "the provider is unavailable: cannot reach EC2 at http://127.0.0.1:1",
            "instance i-0 is gone",
            "the provider has nothing to hold its rules",
            "closing 12 of 12 rules waits for a second look",
        ] {
            let mut snapshot = snapshot();
            snapshot.machines.get_mut(&MachineId::new(0)).unwrap().said[0] =
                Ok(Some(trouble(problem).to_bytes()));
            let notes = notes(&snapshot);
            assert_eq!(notes.machines, [(MachineId::new(0), problem.to_owned())].into());
            let reason = format!("80/tcp opening: to be opened to 0.0.0.0/0; {problem}");
            assert_eq!(notes.units, [(UnitId::new(0), vec![reason])].into());
        }
        let mut garbled = snapshot();
        garbled.machines.get_mut(&MachineId::new(0)).unwrap().said[0] = Ok(Some(b"{".to_vec()));
        let told = notes(&garbled);
        assert!(told.machines[&MachineId::new(0)].starts_with("/controller/firewall/machine-0000000000: "));
        assert_eq!(told.units.keys().collect::<Vec<_>>(), [&UnitId::new(0)]);
        let mut garbage = snapshot();
        garbage.units.get_mut(&UnitId::new(0)).unwrap().ports =
            Err("/units/unit-0000000000/ports: no".to_owned());
        let told = notes(&garbage);
        let frozen = "80/tcp frozen: kept open to 0.0.0.0/0, ::/0: /units/unit-0000000000/ports: no";
        assert_eq!(told.units, [(UnitId::new(0), vec![frozen.to_owned()])].into());
        let mut unseen = snapshot();
        unseen.machines.get_mut(&MachineId::new(0)).unwrap().said[0] = Ok(None);
        let told = notes(&unseen);
        assert!(
            told.machines.is_empty()
                && told.units[&UnitId::new(0)][0].ends_with("not yet seen by a controller")
        );
    }
}
