//! Whether a listener uses TLS: on loopback it does not, and on other addresses only if plain text
//! was asked for. Pure.

use std::net::SocketAddr;

use clap::Args;

/// The flag of every command that listens on an address.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(in crate::cli) struct PlainArgs {
    /// Serve plain text, not TLS, on addresses that are not loopback. Secrets can then be read from
    /// the network
    #[arg(long)]
    allow_plain_tcp: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum Transport {
    /// On loopback.
    Local,
    /// Asked for with `--allow-plain-tcp`.
    AllowedPlain,
    Tls,
}

impl PlainArgs {
    pub(in crate::cli) fn transport(self, listen: SocketAddr) -> Transport {
        if is_loopback(listen) {
            Transport::Local
        } else if self.allow_plain_tcp {
            Transport::AllowedPlain
        } else {
            Transport::Tls
        }
    }
}

pub(in crate::cli) fn is_loopback(listen: SocketAddr) -> bool {
    listen.ip().to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_plain_unless_asked_for() {
        for (listen, default, allowed) in [
            ("127.0.0.1:1", Transport::Local, Transport::Local),
            ("[::1]:1", Transport::Local, Transport::Local),
            ("[::ffff:127.0.0.1]:1", Transport::Local, Transport::Local),
            ("0.0.0.0:1", Transport::Tls, Transport::AllowedPlain),
            ("[::]:1", Transport::Tls, Transport::AllowedPlain),
            ("10.0.0.1:1", Transport::Tls, Transport::AllowedPlain),
            ("[fd00::1]:1", Transport::Tls, Transport::AllowedPlain),
        ] {
            let transport =
                |allow_plain_tcp| PlainArgs { allow_plain_tcp }.transport(listen.parse().unwrap());
            assert_eq!((transport(false), transport(true)), (default, allowed), "{listen}");
        }
    }
}
