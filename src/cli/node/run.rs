//! Executes the commands of `juju node`: checks names, calls the manager and prints the outcome.
//! Formats are in `render`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use super::connect::connect;
use super::{
    Action, JobArgs, KillArgs, LogsArgs, ManyArgs, Mode, MonitorArgs, Options, Through, UnitsArgs, Who,
    dependencies, render,
};
use crate::cli::args::time::Time;
use crate::cli::error::{self, Refusal, Usage, parse_arg};
use crate::cli::output;
use crate::fleet::client::{Client, ClientError, JobRequest, UnitCall};
use crate::fleet::dbus::values::{JobMode, JobResult, JobType};
use crate::fleet::name::{NodeName, check_systemd_unit, check_systemd_unit_glob};
use crate::fleet::systemd::MAX_ENTRIES;
use crate::model::Glob;
use crate::runtime::clock::wall_ms;

/// The pause between two checks that stdout is still read.
const STDOUT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two reads of a journal that is followed.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

/// Executes a command. Names are checked before the client connects.
pub(super) async fn run(
    through: &Through<'_>,
    options: &Options,
    action: &Action,
) -> anyhow::Result<ExitCode> {
    let Time(timeout_ms) = parse_arg(&options.timeout)?;
    check(action)?;
    match action {
        Action::Allow(args) => return dependencies::permit(through, args, true).await,
        Action::Deny(args) => return dependencies::permit(through, args, false).await,
        _ => {}
    }
    let timeout = Duration::from_millis(timeout_ms);
    let client = connect(through, timeout).await?;
    let json = options.json;
    match action {
        Action::List => {
            let nodes = client.nodes().await.context("cannot list the nodes")?;
            print(&if json { render::nodes_json(&nodes) } else { render::nodes(&nodes) })
        }
        Action::Units(args) => units(&client, args, json).await,
        Action::Start(args) => job(&client, JobType::Start, args, timeout, json).await,
        Action::Stop(args) => job(&client, JobType::Stop, args, timeout, json).await,
        Action::Restart(args) => job(&client, JobType::Restart, args, timeout, json).await,
        Action::Reload(args) => job(&client, JobType::Reload, args, timeout, json).await,
        Action::Kill(args) => kill(&client, args, json).await,
        Action::Freeze(args) => each(&client, UnitCall::Freeze, "freeze", args, json).await,
        Action::Thaw(args) => each(&client, UnitCall::Thaw, "thaw", args, json).await,
        Action::ResetFailed(args) => each(&client, UnitCall::ResetFailed, "reset", args, json).await,
        Action::Enable(args) => {
            let units: Vec<&str> = args.units.iter().map(String::as_str).collect();
            let done = client.enable(&args.node, &units).await;
            file_changes(args, "enable", done, json)
        }
        Action::Disable(args) => {
            let units: Vec<&str> = args.units.iter().map(String::as_str).collect();
            let done = client.disable(&args.node, &units).await;
            file_changes(args, "disable", done, json)
        }
        Action::Status(args) => status(&client, args, json).await,
        Action::Monitor(args) => monitor(&client, args, json).await,
        Action::Logs(args) => logs(&client, args, json).await,
        Action::Deps(args) => dependencies::list(&client, args, json).await,
        Action::Allow(_) | Action::Deny(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Refuses names that no node or systemd unit can have.
fn check(action: &Action) -> Result<(), Usage> {
    match action {
        Action::List => Ok(()),
        Action::Deps(args) => args.node.as_deref().map_or(Ok(()), check_node),
        Action::Allow(args) | Action::Deny(args) => {
            check_node(&args.node)?;
            args.on.iter().try_for_each(|name| check_node(name))
        }
        Action::Units(args) => args.node.as_deref().map_or(Ok(()), check_node),
        Action::Start(args) | Action::Stop(args) | Action::Restart(args) | Action::Reload(args) => {
            check_node(&args.node).and_then(|()| check_unit(&args.unit))
        }
        Action::Kill(args) => check_node(&args.node).and_then(|()| check_unit(&args.unit)),
        Action::Logs(args) => check_node(&args.node).and_then(|()| check_unit(&args.unit)),
        Action::Freeze(args)
        | Action::Thaw(args)
        | Action::Enable(args)
        | Action::Disable(args)
        | Action::ResetFailed(args)
        | Action::Status(args) => {
            check_node(&args.node)?;
            args.units.iter().try_for_each(|unit| check_unit(unit))
        }
        Action::Monitor(args) => {
            args.node.as_deref().filter(|node| *node != "*").map_or(Ok(()), check_node)?;
            args.unit.as_deref().map_or(Ok(()), |unit| check_systemd_unit_glob(unit).map_err(Usage::new))
        }
    }
}

fn check_node(name: &str) -> Result<(), Usage> {
    parse_arg::<NodeName>(name).map(|_name| ())
}

fn check_unit(name: &str) -> Result<(), Usage> {
    check_systemd_unit(name).map_err(Usage::new)?;
    if name.contains('.') {
        return Ok(());
    }
    Err(Usage::new(format!("systemd unit '{name}' has no type; for a service it is '{name}.service'")))
}

fn print(text: &str) -> anyhow::Result<ExitCode> {
    output::data(text).context("cannot write to stdout").map(|()| ExitCode::SUCCESS)
}

async fn units(client: &Client, args: &UnitsArgs, json: bool) -> anyhow::Result<ExitCode> {
    let listed = client.units(args.node.as_deref()).await;
    let mut units = listed.with_context(|| match &args.node {
        Some(node) => format!("cannot list the units of node '{node}'"),
        None => "cannot list the units of the nodes".to_owned(),
    })?;
    if let Some(filter) = &args.filter {
        let glob = Glob::new(filter);
        units.retain(|unit| glob.matches(&unit.name));
    }
    units.sort_by(|a, b| (&a.node, &a.name).cmp(&(&b.node, &b.name)));
    print(&if json { render::units_json(&units) } else { render::units(&units) })
}

async fn job(
    client: &Client,
    kind: JobType,
    args: &JobArgs,
    timeout: Duration,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let JobArgs { node, unit, mode, no_wait } = args;
    let mode = match mode {
        Mode::Replace => JobMode::Replace,
        Mode::Fail => JobMode::Fail,
    };
    let request = JobRequest { node, unit, kind, mode };
    let limit = (!no_wait).then_some(timeout);
    let verb = kind.as_str().to_ascii_lowercase();
    let job = client.run_job(request, limit).await;
    let job = job.with_context(|| format!("cannot {verb} '{unit}' on node '{node}'"))?;
    if json {
        output::data(&render::job_json(request, &job)).context("cannot write to stdout")?;
    }
    match &job.result {
        Some(result) if result != JobResult::Done.as_str() => {
            let (unit, node, result) = (unit.clone(), node.clone(), result.clone());
            Err(Refusal::SystemdJob { verb, unit, node, result }.into())
        }
        _ if json => Ok(ExitCode::SUCCESS),
        None => {
            output::message(&format!("Job {} ({verb} of {unit} on {node}) is queued.", job.id));
            Ok(ExitCode::SUCCESS)
        }
        Some(_) => {
            output::message(&format!("Job {} ({verb} of {unit} on {node}) is done.", job.id));
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn kill(client: &Client, args: &KillArgs, json: bool) -> anyhow::Result<ExitCode> {
    let KillArgs { node, unit, who, signal } = args;
    let who = match who {
        Who::Main => "main",
        Who::Control => "control",
        Who::All => "all",
    };
    let done = client.kill(node, unit, who, signal.0).await;
    report(node, std::iter::once((unit.as_str(), done)), "send a signal to", json)
}

/// Executes a call for each unit. If one call fails, the others are still made.
async fn each(
    client: &Client,
    call: UnitCall,
    verb: &str,
    args: &ManyArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut outcomes = Vec::with_capacity(args.units.len());
    for unit in &args.units {
        outcomes.push((unit.as_str(), client.call_unit(&args.node, unit, call).await));
    }
    report(&args.node, outcomes.into_iter(), verb, json)
}

/// Prints the errors of independent calls, and with `json` all outcomes.
fn report<'a>(
    node: &str,
    outcomes: impl Iterator<Item = (&'a str, Result<(), ClientError>)>,
    verb: &str,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    let mut documents = Vec::new();
    for (unit, outcome) in outcomes {
        let error = outcome.as_ref().err();
        let error = error.map(|error| (error.to_string(), error.dbus_name().map(str::to_owned)));
        documents.push(render::outcome_json(node, unit, error));
        if let Err(error) = outcome {
            let context = format!("cannot {verb} '{unit}' on node '{node}'");
            code = error::report(&anyhow::Error::new(error).context(context));
        }
    }
    if json {
        print(&render::line(&Value::Array(documents)))?;
    }
    Ok(code)
}

fn file_changes(
    args: &ManyArgs,
    verb: &str,
    done: Result<Vec<crate::fleet::dbus::values::UnitFileChange>, ClientError>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let (node, units) = (&args.node, args.units.join("', '"));
    let changes = done.with_context(|| format!("cannot {verb} '{units}' on node '{node}'"))?;
    print(&if json { render::file_changes_json(node, &changes) } else { render::file_changes(&changes) })
}

async fn status(client: &Client, args: &ManyArgs, json: bool) -> anyhow::Result<ExitCode> {
    let node = &args.node;
    let mut states = Vec::with_capacity(args.units.len());
    for unit in &args.units {
        let state = client.unit_state(node, unit).await;
        let state = state.with_context(|| format!("cannot show '{unit}' on node '{node}'"))?;
        states.push((unit.as_str(), state));
    }
    print(&if json { render::states_json(node, &states) } else { render::states(&states) })?;
    let missing = states.iter().filter(|(_, state)| state.load == "not-found");
    let mut code = ExitCode::SUCCESS;
    for (unit, _) in missing {
        let (unit, node) = ((*unit).to_owned(), node.clone());
        code = error::report(&Refusal::NoSystemdUnit { unit, node }.into());
    }
    Ok(code)
}

/// Prints changes until the manager is lost or stdout is no longer read.
async fn monitor(client: &Client, args: &MonitorArgs, json: bool) -> anyhow::Result<ExitCode> {
    let node = args.node.as_deref().filter(|node| *node != "*").unwrap_or_default();
    let unit = args.unit.as_deref().unwrap_or("*");
    let mut failed = None;
    let changes = client.monitor(node, unit, |change| {
        let now = wall_ms();
        let text = if json { render::change_json(&change, now) } else { render::change(&change, now) };
        failed = output::data(&text).err().or(failed.take());
    });
    let reader_gone = async {
        while !output::reader_is_gone() {
            tokio::time::sleep(STDOUT_CHECK_INTERVAL).await;
        }
    };
    let ended = tokio::select! {
        ended = changes => ended,
        () = reader_gone => Ok(()),
    };
    if let Some(error) = failed {
        return Err(anyhow::Error::new(error).context("cannot write to stdout"));
    }
    ended.context("the monitor ended").map(|()| ExitCode::SUCCESS)
}

/// Prints the last entries, and with `--follow` those that are written later.
async fn logs(client: &Client, args: &LogsArgs, json: bool) -> anyhow::Result<ExitCode> {
    let LogsArgs { node, unit, lines, follow } = args;
    let (mut cursor, mut entries) = (String::new(), *lines);
    loop {
        let read = client.journal(node, unit, entries, &cursor).await;
        let read = read.with_context(|| format!("cannot read the journal of '{unit}' on node '{node}'"))?;
        for entry in &read {
            let text = if json { format!("{entry}\n") } else { render::journal_entry(entry) };
            output::data(&text).context("cannot write to stdout")?;
        }
        if let Some(last) = read.last().and_then(|entry| render::cursor(entry)) {
            cursor = last;
        }
        // Without a cursor, the next read begins with the first entry that there is.
        entries = MAX_ENTRIES;
        if !follow || output::reader_is_gone() {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}
