//! `--metrics ADDR`: the HTTP endpoint of a process. `/metrics` is for Prometheus, `/healthz`
//! answers while the process runs, and `/readyz` while all of its roles do their work.

use std::net::SocketAddr;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::watch;
use tracing::warn;

use crate::cli::args::listen::is_loopback;
use crate::cli::output;
use crate::firewall::leader_loop::Progress;
use crate::firewall::metrics::{Metrics, ready};
use crate::net::http::{Limits, Reply, Request, Server};
use crate::runtime::metrics::Registry;
use crate::runtime::service::{OnEnd, Service};

/// Enough for a few monitoring systems.
const CONNECTIONS: usize = 64;

#[derive(Debug, Clone, Default, Args)]
pub(in crate::cli) struct MetricsArgs {
    /// Address to serve metrics and health on, for example 127.0.0.1:9420 [default: none]
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,
}

impl MetricsArgs {
    /// The address of the endpoint, if one with a fixed port was asked for.
    pub(in crate::cli) fn address(&self) -> Option<SocketAddr> {
        self.metrics.filter(|addr| addr.port() != 0)
    }

    pub(in crate::cli) fn port(&self) -> Option<u16> {
        self.metrics.map(|addr| addr.port()).filter(|port| *port != 0)
    }

    /// Adds the endpoint to a service if it was asked for. It belongs in the first stage, so that
    /// it answers while the other roles stop.
    pub(in crate::cli) async fn start(
        &self,
        service: &mut Service<anyhow::Error>,
        registry: &Registry,
    ) -> anyhow::Result<()> {
        let Some(addr) = self.metrics else { return Ok(()) };
        let limits = Limits { connections: CONNECTIONS, body_bytes: 0, ..Limits::default() };
        let server =
            Server::bind(addr, limits).await.with_context(|| format!("cannot serve metrics on {addr}"))?;
        let addr = server.local_addr().context("cannot determine the metrics address")?;
        if !is_loopback(addr) {
            warn!(%addr, "metrics are served as plain text on an address that is not loopback");
        }
        output::message(&format!("metrics on http://{addr}/metrics"));
        let registry = registry.clone();
        let answer = move |request: Request| {
            let reply = reply(&request, &registry);
            async move { reply }
        };
        // A task of its own: it answers also while the roles' thread is busy.
        let serve = |stop| async { Ok(tokio::spawn(server.serve(answer, stop)).await?) };
        service.start("metrics", OnEnd::Continue, serve);
        Ok(())
    }
}

/// Adds the counts and the progress of a firewall controller.
pub(in crate::cli) fn add_firewall(
    registry: &Registry,
    role: &'static str,
    metrics: &Metrics,
    progress: &watch::Receiver<Progress>,
) {
    let (metrics, for_metrics, for_readiness) = (metrics.clone(), progress.clone(), progress.clone());
    let render = move || metrics.render(&for_metrics.borrow());
    registry.add(role, render, move || ready(&for_readiness.borrow()));
}

fn reply(request: &Request, registry: &Registry) -> Reply {
    if !matches!(request.method(), "GET" | "HEAD") {
        let text = "text/plain; charset=utf-8";
        return Reply::new(405, text, "only GET and HEAD are allowed\n").with("allow", "GET, HEAD");
    }
    let (status, kind, body) = registry.answer(request.path());
    Reply::new(status, kind, body)
}
