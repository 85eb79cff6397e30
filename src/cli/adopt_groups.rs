//! `juju adopt-groups`: after a store was lost, has the controller mark the security groups of this environment's name as
//! those of the store that took its place.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::time::{Instant, sleep};

use super::failure::Refusal;
use super::output;
use super::settings::Globals;
use crate::store::requests::{Progress, Request};
use crate::store::{Environment, ZkTree};

const LOOK_AGAIN: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Give up waiting for the controller after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let lines = globals
        .in_environment(async |_, environment| {
            let request = Request::AdoptGroups;
            let lines = answered(environment, request, Duration::from_secs(args.timeout)).await;
            environment.withdraw(request).await?;
            lines
        })
        .await?;
    if lines.is_empty() {
        output::message("No group of another store has this environment's name.");
    }
    for line in lines {
        output::data(&format!("{line}\n")).context("cannot write to stdout")?;
    }
    Ok(())
}

/// Asks the controller and waits for its answer.
pub(super) async fn answered(
    environment: &Environment<ZkTree>,
    request: Request,
    patience: Duration,
) -> anyhow::Result<Vec<String>> {
    environment.ask(request).await?;
    let deadline = Instant::now() + patience;
    let mut shown = None;
    loop {
        let problem = match environment.progress(request).await? {
            Progress::Done(lines) => return Ok(lines),
            Progress::Waiting(problem) => problem,
        };
        if problem.is_some() && problem != shown {
            output::message(&format!("waiting: {}", problem.as_deref().unwrap_or_default()));
            shown.clone_from(&problem);
        }
        if Instant::now() >= deadline {
            let seconds = patience.as_secs();
            if !environment.has_controller().await? {
                return Err(Refusal::NoController { seconds }.into());
            }
            return Err(Refusal::NotAnswered { seconds, problem }.into());
        }
        sleep(LOOK_AGAIN).await;
    }
}
