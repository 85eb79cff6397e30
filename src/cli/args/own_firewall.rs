//! Options for a machine's own firewall, for `machine`, `up` and `demo`: which rules it manages,
//! and the ports that stay open.

use std::net::SocketAddr;

use clap::ValueEnum;
use portcullis_provider::rule::{Protocol, Rule};

use crate::cli::args::agent::AgentArgs;
use crate::cli::args::listen::is_loopback;
use crate::cli::args::metrics::MetricsArgs;
use crate::cli::error::{Usage, parse_arg};
use crate::model::{PortRange, ports};
use crate::store::Address;

const SSH: u16 = 22;

/// Options for the machine's own firewall.
#[derive(Debug, Clone, clap::Args)]
pub(in crate::cli) struct FirewallArgs {
    /// Firewall of this machine [default: dry-run for `up`, none for `machine`]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(in crate::cli) firewall: Option<Kind>,
    /// Port that always stays open: PORT[-PORT][/PROTOCOL][@CIDR], to everyone or to the block of
    /// addresses; may be repeated. ssh, the store's ports and those of this process stay open to
    /// everyone, unless they are named with a block. Ports on loopback are not opened
    #[arg(long, value_name = "PORT")]
    protect: Vec<String>,
    /// Other listeners in the same process.
    #[arg(skip)]
    listeners: Vec<SocketAddr>,
    #[command(flatten)]
    pub(in crate::cli) agent_args: AgentArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Kind {
    /// Do not manage the firewall
    None,
    /// Report what nftables would open and close, without changing it
    DryRun,
    /// Accept requested ports with nftables and reject all others
    Nftables,
    /// Accept requested ports with nftables and leave the rest to other rules
    NftablesAcceptOnly,
}

impl FirewallArgs {
    /// Refuses invalid values before anything is changed.
    pub(in crate::cli) fn check(&self) -> anyhow::Result<()> {
        self.protected(&"127.0.0.1".parse()?).map(drop)
    }

    pub(in crate::cli) fn metrics(&self) -> &MetricsArgs {
        &self.agent_args.metrics
    }

    /// Adds listeners in the same process.
    pub(in crate::cli) fn beside(self, listeners: Vec<SocketAddr>) -> Self {
        FirewallArgs { listeners, ..self }
    }

    /// Returns the ports of the store and of this process.
    pub(in crate::cli) fn ports(&self, store: &Address) -> impl Iterator<Item = u16> {
        let listeners = self.agent_args.metrics.address().into_iter().chain(self.listeners.iter().copied());
        store.ports().chain(listeners.map(|listen| listen.port()))
    }

    /// Returns the ports that are open to everyone, and those that are open to a source. Listeners
    /// on loopback cannot be reached from the network.
    pub(in crate::cli) fn protected(&self, store: &Address) -> anyhow::Result<(Vec<PortRange>, Vec<Rule>)> {
        let listeners = self.agent_args.metrics.address().into_iter().chain(self.listeners.iter().copied());
        let listeners = listeners.filter(|listen| !is_loopback(*listen)).map(|listen| listen.port());
        let own = std::iter::once(SSH).chain(store.network_ports()).chain(listeners);
        let (mut open, mut limited) = (Vec::new(), Vec::new());
        for text in &self.protect {
            match text.split_once('@') {
                None => open.push(ports::parse_argument(text).map_err(Usage::new)?),
                Some((ports, source)) => {
                    let ports = ports::parse_argument(ports).map_err(Usage::new)?;
                    limited.push(Rule::new(ports, parse_arg(source)?));
                }
            }
        }
        open.retain(|ports| !limited.iter().any(|rule: &Rule| rule.ports == *ports));
        let is_limited = |port: u16| limited.iter().any(|rule| rule.ports.contains(port, Protocol::Tcp));
        let own = own.filter(|port| !is_limited(*port));
        let own = own.map(|port| PortRange::single(port, Protocol::Tcp).map_err(Usage::new));
        let all = own.chain(open.into_iter().map(Ok)).collect::<Result<Vec<_>, _>>()?;
        Ok((all, limited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(firewall: Kind, protect: &[&str]) -> FirewallArgs {
        let agent_args = AgentArgs { resync: 60, policy: None, metrics: MetricsArgs::default() };
        let protect = protect.iter().map(|&text| text.to_owned()).collect();
        FirewallArgs { firewall: Some(firewall), protect, listeners: Vec::new(), agent_args }
    }

    #[test]
    fn ssh_the_store_and_protected_ports_stay_open() {
        let store: Address = "127.0.0.1:4711,zk2:2182/prod".parse().unwrap();
        let words = |own: &FirewallArgs| -> Vec<String> {
            own.protected(&store).unwrap().0.iter().map(ToString::to_string).collect()
        };
        assert_eq!(words(&own(Kind::Nftables, &[])), ["22/tcp", "2182/tcp"], "loopback is left out");
        let more = words(&own(Kind::Nftables, &["51820/udp", "9100-9110"]));
        assert_eq!(more[2..], ["51820/udp", "9100-9110/tcp"]);
        let listeners = ["10.0.0.1:9400", "127.0.0.1:9401", "0.0.0.0:9402"].map(|text| text.parse().unwrap());
        let beside = own(Kind::Nftables, &[]).beside(listeners.to_vec());
        assert_eq!(words(&beside)[2..], ["9400/tcp", "9402/tcp"]);
        // A port with a source is not open to everyone, also if it would be without the flag.
        let limited = own(Kind::Nftables, &["22@192.0.2.0/24", "22@2001:db8::/32", "53/udp@10.0.0.0/8"]);
        assert_eq!(words(&limited), ["2182/tcp"]);
        let (_, from) = limited.protected(&store).unwrap();
        let from: Vec<String> = from.iter().map(|rule| format!("{} {}", rule.ports, rule.source)).collect();
        // A range limits the ports in it, and leaves a range that was asked for without a source.
        let range = own(Kind::Nftables, &["2181-2182@10.0.0.0/8", "20-30/udp@10.0.0.0/8", "2100-2300"]);
        assert_eq!(words(&range), ["22/tcp", "2100-2300/tcp"]);
        assert_eq!(from, ["22/tcp 192.0.2.0/24", "22/tcp 2001:db8::/32", "53/udp 10.0.0.0/8"]);
        for bad in ["22@", "@10.0.0.0/8", "22@everyone", "22@10.0.0.0/8@10.0.0.0/8"] {
            assert!(own(Kind::Nftables, &[bad]).check().is_err(), "{bad}");
        }
        let refused = own(Kind::None, &["eighty"]).check().unwrap_err();
        assert!(refused.is::<Usage>(), "{refused}");
    }
}
