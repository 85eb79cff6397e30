//! `juju remove-unit`: takes units away from their services. All names are looked up first, so that a misspelled one
//! leaves everything as it was.

use std::collections::BTreeSet;

use anyhow::Context as _;
use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::UnitName;
use crate::store::{self, Environment, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Units to remove, as in wordpress/0
    #[arg(required = true, value_name = "UNIT")]
    units: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let names = args.units.iter().map(|unit| typed(unit)).collect::<Result<BTreeSet<UnitName>, _>>()?;
    globals.in_environment(async |_, environment| remove(environment, &names).await).await
}

async fn remove(environment: &Environment<ZkTree>, names: &BTreeSet<UnitName>) -> anyhow::Result<()> {
    for name in names {
        match environment.unit(name).await {
            // A corrupt record is no reason to keep a unit: removing it is how the operator mends that.
            Ok(_) | Err(store::Error::Corrupt { .. }) => {}
            // Gone already, it seems, by a run whose answer was lost.
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
