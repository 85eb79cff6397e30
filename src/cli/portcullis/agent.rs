//! `portcullis agent`: its options. `serve` runs it, in builds with the fleet.

#[cfg(feature = "fleet")]
mod serve;

use std::path::PathBuf;

#[cfg(not(feature = "fleet"))]
use crate::cli::error::Refusal;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Name of this node
    #[arg(long, value_name = "NAME", required_unless_present = "config")]
    name: Option<String>,
    /// Managers to connect to, HOST:PORT or unix:PATH, with commas between them; they are tried in
    /// turn
    #[arg(long, value_name = "ADDR", value_delimiter = ',', required_unless_present = "config")]
    manager: Vec<String>,
    /// Bus of systemd: `system`, `user` or an address of D-Bus
    #[arg(long, value_name = "BUS", default_value = "system")]
    bus: String,
    /// Configuration file (INI); options take precedence over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory for the list of proxy services [default: $XDG_DATA_HOME/portcullis-agents]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS, the certificate of this node first
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "ca_file"])]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM); the file must not be readable by other users
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// CA (PEM) of the manager's certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    ca_file: Option<PathBuf>,
    /// Name in the manager's certificate [default: the host of its address]
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    manager_name: Option<String>,
    /// Connect without TLS to managers on other hosts, too
    #[arg(long, conflicts_with = "tls_cert")]
    allow_plain_tcp: bool,
}

#[cfg(feature = "fleet")]
pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    serve::run(args).await
}

#[cfg(not(feature = "fleet"))]
pub(super) async fn run(_: &Args) -> anyhow::Result<()> {
    Err(Refusal::NoFleet.into())
}
