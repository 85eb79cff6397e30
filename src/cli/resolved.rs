//! `juju resolved`: a decision about a hook that failed: run it again, or go on without it.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::UnitName;
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
            let (id, _) = environment.unit(&name).await?;
            Ok(resolve(environment.tree(), id, resolution).await?)
        })
        .await?;
    let hook = failure.hook;
    output::message(&match resolution {
        Resolution::Retry => format!("Unit '{name}' runs its {hook} hook again."),
        Resolution::Skip => format!("Unit '{name}' goes on without its {hook} hook."),
    });
    Ok(())
}
