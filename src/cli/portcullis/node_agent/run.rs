//! Runs the agent of a node on the connection of a machine to its store.

use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use crate::cli::args::agent::{agents_dir, part_of, proxies_file};
use crate::fleet::agent::{Agent, Settings};
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::connect::Security;
use crate::fleet::dbus::names::MANAGER_CERTIFICATE;
use crate::fleet::discovery::{Host, follow_manager};
use crate::fleet::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use crate::fleet::name::NodeName;
use crate::fleet::systemd::Systemd;
use crate::model::MachineId;
use crate::net::tls::ClientTls;
use crate::runtime::service::stopped;
use crate::store::ZkTree;
use crate::store::fleet::read_node_name;

/// The pause after a failure to read the name of the node.
const PAUSE: Duration = Duration::from_secs(2);

/// The pause between two checks for the machine's certificate.
const CERTIFICATE_PAUSE: Duration = Duration::from_millis(200);

/// The agent of this machine's node.
pub(in crate::cli::portcullis) struct NodeAgent {
    bus: Bus,
    tls: ClientTls,
    host: Host,
}

impl NodeAgent {
    /// `tls` presents the machine's certificate, as soon as there is one.
    pub(super) fn new(bus: &str, tls: &ClientTls, is_managers_host: bool) -> anyhow::Result<Self> {
        let host = if is_managers_host { Host::Managers } else { Host::Other };
        Ok(Self { bus: Bus::parse(bus), tls: tls.clone(), host })
    }

    /// Runs until `stop` is set.
    pub(in crate::cli::portcullis) async fn run(
        self,
        tree: ZkTree,
        machine: MachineId,
        mut stop: watch::Receiver<bool>,
    ) {
        let ready = async {
            let name = name_of(&tree, machine).await;
            // The manager refuses an agent without a certificate, which may not be issued yet.
            while !self.tls.has_certificate().await {
                tokio::time::sleep(CERTIFICATE_PAUSE).await;
            }
            name
        };
        let name = tokio::select! {
            name = ready => name,
            () = stopped(&mut stop) => return,
        };
        info!(node = %name, bus = %self.bus, "systemd is controlled by the environment's manager");
        let (found, managers) = watch::channel(Vec::new());
        let (control, events) = Systemd::connect(self.bus.clone());
        let file = proxies_file(agents_dir(), &name);
        let settings = Settings {
            name,
            managers,
            security: Security::Tls { tls: self.tls, server_name: Some(MANAGER_CERTIFICATE.to_owned()) },
            heartbeat_interval: HEARTBEAT_INTERVAL,
            silence_limit: SILENCE_LIMIT,
            jitter: part_of,
        };
        tokio::select! {
            () = Agent::new(settings, control, events).with_proxies(self.bus, file).run(stop) => {}
            () = follow_manager(tree, self.host, found) => {}
        }
    }
}

/// Reads the name of the node. Repeats until it can be read.
async fn name_of(tree: &ZkTree, machine: MachineId) -> NodeName {
    let mut is_logged = false;
    loop {
        match read_node_name(tree, machine).await {
            Ok(name) => return name,
            Err(problem) if !is_logged => {
                warn!(%machine, %problem, "the name of the node cannot be read");
                is_logged = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}
