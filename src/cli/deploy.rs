//! `juju deploy`: reads a charm directory and makes a service of it, with units and the machines they need.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Map, Value};

use super::failure::{Refusal, typed};
use super::output;
use super::settings::Globals;
use crate::model::{MachineId, ServiceName};
use crate::store::records::CHARM_HASH;
use crate::store::{Deploy, Environment, ZkTree};
use crate::unit::charm::Charm;
use crate::unit::{directory, pack};

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
    let (charm, packed) = read_charm(&args.charm)?;
    let mut wanted = Deploy {
        service: named.unwrap_or_else(|| charm.url.name().clone()),
        metadata: metadata(&charm, &args.charm),
        charm: charm.url,
        units: args.units,
        to,
    };
    let deploy = async |_: &_, environment: &Environment<ZkTree>| {
        // First of all: no unit is made before its charm can be had.
        let hash = environment.store_charm(&packed).await?;
        wanted.metadata.insert(CHARM_HASH.to_owned(), Value::from(hash.expose()));
        environment.deploy(&wanted).await?;
        Ok(())
    };
    globals.in_environment(deploy).await?;
    output::message(&format!("Charm '{}' deployed as service '{}'.", wanted.charm, wanted.service));
    Ok(())
}

/// The charm, and its bytes for the store.
fn read_charm(path: &Path) -> anyhow::Result<(Charm, Vec<u8>)> {
    if !path.join("metadata.yaml").is_file() {
        return Err(Refusal::NoMetadata { path: path.to_owned() }.into());
    }
    let (charm, entries) = directory::read(path).with_context(|| format!("charm {}", path.display()))?;
    Ok((charm, pack::pack(&entries)))
}

/// What the service's record says about the charm beyond its id. The directory is where it came from, for those who try
/// a hook by hand.
fn metadata(charm: &Charm, directory: &Path) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("summary".to_owned(), Value::String(charm.summary.clone()));
    map.insert("description".to_owned(), Value::String(charm.description.clone()));
    if let Some(path) = directory.canonicalize().ok().and_then(|path| path.to_str().map(str::to_owned)) {
        map.insert("charm-dir".to_owned(), Value::String(path));
    }
    map
}
