//! `portcullis heartbeat`: a heartbeat tracker as a process. The door opens first: beats are taken before a store was found
//! and while it is away. What a beat means is decided in `heartbeat`; here it gets its door, its store and its clock.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::Args;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::watch;
use tracing::{info, warn};

use super::config::Role;
use super::output;
use super::settings::{Globals, Settings};
use crate::heartbeat::api::{Api, limits};
use crate::heartbeat::ears::Ears;
use crate::heartbeat::notify::Http;
use crate::heartbeat::tracker::{Setting, Tracker};
use crate::runtime::http::Server;
use crate::runtime::shutdown::Shutdown;
use crate::store::{Environment, ZkTree};

/// Signs what webhooks get. A variable and not a flag, because flags are seen by everyone.
const WEBHOOK_SECRET: &str = "PORTCULLIS_WEBHOOK_SECRET";

/// How long after a store was not found it is looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How long the tracker may take to leave in order.
const LAST_WORDS: Duration = Duration::from_secs(8);

#[derive(Debug, Args)]
pub(super) struct Typed {
    #[command(flatten)]
    globals: Globals,
    /// Address to take beats on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:28500")]
    listen: SocketAddr,
    /// Take beats from anybody, for anything but machines; clients of hms-hbtd need it
    #[arg(long)]
    open: bool,
    /// Components that are remembered; one more is refused
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    max_components: usize,
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    let settings = args.globals.settings_of(Role::Controller)?;
    raise_open_files();
    let ears = Arc::new(Ears::new(Arc::new(calendar), args.max_components));
    let (found, store) = watch::channel(None);
    let (shut, is_shut) = watch::channel(false);
    let (stop, stopped) = watch::channel(false);
    let server = Server::bind(args.listen, limits())
        .await
        .with_context(|| format!("cannot listen on {}", args.listen))?;
    let address = server.local_addr().context("cannot tell where this listens")?;
    output::data(&format!("listening on {address}\n")).context("cannot write to stdout")?;
    let api = Arc::new(Api::new(Arc::clone(&ears), store, args.open));
    let answer = move |request| {
        let api = Arc::clone(&api);
        async move { api.answer(request).await }
    };
    let mut serving = tokio::spawn(server.serve(answer, is_shut));
    let mut tracking = std::pin::pin!(track(&settings, &ears, &found, stopped));
    let ended = tokio::select! {
        ended = &mut tracking => ended,
        () = ears.pulse() => Ok(()),
        signal = shutdown.asked() => {
            info!(signal, "stopping");
            // First the door, so that every beat that was taken is in the last words.
            shut.send_replace(true);
            tokio::select! {
                ended = &mut tracking => return ended,
                ended = &mut serving => ended.context("the door fell")?,
            }
            stop.send_replace(true);
            tokio::time::timeout(LAST_WORDS, tracking).await.context("the tracker does not end")?
        }
    };
    serving.abort();
    ended
}

/// Finds the store, however long that takes, and runs the tracker on it.
async fn track(
    settings: &Settings,
    ears: &Arc<Ears>,
    found: &watch::Sender<Option<ZkTree>>,
    mut stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let environment = tokio::select! {
        environment = look_for_store(settings) => environment?,
        _ = stopped.wait_for(|stopped| *stopped) => return Ok(()),
    };
    let roles = environment.info().roles.clone();
    let tree = environment.into_tree();
    found.send_replace(Some(tree.clone()));
    let secret = std::env::var(WEBHOOK_SECRET).ok().filter(|secret| !secret.is_empty());
    let mut tracker = Tracker::new(Setting {
        tree: tree.clone(),
        roles,
        ears: Arc::clone(ears),
        post: Arc::new(Http),
        webhook_secret: secret.map(|secret| secret.into_bytes().into()),
        random: jitter,
    })?;
    let ended = tracker.run(stopped).await;
    // Ends the session and with it the lock, so that whoever stands by need not wait.
    found.send_replace(None);
    tree.close().await;
    Ok(ended?)
}

/// Waits for a store that is not there; what waiting does not cure is told at once.
async fn look_for_store(settings: &Settings) -> anyhow::Result<Environment<ZkTree>> {
    loop {
        match settings.open().await {
            Ok(environment) => return Ok(environment),
            Err(error) => {
                let passing =
                    error.downcast_ref::<crate::store::tree::Error>().is_some_and(|e| e.is_retryable());
                let store_error = error.downcast_ref::<crate::store::Error>();
                let passing = passing
                    || matches!(store_error, Some(crate::store::Error::Tree(error)) if error.is_retryable());
                if !passing {
                    return Err(error);
                }
                warn!(error = format!("{error:#}"), "no store yet");
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

/// Every component may keep a connection, and the usual limit of open files is for programs with a few.
fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "the limit of open files stays as it is");
    }
}

fn calendar() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Spreads retries. Without the system's randomness they are only less spread.
fn jitter() -> u64 {
    getrandom::u64().unwrap_or(0)
}
