//! A manager and three nodes, each on a machine of its own. The services are restarted at once when
//! they are killed.

use std::fs;
use std::sync::Arc;

use portcullis::fleet::policy::policy;

use crate::client::Client;
use crate::machine::{Machine, Network};

pub(crate) const NODES: [&str; 3] = ["n1", "n2", "n3"];

pub(crate) struct World {
    pub(crate) manager: Machine,
    pub(crate) nodes: Vec<Machine>,
    pub(crate) network: Arc<Network>,
}

impl World {
    /// Boots the machines, and waits until all nodes are online.
    pub(crate) async fn start() -> Self {
        let world = Self::without_agents("--allow-plain-tcp", |_| {});
        for name in NODES {
            world.start_agent(name, "--allow-plain-tcp");
        }
        let client = world.client().await;
        for name in NODES {
            client.until(name, "online").await;
        }
        world
    }

    /// Boots the machines, and starts the manager with these options. Its files have been written
    /// before that. It also has a node `absent`, which no agent registers.
    pub(crate) fn without_agents(options: &str, write_files: impl Fn(&Machine)) -> Self {
        let network = Arc::new(Network::new());
        let mut machines = Machine::boot_all(&network, &["manager", "n1", "n2", "n3"]);
        let nodes = machines.split_off(1);
        let manager = machines.remove(0);
        write_files(&manager);
        let config = "[hirte]\nAllowedNodeNames=n1,n2,n3,absent\n[node n1]\nAllowDependenciesOn=n2\n\
                      [node n3]\nAllowDependenciesOn=n2\n";
        fs::write(manager.file("manager.ini"), config).unwrap();
        let bus = format!("/proc/{}/root/etc/dbus-1/system.d/hirte.conf", manager.systemd());
        fs::write(bus, policy(None)).unwrap();
        manager.run(&["systemctl", "reload", "dbus.service"]);
        let command = format!(
            "portcullis manager --config /run/node/manager.ini --listen {}:842 {options}",
            manager.address()
        );
        manager.install("manager.service", &service(&command));
        Self { manager, nodes, network }
    }

    /// Starts the agent of a node with these options.
    pub(crate) fn start_agent(&self, name: &str, options: &str) {
        let to = self.manager.address();
        let command = format!("portcullis agent --name {name} --manager {to}:842 {options}");
        self.node(name).install("agent.service", &service(&command));
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.manager.bus()).await
    }

    /// Returns a node by its name.
    pub(crate) fn node(&self, name: &str) -> &Machine {
        &self.nodes[NODES.iter().position(|node| *node == name).unwrap()]
    }
}

pub(crate) fn service(command: &str) -> String {
    format!(
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=/opt/portcullis/{command}\n\
         Environment=XDG_DATA_HOME=/var/lib\n\
         Restart=always\nRestartSec=0\n[Install]\nWantedBy=multi-user.target\n"
    )
}
