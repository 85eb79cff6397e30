//! `juju deploy`: reads a charm directory and creates a service with units and machines for them.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Map, Value};

use crate::cli::args::environment::Globals;
use crate::cli::error::{Refusal, parse_arg};
use crate::cli::output;
use crate::model::{MachineId, ServiceName};
use crate::store::records::CHARM_HASH;
use crate::store::{Deploy, Environment, ZkTree};
use crate::unit::charm::metadata::Charm;
use crate::unit::charm::{archive, directory};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Charm directory, which contains metadata.yaml
    charm: PathBuf,
    /// Name of the service [default: the charm's name]
    service: Option<String>,
    /// Number of units
    #[arg(short = 'n', long = "num-units", value_name = "UNITS", default_value_t = 1,
          value_parser = clap::value_parser!(u32))]
    units: u32,
    /// Machine to place all units on [default: see `juju bootstrap --placement`]
    #[arg(long, value_name = "MACHINE")]
    to: Option<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let named: Option<ServiceName> = args.service.as_deref().map(parse_arg).transpose()?;
    let to: Option<MachineId> = args.to.as_deref().map(parse_arg).transpose()?;
    let (charm, packed) = read_charm(&args.charm)?;
    let mut wanted = Deploy {
        service: named.unwrap_or_else(|| charm.url.name().clone()),
        metadata: metadata(&charm, &args.charm),
        charm: charm.url,
        units: args.units,
        to,
    };
    let deploy = async |_: &_, environment: &Environment<ZkTree>| {
        // Before the units exist, so that every unit can load its charm.
        let hash = environment.store_charm(&packed).await?;
        wanted.metadata.insert(CHARM_HASH.to_owned(), Value::from(hash.expose()));
        environment.deploy(&wanted).await?;
        Ok(())
    };
    globals.in_environment(deploy).await?;
    output::message(&format!("Charm '{}' deployed as service '{}'.", wanted.charm, wanted.service));
    Ok(())
}

/// Returns the charm and its archive for the store.
fn read_charm(path: &Path) -> anyhow::Result<(Charm, Vec<u8>)> {
    if !path.join("metadata.yaml").is_file() {
        return Err(Refusal::NoMetadata { path: path.to_owned() }.into());
    }
    let (charm, entries) = directory::read(path).with_context(|| format!("charm {}", path.display()))?;
    Ok((charm, archive::pack(&entries)))
}

/// Additional keys of the service's record. `hook-env` uses the directory of the charm.
fn metadata(charm: &Charm, directory: &Path) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("summary".to_owned(), Value::String(charm.summary.clone()));
    map.insert("description".to_owned(), Value::String(charm.description.clone()));
    if let Some(path) = directory.canonicalize().ok().and_then(|path| path.to_str().map(str::to_owned)) {
        map.insert("charm-dir".to_owned(), Value::String(path));
    }
    map
}
