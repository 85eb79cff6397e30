//! `juju deploy`: reads a charm directory and makes a service of it, with units and the machines they need.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Map, Value};

use super::failure::{Refusal, typed};
use super::settings::Globals;
use super::{file, output};
use crate::model::{MachineId, ServiceName};
use crate::store::Deploy;
use crate::unit::charm::{self, Charm};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Directory of the charm, with its metadata.yaml
    charm: PathBuf,
    /// Name of the service [default: the charm's name]
    service: Option<String>,
    /// How many units
    #[arg(short = 'n', long = "num-units", value_name = "UNITS", default_value_t = 1,
          value_parser = clap::value_parser!(u32))]
    units: u32,
    /// Machine that all units go to
    #[arg(long, value_name = "MACHINE")]
    to: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let named: Option<ServiceName> = args.service.as_deref().map(typed).transpose()?;
    let to: Option<MachineId> = args.to.as_deref().map(typed).transpose()?;
    let charm = read_charm(&args.charm)?;
    let wanted = Deploy {
        service: named.unwrap_or_else(|| charm.url.name().clone()),
        metadata: metadata(&charm, &args.charm),
        charm: charm.url,
        units: args.units,
        to,
    };
    globals.in_environment(async |_, environment| Ok(environment.deploy(&wanted).await?)).await?;
    output::message(&format!("Charm '{}' deployed as service '{}'.", wanted.charm, wanted.service));
    Ok(())
}

fn read_charm(directory: &Path) -> anyhow::Result<Charm> {
    let metadata = file::read_limited(&directory.join("metadata.yaml"), charm::MAX_METADATA_BYTES)?
        .ok_or_else(|| Refusal::NoMetadata { path: directory.to_owned() })?;
    let revision = file::read_limited(&directory.join("revision"), charm::MAX_REVISION_BYTES)?;
    charm::check(&metadata, revision.as_deref()).with_context(|| format!("charm {}", directory.display()))
}

/// What the service's record says about the charm beyond its id. The directory is where hooks are found on this
/// machine, as long as charms are not uploaded.
fn metadata(charm: &Charm, directory: &Path) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("summary".to_owned(), Value::String(charm.summary.clone()));
    map.insert("description".to_owned(), Value::String(charm.description.clone()));
    if let Some(path) = directory.canonicalize().ok().and_then(|path| path.to_str().map(str::to_owned)) {
        map.insert("charm-dir".to_owned(), Value::String(path));
    }
    map
}
