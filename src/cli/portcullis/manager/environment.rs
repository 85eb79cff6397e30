//! The manager of an environment as a role: of `portcullis manager`, and beside other roles in
//! `controller` and `up` with `--fleet`. This file connects the listener, the certificate, the
//! store and the bus; the work is in `fleet`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::info;

use super::Args;
use super::serve::bind_unix;
use crate::cli::args::environment::Target;
use crate::cli::authority;
use crate::cli::config::Role;
use crate::cli::error::Refusal;
use crate::cli::output;
use crate::cli::portcullis::listener_certificate::ListenerCertificate;
use crate::cli::portcullis::up;
use crate::fleet::dbus::accept::TcpPolicy;
use crate::fleet::dbus::names::{DEFAULT_PORT, MANAGER_CERTIFICATE};
use crate::fleet::environment::EnvironmentManager;
use crate::fleet::manager::listen::MAX_CONNECTIONS;
use crate::fleet::manager::{Leadership, Manager, Timing};
use crate::machine::host::{address_toward, reachable_addresses};
use crate::net::listener::Listener;
use crate::runtime::metrics::Registry;
use crate::runtime::resource_limits::raise_open_files;
use crate::runtime::service::{OnEnd, Service, stopped};

/// A manager whose listener is open.
pub(in crate::cli::portcullis) struct ManagerRole {
    target: Target,
    listener: Listener,
    address: SocketAddr,
    policy: TcpPolicy,
    certificate: ListenerCertificate,
    manager: Manager,
}

impl ManagerRole {
    /// Opens the listener, with a certificate in the data directory `data`.
    pub(in crate::cli::portcullis) fn open(
        target: Target,
        listen: SocketAddr,
        data: &Path,
    ) -> anyhow::Result<Self> {
        let missing = || {
            let path = target.config.authority(&target.environment);
            Refusal::NoListenerCertificate { listen, path }
        };
        let authority = authority::read(&target.config, &target.environment)?.ok_or_else(missing)?;
        let certificate = ListenerCertificate::new(authority, data, (MANAGER_CERTIFICATE, listen), &[])?;
        let policy = TcpPolicy { tls: Some(certificate.ensure()?), allow_plain: false };
        raise_open_files();
        let listener =
            Listener::bind(listen, MAX_CONNECTIONS).with_context(|| format!("cannot listen on {listen}"))?;
        let address = listener.local_addr().context("cannot determine the listening address")?;
        let manager = Manager::new(Timing::default(), Leadership::Standby { leader: None });
        Ok(Self { target, listener, address, policy, certificate, manager })
    }

    pub(in crate::cli::portcullis) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(in crate::cli::portcullis) fn add_metrics(&self, registry: &Registry) {
        let counted = self.manager.clone();
        registry.add("fleet", move || counted.render_metrics(), || Ok("managing"));
    }

    /// Starts the role: the listener in the current stage, the manager in the next one, which stops
    /// first, so that all jobs end and their signals are sent.
    pub(in crate::cli::portcullis) fn start(self, service: &mut Service<anyhow::Error>, on_end: OnEnd) {
        let Self { target, listener, address, policy, certificate, manager } = self;
        certificate.start_renewal(service);
        let agents = manager.clone();
        service.start("agents", on_end, |stop| async move {
            agents.serve_tcp(listener, policy, stop).await;
            Ok(())
        });
        service.next_stage();
        service.start("fleet", on_end, |mut stop| async move {
            let opened = tokio::select! {
                opened = target.wait_and_open() => opened?,
                () = stopped(&mut stop) => return Ok(()),
            };
            let roles = opened.info().roles.clone();
            let tree = opened.into_tree();
            let addresses = published(address, address_toward(&target.address).await);
            let led = match EnvironmentManager::new(tree.clone(), roles, manager, addresses) {
                Ok(mut role) => role.run(stop).await,
                Err(error) => Err(error),
            };
            // Ends the session, so that a standby does not wait for its timeout.
            tree.close().await;
            led.context("the manager failed")
        });
    }
}

/// Returns the addresses at which agents reach a listener. On a wildcard address these are the
/// addresses of the host, the one that reaches the store first.
fn published(listening: SocketAddr, preferred: Option<IpAddr>) -> Vec<String> {
    let ip = listening.ip().to_canonical();
    let addresses = if ip.is_unspecified() { reachable_addresses(preferred) } else { Vec::new() };
    let port = listening.port();
    if addresses.is_empty() {
        let ip = if ip.is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { ip };
        return vec![SocketAddr::new(ip, port).to_string()];
    }
    addresses.into_iter().map(|ip| SocketAddr::new(ip, port).to_string()).collect()
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    let target = args.globals.target_of(Role::Controller)?;
    let data = up::data_dir(&target.environment, None)?;
    let default = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT);
    let role = ManagerRole::open(target, args.listen.unwrap_or(default), &data)?;
    role.manager.set_proxy_grace(args.proxy_grace()?);
    let socket = args.socket.as_deref().map(bind_unix).transpose()?;
    let bus = args.connect_bus().await?;
    let registry = Registry::default();
    role.add_metrics(&registry);
    args.metrics.start(&mut service, &registry).await?;
    service.next_stage();
    let (manager, address) = (role.manager.clone(), role.address());
    service.start("hangup", OnEnd::StopOthers, |stop| ignore_hangups(hangup, stop));
    if let Some(socket) = socket {
        let local = manager.clone();
        service.start("socket", OnEnd::StopOthers, |stop| async move {
            local.serve_unix(socket, stop).await;
            Ok(())
        });
    }
    role.start(&mut service, OnEnd::StopOthers);
    if let Some((connected, bus)) = bus {
        let group = args.bus_group.clone();
        service.start("bus", OnEnd::StopOthers, |stop| async move {
            manager.serve_bus(connected, &bus, group, stop).await;
            Ok(())
        });
    }
    info!(%address, "manager ready");
    output::data(&format!("listening on {address}\n")).context("cannot write to stdout")?;
    service.run().await
}

/// Logs each SIGHUP: there is no file to read again.
async fn ignore_hangups(mut hangup: Signal, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return Ok(()),
            _ = hangup.recv() => info!("SIGHUP ignored: the nodes are the machines of the environment"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_address_is_published_as_it_is() {
        for address in ["192.0.2.1:842", "127.0.0.1:842", "[2001:db8::1]:842"] {
            assert_eq!(published(address.parse().unwrap(), None), [address]);
        }
        let wildcard = published("0.0.0.0:842".parse().unwrap(), None);
        assert!(!wildcard.is_empty() && wildcard.iter().all(|address| !address.starts_with("0.0.0.0")));
    }
}
