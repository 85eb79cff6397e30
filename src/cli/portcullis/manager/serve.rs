//! The manager of a fleet as a process, with its nodes from a configuration file. The work is in
//! `fleet`; this file reads files and opens listeners.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::{info, warn};

use super::Args;
use crate::cli::error::Usage;
use crate::cli::output;
use crate::fleet::config::ManagerFile;
use crate::fleet::dbus::accept::TcpPolicy;
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::names::DEFAULT_PORT;
use crate::fleet::ini::MAX_BYTES;
use crate::fleet::manager::bus::BusConnection;
use crate::fleet::manager::listen::MAX_CONNECTIONS;
use crate::fleet::manager::{Leadership, Manager, NodeRule, NodeRules, Timing};
use crate::net::listener::Listener;
use crate::net::tls::{ClientAuth, IdentityFiles, ServerFiles, ServerTls, certificate_in};
use crate::runtime::logging;
use crate::runtime::metrics::Registry;
use crate::runtime::resource_limits::raise_open_files;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::runtime::trusted_file::read_trusted;

/// A certificate has a few kilobytes.
const MAX_CERTIFICATE_BYTES: usize = 256 << 10;

impl Args {
    /// Connects to the bus on which the API is served, and takes the manager's name there.
    pub(super) async fn connect_bus(&self) -> anyhow::Result<Option<(BusConnection, Bus)>> {
        if self.bus == "none" {
            return Ok(None);
        }
        let bus = Bus::parse(&self.bus);
        let connected = BusConnection::connect(&bus).await;
        Ok(Some((connected.with_context(|| format!("cannot serve {bus}"))?, bus)))
    }

    fn tls(&self) -> anyhow::Result<Option<ServerTls>> {
        let (Some(cert), Some(key), Some(ca)) = (&self.tls_cert, &self.tls_key, &self.client_ca) else {
            return Ok(None);
        };
        let identity = IdentityFiles { certificates: cert.clone(), key: key.clone() };
        let files = ServerFiles { identity, client_ca: Some((ca.clone(), ClientAuth::Required)) };
        Ok(Some(ServerTls::load(files).context("cannot use TLS")?))
    }
}

/// Reads the configuration file. An error names the file and the line.
fn read_config(path: &Path) -> anyhow::Result<ManagerFile> {
    let missing = || Usage::new(format!("{} does not exist", path.display()));
    let bytes = read_trusted(path, MAX_BYTES)?.ok_or_else(missing)?;
    let text = String::from_utf8(bytes);
    let text = text.map_err(|_| Usage::new(format!("{} is not a text file", path.display())))?;
    let wrong = |error| Usage::new(format!("{}: {error}", path.display()));
    Ok(ManagerFile::read(&text).map_err(wrong)?)
}

/// Returns the nodes of the file at `path`, with the certificates that it names.
fn node_rules(file: &ManagerFile, path: &Path) -> anyhow::Result<NodeRules> {
    let mut rules = NodeRules::new();
    for (name, settings) in &file.nodes {
        let read = |(certificate, line): &(PathBuf, usize)| {
            let wrong =
                |error| Usage::new(format!("{}: line {line}: Certificate: {error:#}", path.display()));
            read_certificate(certificate).map_err(wrong)
        };
        let certificate = settings.certificate.as_ref().map(read).transpose()?;
        let may_depend_on = Some(settings.may_depend_on.clone());
        rules.insert(name.clone(), NodeRule { certificate, machine: None, may_depend_on });
    }
    Ok(rules)
}

fn read_certificate(path: &Path) -> anyhow::Result<Bytes> {
    let missing = || Usage::new(format!("{} does not exist", path.display()));
    let pem = read_trusted(path, MAX_CERTIFICATE_BYTES)?.ok_or_else(missing)?;
    let none = || Usage::new(format!("no certificate in PEM form in {}", path.display()));
    Ok(certificate_in(&pem).ok_or_else(none)?)
}

fn timing(file: &ManagerFile) -> Timing {
    let default = Timing::default();
    Timing {
        heartbeat_interval: file.heartbeat_interval.unwrap_or(default.heartbeat_interval),
        silence_limit: file.silence_limit.unwrap_or(default.silence_limit),
    }
}

pub(super) async fn run(args: &Args, config: &Path) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    let file = read_config(config)?;
    let manager = Manager::new(timing(&file), Leadership::Leading);
    manager.set_proxy_grace(args.proxy_grace()?);
    manager.set_nodes(node_rules(&file, config)?);
    if let Some(level) = file.log_level {
        logging::set_level(level);
    }
    let policy = TcpPolicy { tls: args.tls()?, allow_plain: args.allow_plain_tcp };
    raise_open_files();
    let default = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), file.port.unwrap_or(DEFAULT_PORT));
    let listen = args.listen.unwrap_or(default);
    let listener =
        Listener::bind(listen, MAX_CONNECTIONS).with_context(|| format!("cannot listen on {listen}"))?;
    let address = listener.local_addr().context("cannot determine the listening address")?;
    let socket = args.socket.as_deref().map(bind_unix).transpose()?;
    let bus = args.connect_bus().await?;
    let registry = Registry::default();
    let counted = manager.clone();
    registry.add("fleet", move || counted.render_metrics(), || Ok("managing"));
    args.metrics.start(&mut service, &registry).await?;
    service.next_stage();
    let (agents, local, reloaded) = (manager.clone(), manager.clone(), manager.clone());
    service.start("agents", OnEnd::StopOthers, |stop| async move {
        agents.serve_tcp(listener, policy, stop).await;
        Ok(())
    });
    if let Some(socket) = socket {
        service.start("socket", OnEnd::StopOthers, |stop| async move {
            local.serve_unix(socket, stop).await;
            Ok(())
        });
    }
    let config = config.to_owned();
    let port = file.port;
    service.start("reload", OnEnd::StopOthers, move |stop| reload(reloaded, config, port, hangup, stop));
    // The last stage stops first: all jobs end, and the bus and the operators are sent the signals.
    service.next_stage();
    let group = args.bus_group.clone();
    service.start("bus", OnEnd::StopOthers, |mut stop| async move {
        match bus {
            Some((connected, bus)) => manager.serve_bus(connected, &bus, group, stop).await,
            None => {
                stopped(&mut stop).await;
                manager.stop();
            }
        }
        Ok(())
    });
    output::data(&format!("listening on {address}\n")).context("cannot write to stdout")?;
    service.run().await
}

pub(super) fn bind_unix(path: &Path) -> anyhow::Result<UnixListener> {
    let failed = || format!("cannot listen on {}", path.display());
    // A socket that an earlier process has left behind.
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(failed)?;
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).with_context(failed)?;
    Ok(listener)
}

/// Reads the configuration file again after each SIGHUP. A file that cannot be used changes
/// nothing.
async fn reload(
    manager: Manager,
    path: PathBuf,
    port: Option<u16>,
    mut hangup: Signal,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return Ok(()),
            _ = hangup.recv() => {}
        }
        match read_config(&path).and_then(|file| Ok((node_rules(&file, &path)?, file))) {
            Ok((rules, file)) => {
                if file.port != port {
                    warn!("another port takes effect after a restart");
                }
                manager.set_timing(timing(&file));
                manager.set_nodes(rules);
                if let Some(level) = file.log_level {
                    logging::set_level(level);
                }
                info!("configuration read again");
            }
            Err(error) => warn!(error = format!("{error:#}"), "configuration file cannot be used"),
        }
    }
}
