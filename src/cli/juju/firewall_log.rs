//! `juju firewall log`: past changes with time, machine, units and result. Reads the change logs in
//! the tree; no provider is contacted.

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::cli::args::environment::{Globals, Target};
use crate::cli::error::{Refusal, parse_arg};
use crate::cli::juju::firewall::Format;
use crate::cli::output;
use crate::firewall::change_log::{ChangeLog, Entry};
use crate::firewall::explain::escape_control;
use crate::model::{MachineId, UnitName};
use crate::runtime::clock::utc;
use crate::store::operators::FlagChange;
use crate::store::tree::Tree;
use crate::store::{self, Environment, ZkTree, firewall_reports};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Show only changes on this machine
    #[arg(long, value_name = "N")]
    machine: Option<String>,
    /// Show only changes for this unit, for example wordpress/0
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// Maximum number of changes to show
    #[arg(long, value_name = "N", default_value_t = 50)]
    limit: usize,
    /// Output format
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    format: Format,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let machine: Option<MachineId> = args.machine.as_deref().map(parse_arg).transpose()?;
    let unit: Option<UnitName> = args.unit.as_deref().map(parse_arg).transpose()?;
    let unit = unit.map(|unit| unit.to_string());
    let work = async |_: &Target, environment: &Environment<ZkTree>| {
        let (entries, mut problems) = read(environment, machine).await?;
        let flags = environment.flag_changes().await.unwrap_or_else(|problem| {
            problems.push(problem.to_string());
            Vec::new()
        });
        Ok((entries, flags, problems))
    };
    let (mut entries, flags, problems) = globals.in_environment(work).await?;
    if let Some(unit) = &unit {
        let of_unit = |(machine, entry): (MachineId, Entry)| Some((machine, entry.of_unit(unit)?));
        entries = entries.into_iter().filter_map(of_unit).collect();
    }
    let mut lines: Vec<Line> = entries.into_iter().map(|(id, entry)| Line::Change(id, entry)).collect();
    // A flag concerns all machines of its service.
    if machine.is_none() {
        let service = unit.as_deref().and_then(|unit| unit.split('/').next());
        let concerns = |change: &FlagChange| service.is_none_or(|service| service == change.service);
        lines.extend(flags.into_iter().filter(concerns).map(Line::Flag));
    }
    lines.sort_by_key(Line::order);
    let last = &lines[lines.len().saturating_sub(args.limit)..];
    let text = match args.format {
        Format::Text => last.iter().map(Line::to_text).collect(),
        Format::Json => format!("{}\n", last.iter().map(Line::to_json).collect::<Value>()),
    };
    output::data(&text).context("cannot write to stdout")?;
    if problems.is_empty() { Ok(()) } else { Err(Refusal::Unreadable { problems }.into()) }
}

/// One line or several lines of the log: changes on a machine, or the flag of a service.
enum Line {
    Change(MachineId, Entry),
    Flag(FlagChange),
}

impl Line {
    /// By time; a flag comes before the changes that it causes.
    fn order(&self) -> (u64, Option<MachineId>) {
        match self {
            Self::Change(machine, entry) => (entry.at, Some(*machine)),
            Self::Flag(change) => (change.at, None),
        }
    }

    fn to_text(&self) -> String {
        match self {
            Self::Change(machine, entry) => entry.to_text(&format!("machine {machine}")),
            Self::Flag(FlagChange { at, service, exposed, to, by }) => {
                let done = match (exposed, &to[..]) {
                    (false, _) => "unexposed".to_owned(),
                    (true, []) => "exposed to everyone".to_owned(),
                    (true, sources) => format!("exposed to {}", sources.join(", ")),
                };
                let line = format!("{}  service {service}  {done} by {by}", utc(*at));
                escape_control(&line) + "\n"
            }
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Change(machine, entry) => {
                let mut json = entry.to_json();
                json["machine"] = Value::from(machine.number());
                json
            }
            Self::Flag(change) => json!(change),
        }
    }
}

/// Returns all entries, and the problems of logs that cannot be read.
async fn read<T: Tree>(
    environment: &Environment<T>,
    only: Option<MachineId>,
) -> anyhow::Result<(Vec<(MachineId, Entry)>, Vec<String>)> {
    let mut ids = environment.machine_ids().await?;
    if let Some(only) = only {
        ids.retain(|id| *id == only);
        if ids.is_empty() {
            return Err(store::Error::MachineNotFound(only).into());
        }
    }
    let (mut entries, mut problems) = (Vec::new(), Vec::new());
    for (id, path, node) in firewall_reports::logs(environment.tree(), &ids).await? {
        match node.map(|node| node.map(|node| ChangeLog::parse(&node.data))) {
            Err(refused) => problems.push(refused),
            Ok(None) => {}
            Ok(Some(Ok(change_log))) => {
                entries.extend(change_log.entries().iter().cloned().map(|entry| (id, entry)));
            }
            Ok(Some(Err(problem))) => problems.push(format!("{path}: {problem}")),
        }
    }
    Ok((entries, problems))
}
