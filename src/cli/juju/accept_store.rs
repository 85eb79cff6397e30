//! `juju accept-store`: lets agents continue that wait because the store was restored from an older
//! backup.

use crate::cli::args::environment::Globals;
use crate::cli::output;
use crate::store::Acceptance;

pub(super) async fn run(globals: &Globals) -> anyhow::Result<()> {
    let accepted =
        globals.in_environment(async |_, environment| Ok(environment.accept_store().await?)).await?;
    if accepted.is_empty() {
        output::message("No agent is held; `juju status` shows why if one is held later.");
    }
    for agent in accepted {
        output::message(&match agent {
            Acceptance::Controller => "The controller continues with the store as it is.".to_owned(),
            Acceptance::Machine(id) => format!("Machine {id} continues with the store as it is."),
        });
    }
    Ok(())
}
