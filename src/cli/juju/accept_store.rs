//! `juju accept-store`: lets agents continue that wait because the store was restored from an older
//! backup.

use crate::cli::args::environment::Globals;
use crate::cli::error::Refusal;
use crate::cli::output;
use crate::store::{Acceptance, Accepted};

pub(super) async fn run(globals: &Globals) -> anyhow::Result<()> {
    let Accepted { agents, failed } =
        globals.in_environment(async |_, environment| Ok(environment.accept_store().await?)).await?;
    if agents.is_empty() && failed.is_empty() {
        output::message("No agent is held; `juju status` shows why if one is held later.");
    }
    for agent in agents {
        output::message(&match agent {
            Acceptance::Controller => "The controller continues with the store as it is.".to_owned(),
            Acceptance::Machine(id) => format!("Machine {id} continues with the store as it is."),
        });
    }
    if failed.is_empty() {
        return Ok(());
    }
    let problem = |(agent, error): (Acceptance, _)| {
        let error = anyhow::Error::new::<crate::store::Error>(error);
        match agent {
            Acceptance::Controller => format!("the controller: {error:#}"),
            Acceptance::Machine(id) => format!("machine {id}: {error:#}"),
        }
    };
    Err(Refusal::NotAccepted { problems: failed.into_iter().map(problem).collect() }.into())
}
