//! `juju remove-unit`: removes units from their services. All names are looked up first, so that a
//! misspelled name changes nothing.

use std::collections::BTreeSet;

use anyhow::Context as _;

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::UnitName;
use crate::store::{self, Environment, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Units to remove, for example wordpress/0
    #[arg(required = true, value_name = "UNIT")]
    units: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let names = args.units.iter().map(|unit| parse_arg(unit)).collect::<Result<BTreeSet<UnitName>, _>>()?;
    globals.in_environment(async |_, environment| remove(environment, &names).await).await
}

async fn remove(environment: &Environment<ZkTree>, names: &BTreeSet<UnitName>) -> anyhow::Result<()> {
    for name in names {
        match environment.unit(name).await {
            // A unit with a corrupt record can be removed, which is how the operator repairs it.
            Ok(_) | Err(store::Error::Corrupt { .. }) => {}
            // The previous run, whose response was lost, has removed it.
            Err(store::Error::UnitNotFound(_)) if environment.is_repeated() => {}
            Err(error) => return Err(error.into()),
        }
    }
    for name in names {
        environment.remove_unit(name).await.with_context(|| format!("cannot remove unit '{name}'"))?;
        output::message(&format!("Unit '{name}' removed from service '{}'", name.service()));
    }
    Ok(())
}
