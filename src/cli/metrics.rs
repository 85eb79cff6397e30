//! `--metrics ADDR`: the door through which an agent is watched. `/metrics` for Prometheus, `/healthz` says that the process
//! answers, `/readyz` that it does its work.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::output;
use crate::firewall::metrics::{Metrics, ready};
use crate::firewall::run::Progress;
use crate::runtime::http::{Limits, Reply, Request, Server};

/// A few who watch.
const CONNECTIONS: usize = 64;

/// A little more than connections are given to end.
const SHUTTING: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Default, Args)]
pub(super) struct Watched {
    /// Serve metrics and health here, as in 127.0.0.1:9420
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,
}

impl Watched {
    pub(super) fn port(&self) -> Option<u16> {
        self.metrics.map(|addr| addr.port()).filter(|port| *port != 0)
    }

    /// Opens the door if one was asked for. It is shut when `stop` says so or is dropped.
    pub(super) async fn open(
        &self,
        metrics: &Metrics,
        progress: watch::Receiver<Progress>,
        stop: watch::Receiver<bool>,
    ) -> anyhow::Result<Option<JoinHandle<()>>> {
        let Some(addr) = self.metrics else { return Ok(None) };
        let limits = Limits { connections: CONNECTIONS, body_bytes: 0, ..Limits::default() };
        let server =
            Server::bind(addr, limits).await.with_context(|| format!("cannot serve metrics on {addr}"))?;
        let addr = server.local_addr().context("cannot tell where metrics are served")?;
        output::message(&format!("metrics on http://{addr}/metrics"));
        let metrics = metrics.clone();
        let answer = move |request: Request| {
            let reply = reply(&request, &metrics, &progress.borrow());
            async move { reply }
        };
        Ok(Some(tokio::spawn(server.serve(answer, stop))))
    }
}

/// Waits for the door to be shut, once `stop` has said so, and no longer than it may take.
pub(super) async fn shut(door: Option<JoinHandle<()>>) {
    let Some(mut door) = door else { return };
    // One that hangs is cut off.
    if tokio::time::timeout(SHUTTING, &mut door).await.is_err() {
        door.abort();
    }
}

fn reply(request: &Request, metrics: &Metrics, progress: &Progress) -> Reply {
    const TEXT: &str = "text/plain; charset=utf-8";
    if !matches!(request.method(), "GET" | "HEAD") {
        return Reply::new(405, TEXT, "only GET is answered here\n").with("allow", "GET, HEAD");
    }
    match request.path() {
        "/metrics" => Reply::new(200, "text/plain; version=0.0.4; charset=utf-8", metrics.render(progress)),
        "/healthz" => Reply::new(200, TEXT, "ok\n"),
        "/readyz" => match ready(progress) {
            Ok(words) => Reply::new(200, TEXT, format!("{words}\n")),
            Err(words) => Reply::new(503, TEXT, format!("{words}\n")),
        },
        _ => Reply::new(404, TEXT, "there are /metrics, /healthz and /readyz\n"),
    }
}
