//! `juju resolved`: a decision about a hook that failed: run it again, or go on without it.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::UnitName;
use crate::store::{self, paths};
use crate::unit::resolve::resolve;
use crate::unit::workflow::Resolution;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Unit whose hook failed, as in wordpress/0
    unit: String,
    /// Run the hook again, instead of going on as if it had succeeded
    #[arg(short, long)]
    retry: bool,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let name: UnitName = typed(&args.unit)?;
    let resolution = if args.retry { Resolution::Retry } else { Resolution::Skip };
    let failure = globals
        .in_environment(async |_, environment| {
            let state = match environment.unit(&name).await {
                Ok((id, _)) => paths::unit_state(id),
                // It may have been removed, and have failed to stop.
                Err(gone @ store::Error::UnitNotFound(_)) => {
                    environment.stopping(&name).await?.ok_or(gone)?
                }
                Err(error) => return Err(error.into()),
            };
            Ok(resolve(environment.tree(), &state, resolution).await?)
        })
        .await?;
    let hook = failure.hook;
    output::message(&match resolution {
        Resolution::Retry => format!("Unit '{name}' runs its {hook} hook again."),
        Resolution::Skip => format!("Unit '{name}' goes on without its {hook} hook."),
    });
    Ok(())
}
