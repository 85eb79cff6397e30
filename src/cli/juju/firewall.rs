//! `juju firewall`: pending changes, and the reason for the state of each port. Reads the tree and
//! the reports in it; no provider is contacted.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value};

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::juju::firewall_log;
use crate::cli::output;
use crate::firewall::explain::Explained;
use crate::firewall::machine_reports::MachineReports;
use crate::firewall::observe::{self, View};
use crate::model::{MachineId, PortRange, ports};
use crate::store;
use crate::store::firewall_reports::reported_on;
use crate::store::tree::Tree;

/// Exit code if changes are pending.
const PENDING: u8 = 2;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    question: Question,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// Show pending changes by machine
    #[command(after_help = "\
Exit code 0: nothing is pending, 2: changes are pending, 1: the state cannot be read. Ports that a dry run \
would open or close are listed as dry-run and do not count as pending.")]
    Plan {
        /// Output format
        #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
        format: Format,
    },
    /// Show the state of a machine's ports, with reasons
    #[command(after_help = "Examples:\n  juju firewall explain 0\n  juju firewall explain 0 53/udp")]
    Explain {
        /// Machine, by number
        machine: String,
        /// Show only this port or range: PORT[-PORT][/PROTOCOL]
        port: Option<String>,
    },
    /// Show recent changes with their units and results
    #[command(after_help = "\
The last hundred changes of each machine are kept. The newest are shown last.

Examples:
  juju firewall log
  juju firewall log --machine 0 --limit 5
  juju firewall log --unit wordpress/0 --format json")]
    Log(firewall_log::Args),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Text,
    Json,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<ExitCode> {
    let (text, code) = match &args.question {
        Question::Log(args) => {
            return firewall_log::run(globals, args).await.map(|()| ExitCode::SUCCESS);
        }
        Question::Plan { format } => {
            let pending: Vec<_> = look(globals, None).await?.into_iter().filter_map(still_pending).collect();
            let waits = pending.iter().any(|(_, explained)| explained.is_pending());
            let code = if waits { PENDING } else { 0 };
            (if *format == Format::Json { plan_json(&pending) } else { plan_text(&pending) }, code)
        }
        Question::Explain { machine, port } => {
            let machine: MachineId = parse_arg(machine)?;
            let port: Option<PortRange> = port
                .as_deref()
                .map(ports::parse_argument)
                .transpose()
                .map_err(crate::cli::error::Usage::new)?;
            let found = look(globals, Some(machine)).await?;
            let explained = found.into_iter().map(|(_, explained)| match port {
                Some(port) => explained.only_ports(port),
                None => explained,
            });
            (explained.map(|explained| explained.to_text()).collect(), 0)
        }
    };
    output::data(&text).context("cannot write to stdout")?;
    Ok(ExitCode::from(code))
}

fn still_pending((machine, explained): (MachineId, Explained)) -> Option<(MachineId, Explained)> {
    explained.pending().map(|explained| (machine, explained))
}

fn plan_text(pending: &[(MachineId, Explained)]) -> String {
    let indented = |text: String| text.lines().map(|line| format!("  {line}\n")).collect::<String>();
    pending.iter().map(|(id, explained)| format!("machine {id}\n{}", indented(explained.to_text()))).collect()
}

fn plan_json(pending: &[(MachineId, Explained)]) -> String {
    let mut machines: Map<String, Value> = Map::new();
    for (id, explained) in pending {
        let all = machines.entry(id.to_string()).or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(all) = all {
            all.push(explained.to_json());
        }
    }
    format!("{}\n", serde_json::json!({ "machines": machines }))
}

/// Explains all machines, including terminated ones that still exist, or the given one.
async fn look(globals: &Globals, only: Option<MachineId>) -> anyhow::Result<Vec<(MachineId, Explained)>> {
    globals
        .in_environment(async |_, environment| {
            let tree = environment.tree();
            let mut ids = reported_on(tree).await?;
            let view = observe::observe(tree).await?;
            ids.extend(view.machines.keys());
            if let Some(machine) = only {
                ids.retain(|id| *id == machine);
                if ids.is_empty() {
                    return Err(store::Error::MachineNotFound(machine).into());
                }
            }
            explained(tree, &view, ids.into_iter().collect()).await
        })
        .await
}

async fn explained<T: Tree>(
    tree: &T,
    view: &View,
    ids: Vec<MachineId>,
) -> anyhow::Result<Vec<(MachineId, Explained)>> {
    let mut answers =
        tree.data_of_each(ids.iter().flat_map(|id| MachineReports::paths(*id)).collect()).await?.into_iter();
    let placed = view.units_by_machine();
    let mut all = Vec::with_capacity(ids.len());
    for id in ids {
        let nodes = MachineReports::paths(id).map(|_| answers.next().unwrap_or(Ok(None)));
        // Removed between the two reads.
        if !view.machines.contains_key(&id) && nodes.iter().all(|node| matches!(node, Ok(None))) {
            continue;
        }
        let explained =
            MachineReports::read(id, nodes.map(|node| node.map(|node| node.map(|node| node.data))))
                .explain(view, placed.get(&id).map_or(&[], Vec::as_slice));
        all.extend(explained.into_iter().map(|explained| (id, explained)));
    }
    Ok(all)
}
