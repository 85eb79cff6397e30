//! The address of a manager: a TCP port or a unix socket. Pure.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::dbus::names::DEFAULT_PORT;

/// Where an agent or an operator connects to a manager.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ManagerAddress {
    /// A host name or an IP address, and a port.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid address of a manager; expected HOST:PORT or unix:PATH")]
pub struct BadAddress;

impl ManagerAddress {
    /// # Errors
    /// If `host` cannot be a host name or an IP address.
    pub fn tcp(host: &str, port: u16) -> Result<Self, BadAddress> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':' | '_' | '%');
        let valid = (1..=253).contains(&host.len()) && host.chars().all(allowed) && port != 0;
        valid.then(|| Self::Tcp { host: host.to_owned(), port }).ok_or(BadAddress)
    }

    /// Whether messages to this address stay on this host.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
            }
        }
    }

    /// Reads an address in D-Bus form, `tcp:host=HOST,port=PORT` or `unix:path=PATH`, or in the
    /// form of [`FromStr`].
    ///
    /// # Errors
    /// If it is neither.
    pub fn from_dbus(text: &str) -> Result<Self, BadAddress> {
        let values = |rest: &'static str| text.strip_prefix(rest).map(|rest| rest.split(','));
        let value = |mut of: std::str::Split<'_, char>, key: &str| {
            of.find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
        };
        if let Some(values) = values("tcp:").filter(|_| text.contains('=')) {
            let host = value(values.clone(), "host").ok_or(BadAddress)?;
            let port = value(values, "port").map_or(Ok(DEFAULT_PORT), |port| port.parse());
            return Self::tcp(&host, port.map_err(|_| BadAddress)?);
        }
        match values("unix:").and_then(|values| value(values, "path")) {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            Some(_) => Err(BadAddress),
            None => text.parse(),
        }
    }
}

impl FromStr for ManagerAddress {
    type Err = BadAddress;

    /// Reads `HOST`, `HOST:PORT`, `[ADDRESS]:PORT` or `unix:PATH`.
    fn from_str(text: &str) -> Result<Self, BadAddress> {
        if let Some(path) = text.strip_prefix("unix:") {
            let is_path = path.starts_with('/') && !path.contains('\0');
            return is_path.then(|| Self::Unix(path.into())).ok_or(BadAddress);
        }
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or(BadAddress)?)),
            None => match text.rsplit_once(':') {
                Some((host, port)) if !host.contains(':') => (host, Some(port)),
                // An IPv6 address without brackets.
                Some(_) => (text, None),
                None => (text, None),
            },
        };
        let port = port.map_or(Ok(DEFAULT_PORT), str::parse).map_err(|_| BadAddress)?;
        Self::tcp(host, port)
    }
}

impl fmt::Display for ManagerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        for (text, expected) in [
            ("192.0.2.1:99", Some("192.0.2.1:99")),
            ("manager.example", Some("manager.example:842")),
            ("[fd00::1]:99", Some("[fd00::1]:99")),
            ("[fd00::1]", Some("[fd00::1]:842")),
            ("fd00::1", Some("[fd00::1]:842")),
            ("unix:/run/manager", Some("unix:/run/manager")),
            ("tcp:host=10.0.0.1,port=99", Some("10.0.0.1:99")),
            ("tcp:port=99,host=fd00::1", Some("[fd00::1]:99")),
            ("tcp:host=a", Some("a:842")),
            ("unix:path=/run/manager,guid=1", Some("unix:/run/manager")),
            ("", None),
            (":99", None),
            ("a:0", None),
            ("a:b", None),
            ("a b:1", None),
            ("tcp:port=99", None),
            ("unix:run/manager", None),
            ("[fd00::1]99", None),
        ] {
            let read = ManagerAddress::from_dbus(text).ok().map(|address| address.to_string());
            assert_eq!(read.as_deref(), expected, "{text}");
        }
    }
}
