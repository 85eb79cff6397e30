//! `juju accept-store`: agents that are held because the store was restored from an older backup
//! may continue with it.

use super::output;
use super::settings::Globals;
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
