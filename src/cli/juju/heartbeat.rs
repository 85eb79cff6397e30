//! `juju heartbeat`: states of components, which trackers write to the tree, and parameters of
//! trackers.

mod watch;

use std::collections::{BTreeMap, HashMap};

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value, json};

use crate::cli::args::environment::Globals;
use crate::cli::args::time::Time;
use crate::cli::error::{Usage, parse_arg};
use crate::cli::output;
use crate::heartbeat::core::name::{InvalidName, Name};
use crate::heartbeat::core::record::{Hold, Record};
use crate::heartbeat::store as heartbeat_store;
use crate::model::MachineId;
use crate::runtime::clock::{utc, wall_ms};
use crate::store::{self, Environment, ZkTree};

/// The health of a component whose record cannot be read.
const UNREADABLE: &str = "unreadable";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    question: Question,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// List all components
    List {
        /// List only unhealthy components
        #[arg(long)]
        unwell: bool,
        /// Output format
        #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
        format: Format,
    },
    /// Show one component
    Show {
        /// Component name, or the number of a machine
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Show changes as they happen, until interrupted
    Watch {
        /// Start after this sequence number, which JSON output contains [default: only new changes]
        #[arg(long, value_name = "SEQUENCE")]
        since: Option<u64>,
        /// Output format
        #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
        format: Format,
    },
    /// Show or set the trackers' parameters
    #[command(
        after_help = "Examples:\n  juju heartbeat params\n  juju heartbeat params Warntime=10 Errtime=30"
    )]
    Params {
        /// Parameter to set; without any, all parameters are shown
        #[arg(value_name = "NAME=VALUE")]
        settings: Vec<String>,
    },
    /// Confirm a mass outage: declare the components dead whose deaths are held
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl Args {
    /// Whether the command runs until it is interrupted.
    pub(super) fn is_endless(&self) -> bool {
        matches!(self.question, Question::Watch { .. })
    }
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let text = match &args.question {
        Question::List { unwell, format } => {
            let look = async |_: &_, e: &Environment<ZkTree>| {
                Ok((heartbeat_store::overview(e.tree()).await?, heartbeat_store::alarm(e.tree()).await?.0))
            };
            let (overview, alarm) = globals.in_environment(look).await?;
            let heartbeat_store::Overview { mut records, problems, lost_trackers, unreadable } = overview;
            match alarm {
                Ok(Some(Hold::Held { silent, alive, .. })) => {
                    output::message(&format!(
                        "warning: {silent} of {alive} components are silent at once: their deaths are held"
                    ));
                    output::hint("`juju heartbeat release` confirms the outage and declares them dead");
                }
                Ok(None | Some(Hold::Released)) => {}
                Err(problem) => output::message(&format!("warning: {problem}: are deaths held?")),
            }
            if lost_trackers > 0 {
                output::message(&format!(
                    "warning: {lost_trackers} tracker(s) unreachable: deaths of components that last beat \
                     to them are held"
                ));
                output::hint("`juju heartbeat release` declares them");
            }
            records.retain(|record| !*unwell || !is_well(record));
            let text = match format {
                Format::Text => list(&records, &unreadable),
                Format::Json => {
                    let unreadable =
                        unreadable.iter().map(|(name, beat_at)| unreadable_document(name, *beat_at));
                    format!("{}\n", Value::from_iter(records.iter().map(document).chain(unreadable)))
                }
            };
            output::data(&text).context("cannot write to stdout")?;
            return problems.into_values().next().map_or(Ok(()), |problem| Err(not_shown(problem)));
        }
        Question::Show { name } => show(globals, &name_of(name)?).await?,
        Question::Watch { since, format } => return watch::watch(globals, *since, *format).await,
        Question::Params { settings } => params(globals, settings).await?,
        Question::Release => {
            let released = globals.in_environment(async |_, environment| {
                let tree = environment.tree();
                heartbeat_store::ensure(tree, &environment.info().roles).await?;
                // An unreadable alarm may be a hold.
                let held = !matches!(heartbeat_store::alarm(tree).await?.0, Ok(None | Some(Hold::Released)))
                    || heartbeat_store::overview(tree).await?.lost_trackers > 0;
                heartbeat_store::release(tree).await?;
                Ok(held)
            });
            let held = released.await?;
            output::message(if held { "The held deaths will be declared." } else { "No deaths are held." });
            return Ok(());
        }
    };
    output::data(&text).context("cannot write to stdout")
}

/// An unreadable znode hides only its own components.
fn not_shown(problem: store::Error) -> anyhow::Error {
    anyhow::Error::new(problem).context("some components cannot be shown")
}

/// Parses a component name; a number means a machine.
pub(super) fn name_of(text: &str) -> Result<Name, Usage> {
    match text.parse::<MachineId>() {
        Ok(machine) => Ok(Name::of_machine(machine)),
        Err(_) => {
            Name::parse(text).map_err(|InvalidName| Usage::new(format!("Invalid component name '{text}'")))
        }
    }
}

fn is_well(record: &Record) -> bool {
    record.state.as_str() == "ok" && record.notified.as_str() != "refused" && record.flaps == 0
}

fn flag(record: &Record) -> &'static str {
    record.notification.map_or("-", |notification| notification.state_and_flag().1)
}

fn document(record: &Record) -> Value {
    json!({
        "component": record.name.as_str(),
        "health": record.state.as_str(),
        "flag": flag(record),
        "last-beat": utc(record.beat_at),
        "changed": utc(record.changed_at),
        "sequence": record.sequence,
        "told": record.notified.as_str(),
        "flaps": record.flaps,
    })
}

