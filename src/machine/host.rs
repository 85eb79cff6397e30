//! The host name and the addresses of this machine, for the report of its agent. The address that
//! reaches the store comes first, since the operator and other machines are likely to be on the
//! same network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;
use tracing::warn;

use crate::model::HostAddress;
use crate::store::Address;
use crate::store::acl::Acl;
use crate::store::records::Host;

/// The time to resolve the store's host names.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

/// How an agent reports its host.
#[derive(Debug, Clone)]
pub struct HostReport {
    /// The ACL of the report.
    pub acl: Acl,
    /// Addresses from the command line; empty to report those of the network interfaces.
    pub given: Vec<HostAddress>,
    /// The address that this machine reaches its store from.
    pub preferred: Option<IpAddr>,
}

impl HostReport {
    /// Reads the host name and the addresses as they are now.
    pub fn read(&self) -> Host {
        let uname = rustix::system::uname();
        let hostname = uname.nodename().to_string_lossy();
        if !self.given.is_empty() {
            return Host::new(&hostname, self.given.clone());
        }
        let addresses = reachable_addresses(self.preferred);
        Host::new(&hostname, addresses.into_iter().map(HostAddress::from))
    }
}

/// Returns the addresses at which other machines may reach this one, `preferred` first.
pub fn reachable_addresses(preferred: Option<IpAddr>) -> Vec<IpAddr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_else(|error| {
        warn!(%error, "cannot read the addresses of network interfaces");
        Vec::new()
    });
    let found = interfaces.into_iter().map(|interface| interface.ip());
    sorted(found.collect(), preferred)
}

/// Returns the addresses that other machines may reach this one at, the most useful first: the
/// preferred one, then IPv4 before IPv6, as the system listed them.
fn sorted(found: Vec<IpAddr>, preferred: Option<IpAddr>) -> Vec<IpAddr> {
    let mut usable: Vec<IpAddr> = found.into_iter().filter(|address| is_reachable(*address)).collect();
    usable.sort_by_key(|address| (Some(*address) != preferred, address.is_ipv6()));
    usable.dedup();
    usable
}

/// Whether the address has a meaning beyond this machine and its links.
fn is_reachable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    }
}

/// Returns the address that this machine reaches its store from. No packet is sent.
pub async fn address_toward(store: &Address) -> Option<IpAddr> {
    let resolve = async {
        for host in store.hosts().split(',') {
            for target in tokio::net::lookup_host(host).await.into_iter().flatten() {
                if let Some(source) = source_address(target).await {
                    return Some(source);
                }
            }
        }
        None
    };
    tokio::time::timeout(RESOLVE_TIMEOUT, resolve).await.ok().flatten()
}

async fn source_address(target: SocketAddr) -> Option<IpAddr> {
    let any = match target {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).await.ok()?;
    socket.connect(target).await.ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_toward_the_store_comes_first_and_loopback_is_left_out() {
        let found = ["127.0.0.1", "2001:db8::7", "192.0.2.7", "10.0.0.7", "::1", "fe80::1", "169.254.0.1"];
        let found: Vec<IpAddr> = found.map(|text| text.parse().unwrap()).to_vec();
        for (preferred, expected) in [
            (None, ["192.0.2.7", "10.0.0.7", "2001:db8::7"]),
            (Some("10.0.0.7"), ["10.0.0.7", "192.0.2.7", "2001:db8::7"]),
            (Some("2001:db8::7"), ["2001:db8::7", "192.0.2.7", "10.0.0.7"]),
            (Some("127.0.0.1"), ["192.0.2.7", "10.0.0.7", "2001:db8::7"]),
        ] {
            let preferred = preferred.map(|text| text.parse().unwrap());
            let addresses = sorted(found.clone(), preferred);
            let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            assert_eq!(shown, expected, "{preferred:?}");
        }
    }

    #[tokio::test]
    async fn a_local_store_is_reached_from_a_loopback_address() {
        let store: Address = "127.0.0.1:9".parse().unwrap();
        assert_eq!(address_toward(&store).await, Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let given = vec!["web1.example.com".parse().unwrap()];
        let acl = crate::store::Credential::parse("machine:x").unwrap().identity();
        let roles = crate::store::acl::Roles { operator: acl.clone(), controller: acl.clone() };
        let report = HostReport { acl: roles.machine_host(&acl), given: given.clone(), preferred: None };
        assert_eq!(report.read().addresses, given);
        assert!(!report.read().hostname.is_empty());
    }
}
