//! `portcullis manager`: its options. `serve` runs it with a file, `environment` in an environment,
//! in builds with the fleet.

#[cfg(feature = "fleet")]
pub(super) mod environment;
#[cfg(feature = "fleet")]
mod serve;

use std::net::SocketAddr;
use std::path::PathBuf;
#[cfg(feature = "fleet")]
use std::time::Duration;

use crate::cli::args::environment::Globals;
use crate::cli::args::metrics::MetricsArgs;
#[cfg(feature = "fleet")]
use crate::cli::args::time::Time;
#[cfg(not(feature = "fleet"))]
use crate::cli::error::Refusal;
#[cfg(feature = "fleet")]
use crate::cli::error::{Usage, parse_arg};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    globals: Globals,
    /// Configuration file (INI) with the nodes, instead of the machines of an environment; SIGHUP
    /// reads it again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["environment", "zookeeper", "ca"])]
    config: Option<PathBuf>,
    /// Address to accept agents and operators on; port 0 selects a free port [default: 0.0.0.0:842,
    /// or the port of the configuration file]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Unix socket to accept agents and operators on, for root and the user of this process
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Bus to serve the API on: `system`, `user`, an address of D-Bus, or `none`
    #[arg(long, value_name = "BUS", default_value = "system")]
    bus: String,
    /// Group whose members may change something on the bus, besides root
    #[arg(long, value_name = "GROUP")]
    bus_group: Option<String>,
    /// Accept connections without TLS from other hosts, too
    #[arg(long, requires = "config")]
    allow_plain_tcp: bool,
    /// Certificate chain (PEM) for TLS, the manager's certificate first. In an environment its
    /// authority issues the certificate
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "client_ca", "config"])]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM); the file must not be readable by other users
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// CA (PEM) of the certificates of agents and operators
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    client_ca: Option<PathBuf>,
    /// How long the proxy services of a node keep their targets in use after the connection to the
    /// node was lost: a number followed by s, m, h or d
    #[arg(long, value_name = "TIME", default_value = "30s")]
    proxy_grace: String,
    #[command(flatten)]
    metrics: MetricsArgs,
}

#[cfg(feature = "fleet")]
impl Args {
    fn proxy_grace(&self) -> Result<Duration, Usage> {
        let Time(ms) = parse_arg(&self.proxy_grace)?;
        Ok(Duration::from_millis(ms))
    }
}

#[cfg(feature = "fleet")]
pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    match &args.config {
        Some(config) => serve::run(args, config).await,
        None => environment::run(args).await,
    }
}

#[cfg(not(feature = "fleet"))]
pub(super) async fn run(_: &Args) -> anyhow::Result<()> {
    Err(Refusal::NoFleet.into())
}
