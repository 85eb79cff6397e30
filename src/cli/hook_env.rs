//! `juju hook-env`: the environment that a unit's hook gets, as lines for a shell. The unit's secret goes into a file
//! that only this user reads, and never to the terminal.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::failure::typed;
use super::file::{self, Privacy};
use super::output;
use super::settings::{Globals, Settings};
use crate::model::UnitName;
use crate::store::{Environment, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Unit to pose as, as in wordpress/0
    unit: String,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let unit: UnitName = typed(&args.unit)?;
    let hook = globals
        .in_environment(async |settings, environment| prepare(settings, environment, &unit).await)
        .await?;
    output::data(&export_lines(&hook)).context("cannot write to stdout")
}

/// Writes the unit's credentials and returns the variables of its hooks.
pub(super) async fn prepare(
    settings: &Settings,
    environment: &Environment<ZkTree>,
    unit: &UnitName,
) -> anyhow::Result<Vec<(&'static str, String)>> {
    let (id, _) = environment.unit(unit).await?;
    let credential = environment.unit_credential(unit).await?;
    let directory = settings.config.units(&settings.environment);
    let path = directory.join(format!("{}.json", id.key()));
    let text = format!("{}\n", json!({"unit": unit.to_string(), "auth": credential.expose()}));
    file::ensure_private_dir(&directory)
        .and_then(|()| file::replace(&path, text.as_bytes(), Privacy::Secret))
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut variables = vec![
        ("JUJU_UNIT_NAME", unit.to_string()),
        ("JUJU_ZOOKEEPER", settings.address.to_string()),
        ("JUJU_ENV", settings.environment.to_string()),
        ("JUJU_CREDENTIALS", path.display().to_string()),
    ];
    let (_, service) = environment.service(unit.service()).await?;
    if let Some(directory) = charm_dir(service.rest.get("charm-dir")) {
        variables.push(("CHARM_DIR", directory));
    }
    variables.push(("PATH", hook_path(&tools_dir()?)));
    Ok(variables)
}

/// Where the charm is, if it is on this machine.
fn charm_dir(recorded: Option<&Value>) -> Option<String> {
    let path = recorded?.as_str()?;
    Path::new(path).is_dir().then(|| path.to_owned())
}

/// The hook tools are installed beside this program.
pub(super) fn tools_dir() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    Ok(program.parent().map(Path::to_owned).unwrap_or(program))
}

/// What a hook has for PATH: the hook tools, and what this program has itself.
pub(super) fn hook_path(tools: &Path) -> String {
    search_path(tools, std::env::var("PATH").ok().as_deref())
}

fn search_path(tools: &Path, path: Option<&str>) -> String {
    let tools = tools.display();
    match path {
        Some(path) if !path.is_empty() => format!("{tools}:{path}"),
        _ => format!("{tools}:/usr/local/bin:/usr/bin:/bin"),
    }
}

fn export_lines(variables: &[(&str, String)]) -> String {
    variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value))).collect()
}

/// One word for any POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_shell() {
        let nasty = "a b'c\"d$e`f\\g\nh*";
        let script = format!("{}printf %s \"$X\"", export_lines(&[("X", nasty.to_owned())]));
        let shell = std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
        assert_eq!(String::from_utf8(shell.stdout).unwrap(), nasty);
    }

    #[test]
    fn the_tools_come_first_in_the_path() {
        assert_eq!(search_path(Path::new("/t"), Some("/bin")), "/t:/bin");
        assert_eq!(search_path(Path::new("/t"), Some("")), "/t:/usr/local/bin:/usr/bin:/bin");
    }
}
