//! The address of a store as people write it: `[tls://]HOST[:PORT][,HOST[:PORT]...][/CHROOT]`, and
//! the CA certificate that its servers are verified with. Pure.

use super::tree::Error;
use crate::net::tls::peer::is_server_name;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Before a host: connections to the store use TLS.
const TLS: &str = "tls://";
const DEFAULT_PORT: u16 = 2181;
const MAX_HOSTS: usize = 32;
const MAX_LENGTH: usize = 4096;

/// Hosts of one ensemble, and the znode in it that is the root of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// `HOST:PORT` each, never empty.
    hosts: Vec<String>,
    /// `/a/b`, or empty.
    chroot: String,
    is_tls: bool,
    /// The CA of the servers' certificates in PEM form. It is not part of the written address.
    ca: Option<Arc<str>>,
}

impl Address {
    /// `HOST:PORT,HOST:PORT`, without the chroot.
    pub fn hosts(&self) -> String {
        self.hosts.join(",")
    }

    /// Whether connections use TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// The CA of the servers' certificates in PEM form.
    pub fn ca(&self) -> Option<&str> {
        self.ca.as_deref()
    }

    /// The same address with the CA (PEM) of its servers' certificates.
    #[must_use]
    pub fn with_ca(self, ca: Option<&str>) -> Self {
        Self { ca: ca.map(Arc::from), ..self }
    }

    /// The ports that the store is served on.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        self.hosts.iter().filter_map(|host| host.rsplit_once(':')?.1.parse().ok())
    }

    /// The ports of hosts that are not loopback.
    pub fn network_ports(&self) -> impl Iterator<Item = u16> {
        let hosts = self.hosts.iter().filter(|host| !is_loopback(host));
        hosts.filter_map(|host| host.rsplit_once(':')?.1.parse().ok())
    }

    /// Whether every host is a loopback address or name.
    pub fn is_loopback(&self) -> bool {
        self.hosts.iter().all(|host| is_loopback(host))
    }

    /// The chroot, empty if there is none; never ends in a slash.
    pub fn chroot(&self) -> &str {
        &self.chroot
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", if self.is_tls { TLS } else { "" }, self.hosts(), self.chroot)
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |reason| Error::BadAddress { given: text.chars().take(80).collect(), reason };
        if text.len() > MAX_LENGTH {
            return Err(bad("it is too long"));
        }
        if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(bad("it has blanks or control characters"));
        }
        // ZooKeeper's clients repeat the scheme before every host; once is enough here.
        let is_tls = text.starts_with(TLS);
        let bare = if is_tls { text[TLS.len()..].replace(",tls://", ",") } else { text.to_owned() };
        if bare.contains("://") {
            return Err(bad("the scheme is not tls://, or only some hosts have it"));
        }
        let (hosts, chroot) = bare.split_at(bare.find('/').unwrap_or(bare.len()));
        let hosts: Vec<String> = hosts.split(',').map(parse_host).collect::<Result<_, _>>().map_err(bad)?;
        // The client library panics if it cannot verify a host.
        if is_tls && !hosts.iter().all(|host| is_server_name(name_of(host))) {
            return Err(bad("no certificate can be valid for a host"));
        }
        if hosts.len() > MAX_HOSTS {
            return Err(bad("it has too many hosts"));
        }
        Ok(Self { hosts, chroot: parse_chroot(chroot).map_err(bad)?.to_owned(), is_tls, ca: None })
    }
}

/// `HOST:PORT` without the port and without the brackets of an IPv6 address.
pub fn name_of(host: &str) -> &str {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
}

/// Whether `HOST:PORT` is on loopback.
fn is_loopback(host: &str) -> bool {
    let name = name_of(host);
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn parse_host(text: &str) -> Result<String, &'static str> {
    let (host, port) = match text.rfind(']') {
        Some(end) if text.starts_with('[') => {
            let (host, rest) = text.split_at(end + 1);
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err("something follows the brackets"),
            }
        }
        _ => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() || host == "[]" {
        return Err("a host is missing");
    }
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) if port.bytes().all(|b| b.is_ascii_digit()) => match port.parse() {
            Ok(port) if port > 0 => port,
            _ => return Err("a port is not from 1 to 65535"),
        },
        Some(_) => return Err("a port is not a number"),
    };
    Ok(format!("{host}:{port}"))
}

