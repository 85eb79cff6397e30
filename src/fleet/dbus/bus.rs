//! The choice of a message bus, and the connection to it.

use std::fmt;
use std::time::Duration;

use zbus::Connection;
use zbus::connection::Builder;

/// A message bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bus {
    System,
    /// The bus of the user's session.
    User,
    /// A D-Bus address, for example `unix:path=/run/user/1000/bus`.
    Address(String),
}

impl Bus {
    /// Parses `system`, `user` or an address. Addresses are checked when they are used.
    pub fn parse(text: &str) -> Self {
        match text {
            "system" => Self::System,
            "user" => Self::User,
            address => Self::Address(address.to_owned()),
        }
    }

    /// Connects to the bus. Calls on the connection fail after `reply_timeout`.
    ///
    /// # Errors
    /// If the address is invalid or the bus is not reachable.
    pub async fn connect(&self, reply_timeout: Duration) -> zbus::Result<Connection> {
        self.builder().method_timeout(reply_timeout).build().await
    }

    /// Connects to the bus for calls that may take any time.
    ///
    /// # Errors
    /// If the address is invalid or the bus is not reachable.
    pub async fn connect_without_limit(&self) -> zbus::Result<Connection> {
        self.builder().build().await
    }

    fn builder(&self) -> Builder<'_> {
        match self {
            Self::System => Builder::system(),
            Self::User => Builder::session(),
            Self::Address(address) => Builder::address(address.as_str()),
        }
    }
}

impl fmt::Display for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("the system bus"),
            Self::User => f.write_str("the user's bus"),
            Self::Address(address) => write!(f, "the bus at {address}"),
        }
    }
}