/// A component whose record cannot be read.
fn unreadable_document(name: &Name, beat_at: u64) -> Value {
    json!({"component": name.as_str(), "health": UNREADABLE, "flag": "-", "last-beat": beat_time(beat_at)})
}

fn beat_time(beat_at: u64) -> String {
    if beat_at == 0 { "-".to_owned() } else { utc(beat_at) }
}

fn list(records: &[Record], unreadable: &BTreeMap<Name, u64>) -> String {
    let names = records.iter().map(|record| &record.name).chain(unreadable.keys());
    let width = names.map(|name| name.as_str().len()).max().unwrap_or(0).max(9);
    let mut text = format!(
        "{:<width$}  {:<7}  {:<7}  {:<20}  {:<20}  {:<7}  FLAPS\n",
        "COMPONENT", "HEALTH", "FLAG", "LAST-BEAT", "CHANGED", "TOLD"
    );
    for record in records {
        let (beat, changed) = (utc(record.beat_at), utc(record.changed_at));
        text.push_str(&format!(
            "{:<width$}  {:<7}  {:<7}  {beat:<20}  {changed:<20}  {:<7}  {}\n",
            record.name.as_str(),
            record.state.as_str(),
            flag(record),
            record.notified.as_str(),
            record.flaps
        ));
    }
    for (name, beat_at) in unreadable {
        let (name, beat) = (name.as_str(), beat_time(*beat_at));
        text.push_str(&format!(
            "{name:<width$}  {UNREADABLE}  {:<7}  {beat:<20}  {:<20}  {:<7}  -\n",
            "-", "-", "-"
        ));
    }
    text
}

async fn show(globals: &Globals, name: &Name) -> anyhow::Result<String> {
    let found = globals.in_environment(async |_, environment| {
        let tree = environment.tree();
        let heartbeat_store::Overview { mut records, mut problems, .. } =
            heartbeat_store::overview_of(tree, &[*name].into()).await?;
        if let Some((_, problem)) = problems.pop_first() {
            return Err(problem.into());
        }
        let record = records.pop();
        let maintenance = match &record {
            Some(_) => heartbeat_store::maintenance(tree).await?.0,
            None => HashMap::new(),
        };
        Ok((record, maintenance))
    });
    let (record, maintenance) = found.await?;
    let record = record
        .ok_or_else(|| anyhow::anyhow!("Component '{name}' was not found: it has never sent a heartbeat"))?;
    let mut lines: Vec<String> = vec![
        format!("component: {}", record.name),
        format!("health: {}", record.state.as_str()),
        format!("flag: {}", flag(&record)),
        format!("last-beat: {}", utc(record.beat_at)),
        format!("changed: {}", utc(record.changed_at)),
        format!("message: {}", record.notification.map_or("-", |notification| notification.message())),
        format!("sequence: {}", record.sequence),
        format!("state-manager-notified: {}", record.notified.as_str()),
    ];
    if record.interval > 0 {
        lines.push(format!("interval: {}s", record.interval));
    }
    if record.flaps > 0 {
        lines.push(format!("flapping: recovered {} times; notifications are damped", record.flaps));
    }
    if let Some(until) = maintenance.get(name).filter(|until| **until > wall_ms()) {
        lines.push(format!("maintenance-until: {}", utc(*until)));
    }
    Ok(lines.join("\n") + "\n")
}

async fn params(globals: &Globals, settings: &[String]) -> anyhow::Result<String> {
    let mut change = Map::new();
    for setting in settings {
        let (name, value) =
            setting.split_once('=').ok_or_else(|| Usage::new(format!("'{setting}' is not NAME=VALUE")))?;
        change.insert(name.to_owned(), Value::String(value.to_owned()));
    }
    let params = globals.in_environment(async |_, environment| {
        heartbeat_store::ensure(environment.tree(), &environment.info().roles).await?;
        Ok(heartbeat_store::set_params(environment.tree(), &change).await?)
    });
    let shown = params.await?.to_json();
    let line = |(name, value): (String, Value)| format!("{name}={}\n", value.as_str().unwrap_or_default());
    Ok(shown.into_iter().map(line).collect())
}

/// The arguments of `juju machine maintenance`.
#[derive(Debug, clap::Args)]
pub(super) struct MaintenanceArgs {
    /// Machine number, or the name of another component
    #[arg(value_name = "ID")]
    machine: String,
    /// Duration: a number followed by s, m, h or d
    #[arg(long = "for", value_name = "TIME", default_value = "1h")]
    time: String,
    /// End the maintenance now
    #[arg(long, conflicts_with = "time")]
    end: bool,
}

pub(super) async fn run_maintenance(globals: &Globals, args: &MaintenanceArgs) -> anyhow::Result<()> {
    let MaintenanceArgs { machine, time, end } = args;
    let name = name_of(machine)?;
    let Time(ms) = parse_arg(time)?;
    let until = (!end).then(|| wall_ms() + ms);
    let set = globals.in_environment(async |_, environment| {
        if let Some(id) = name.machine() {
            environment.machine(id).await?;
        }
        heartbeat_store::ensure(environment.tree(), &environment.info().roles).await?;
        Ok(heartbeat_store::set_maintenance(environment.tree(), &name, until, wall_ms()).await?)
    });
    set.await?;
    output::message(&match until {
        Some(until) => format!("{name} is in maintenance until {}.", utc(until)),
        None => format!("{name} is no longer in maintenance."),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_name_machines() {
        assert_eq!(name_of("3").unwrap().as_str(), "machine-3");
        assert_eq!(name_of("X0c0").unwrap().as_str(), "x0c0");
        assert!(name_of("a/b").is_err());
    }
}
