//! `juju firewall log`: past changes with time, machine, units and result. Reads the change logs in
//! the tree; no provider is contacted.

use anyhow::Context as _;
use serde_json::Value;

use crate::cli::args::environment::Globals;
use crate::cli::error::{Refusal, parse_arg};
use crate::cli::juju::firewall::Format;
use crate::cli::output;
use crate::firewall::change_log::{ChangeLog, Entry};
use crate::model::{MachineId, UnitName};
use crate::store::tree::Tree;
use crate::store::{self, Environment, firewall_reports};

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
    let (mut entries, problems) =
        globals.in_environment(async |_, environment| read(environment, machine).await).await?;
    if let Some(unit) = &unit {
        let of_unit = |(machine, entry): (MachineId, Entry)| Some((machine, entry.of_unit(unit)?));
        entries = entries.into_iter().filter_map(of_unit).collect();
    }
    entries.sort_by_key(|(machine, entry)| (entry.at, *machine));
    let last = &entries[entries.len().saturating_sub(args.limit)..];
    let text = match args.format {
        Format::Text => last.iter().map(|(id, entry)| entry.to_text(&format!("machine {id}"))).collect(),
        Format::Json => {
            let entry = |(machine, entry): &(MachineId, Entry)| {
                let mut json = entry.to_json();
                json["machine"] = Value::from(machine.number());
                json
            };
            format!("{}\n", last.iter().map(entry).collect::<Value>())
        }
    };
    output::data(&text).context("cannot write to stdout")?;
    if problems.is_empty() { Ok(()) } else { Err(Refusal::Unreadable { problems }.into()) }
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