fn parse_chroot(text: &str) -> Result<&str, &'static str> {
    if text.is_empty() || text == "/" {
        return Ok("");
    }
    let wrong = |part: &str| part.is_empty() || part == "." || part == "..";
    if text[1..].split('/').any(wrong) || text.contains(',') {
        return Err("what follows the hosts is not a znode path");
    }
    if text == "/zookeeper" || text.starts_with("/zookeeper/") {
        return Err("/zookeeper belongs to the store itself");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_like_those_of_zookeeper_clients() {
        for (text, hosts, chroot) in [
            ("127.0.0.1", "127.0.0.1:2181", ""),
            ("a:1,b:2,c", "a:1,b:2,c:2181", ""),
            ("a:1/", "a:1", ""),
            ("a:1,b:2/juju/prod", "a:1,b:2", "/juju/prod"),
            ("[::1]:2182/x", "[::1]:2182", "/x"),
            ("[::1]", "[::1]:2181", ""),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.hosts().as_str(), address.chroot()), (hosts, chroot), "{text}");
            assert_eq!(address.to_string().parse::<Address>(), Ok(address.clone()));
            assert!(!address.is_tls());
        }
    }

    #[test]
    fn scheme_before_the_first_host_holds_for_all() {
        for text in ["tls://a:1,b:2/juju", "tls://a:1,tls://b:2/juju"] {
            let address: Address = text.parse().unwrap();
            assert!(address.is_tls());
            assert_eq!((address.hosts().as_str(), address.chroot()), ("a:1,b:2", "/juju"));
            assert_eq!(address.to_string(), "tls://a:1,b:2/juju");
        }
        let address: Address = "tls://[::1]".parse().unwrap();
        assert_eq!(address.to_string(), "tls://[::1]:2181");
        assert_eq!(address.ca(), None);
        assert_eq!(address.with_ca(Some("PEM")).ca(), Some("PEM"));
    }

    #[test]
    fn only_loopback_names_and_addresses_are_local() {
        for (text, loopback) in
            [("127.0.0.1:1,localhost", true), ("[::1]:5", true), ("127.0.0.1,10.0.0.1", false), ("zk", false)]
        {
            assert_eq!(text.parse::<Address>().unwrap().is_loopback(), loopback, "{text}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused_with_a_reason() {
        for (text, reason) in [
            ("", "a host is missing"),
            ("tls://", "a host is missing"),
            ("https://a", "the scheme is not tls://, or only some hosts have it"),
            ("a:1,tls://b:2", "the scheme is not tls://, or only some hosts have it"),
            ("a,,b", "a host is missing"),
            ("/x", "a host is missing"),
            (":2181", "a host is missing"),
            ("a:0", "a port is not from 1 to 65535"),
            ("a:65536", "a port is not from 1 to 65535"),
            ("a:", "a port is not from 1 to 65535"),
            ("a:b", "a port is not a number"),
            ("[::1]x", "something follows the brackets"),
            ("a b", "it has blanks or control characters"),
            ("a:1/x//y", "what follows the hosts is not a znode path"),
            ("a:1/x/", "what follows the hosts is not a znode path"),
            ("a:1/../x", "what follows the hosts is not a znode path"),
            ("a:1/zookeeper/quota", "/zookeeper belongs to the store itself"),
            ("tls://127.1:2181", "no certificate can be valid for a host"),
            ("tls://a:1,[fe80::1%eth0]:2181", "no certificate can be valid for a host"),
            ("tls://a..b", "no certificate can be valid for a host"),
            ("tls://a b", "it has blanks or control characters"),
        ] {
            let refusal = text.parse::<Address>().unwrap_err().to_string();
            assert_eq!(refusal, format!("'{text}' is not the address of a store: {reason}"));
        }
        for text in ["127.1:2181", "[fe80::1%eth0]:2181", "tls://127.0.0.1", "tls://[fe80::1]", "tls://a_b.c"]
        {
            assert!(text.parse::<Address>().is_ok(), "{text}");
        }
        assert!("a".repeat(5000).parse::<Address>().unwrap_err().to_string().len() < 200);
    }
}
