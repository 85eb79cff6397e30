//! `juju resolved`: resolves a failed hook: the unit runs it again or skips it.

use crate::cli::args::environment::Globals;
use crate::cli::error::parse_arg;
use crate::cli::output;
use crate::model::UnitName;
use crate::store::{self, paths};
use crate::unit::resolve::resolve;
use crate::unit::workflow::Resolution;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Unit whose hook failed, for example wordpress/0
    unit: String,
    /// Run the hook again instead of skipping it
    #[arg(short, long)]
    retry: bool,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let name: UnitName = parse_arg(&args.unit)?;
    let resolution = if args.retry { Resolution::Retry } else { Resolution::Skip };
    let failure = globals
        .in_environment(async |_, environment| {
            let state = match environment.unit(&name).await {
                Ok((id, _)) => paths::unit_state(id),
                // The unit may have been removed with a failed stop hook.
                Err(gone @ store::Error::UnitNotFound(_)) => {
                    environment.failed_stop(&name).await?.ok_or(gone)?
                }
                Err(error) => return Err(error.into()),
            };
            Ok(resolve(environment.tree(), &state, resolution).await?)
        })
        .await?;
    let hook = failure.hook;
    output::message(&match resolution {
        Resolution::Retry => format!("Unit '{name}' runs its {hook} hook again."),
        Resolution::Skip => format!("Unit '{name}' continues without its {hook} hook."),
    });
    Ok(())
}
