//! `juju hook-env`: prints the environment variables of a unit's hooks as shell commands. The
//! unit's secret is saved in a file with mode 0600 and never printed.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::cli::args::environment::{Globals, Target};
use crate::cli::error::parse_arg;
use crate::cli::file::{self, Privacy};
use crate::cli::output;
use crate::model::UnitName;
use crate::store::{Environment, ZkTree, unit_credentials_file};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Unit whose variables to print, for example wordpress/0
    unit: String,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let unit: UnitName = parse_arg(&args.unit)?;
    let hook =
        globals.in_environment(async |target, environment| prepare(target, environment, &unit).await).await?;
    output::data(&export_lines(&hook)).context("cannot write to stdout")
}

/// Writes the unit's credentials and returns the variables of its hooks.
pub(super) async fn prepare(
    target: &Target,
    environment: &Environment<ZkTree>,
    unit: &UnitName,
) -> anyhow::Result<Vec<(&'static str, String)>> {
    let (id, _) = environment.unit(unit).await?;
    let credential = environment.unit_credential(unit).await?;
    let directory = target.config.units(&target.environment);
    let path = directory.join(format!("{}.json", id.key()));
    let text = unit_credentials_file(unit, &credential, &target.address);
    file::ensure_private_dir(&directory)
        .and_then(|()| file::replace(&path, text.as_bytes(), Privacy::Secret))
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut variables = vec![
        ("JUJU_UNIT_NAME", unit.to_string()),
        ("JUJU_ZOOKEEPER", target.address.to_string()),
        ("JUJU_ENV", target.environment.to_string()),
        ("JUJU_CREDENTIALS", path.display().to_string()),
    ];
    let (_, service) = environment.service(unit.service()).await?;
    if let Some(directory) = charm_dir(service.rest.get("charm-dir")) {
        variables.push(("CHARM_DIR", directory));
    }
    variables.push(("PATH", hook_path(&tools_dir()?)));
    Ok(variables)
}

/// Directory of the charm, if it exists on this host.
fn charm_dir(recorded: Option<&Value>) -> Option<String> {
    let path = recorded?.as_str()?;
    Path::new(path).is_dir().then(|| path.to_owned())
}

/// Directory of the hook tools, which are installed beside this program.
pub(in crate::cli) fn tools_dir() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    Ok(program.parent().map(Path::to_owned).unwrap_or(program))
}

/// PATH of hooks: the hook tools, then this program's own PATH.
pub(in crate::cli) fn hook_path(tools: &Path) -> String {
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

/// Quotes a text as one word for any POSIX shell.
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
