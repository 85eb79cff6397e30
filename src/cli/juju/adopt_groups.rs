//! `juju adopt-groups`: after the loss of a store, makes the controller tag the environment's
//! security groups with the id of the new store.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{Instant, sleep};

use crate::cli::args::environment::Globals;
use crate::cli::error::Refusal;
use crate::cli::output;
use crate::store::requests::{Progress, Request};
use crate::store::{Environment, ZkTree};

const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Seconds to wait for the controller
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    let lines = globals
        .in_environment(async |_, environment| {
            let request = Request::AdoptGroups;
            let lines = send_and_wait(environment, request, Duration::from_secs(args.timeout)).await;
            environment.withdraw(request).await?;
            lines
        })
        .await?;
    if lines.is_empty() {
        output::message("No security group of another store has this environment's name.");
    }
    for line in lines {
        output::data(&format!("{line}\n")).context("cannot write to stdout")?;
    }
    Ok(())
}

/// Sends a request to the controller and waits for the result.
pub(super) async fn send_and_wait(
    environment: &Environment<ZkTree>,
    request: Request,
    timeout: Duration,
) -> anyhow::Result<Vec<String>> {
    environment.ask(request).await?;
    let deadline = Instant::now() + timeout;
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
            let seconds = timeout.as_secs();
            if !environment.has_controller().await? {
                return Err(Refusal::NoController { seconds }.into());
            }
            return Err(Refusal::NotAnswered { seconds, problem }.into());
        }
        sleep(POLL_INTERVAL).await;
    }
}
