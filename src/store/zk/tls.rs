//! TLS connections to a store: the options of the client library, and the reason of a failed
//! handshake, which the client library does not report.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use zookeeper_client as zk;

use crate::net::tls::probe::{Probe, speaks_tls};
use crate::store::address::{Address, name_of};
use crate::store::tree::Error;

/// How long the search for the reason of a failure may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The certificates of connections to one store.
#[derive(Debug)]
pub(super) struct Options {
    client: zk::TlsOptions,
    probe: Probe,
}

impl Options {
    pub(super) fn of(address: &Address) -> Result<Self, Error> {
        let no_ca = || Error::NoCa { hosts: address.hosts() };
        let ca = address.ca().ok_or_else(no_ca)?;
        let bad = || Error::BadCa { hosts: address.hosts() };
        let client = zk::TlsOptions::new().with_pem_ca(ca).map_err(|_| bad())?;
        let probe = Probe::new(ca).ok_or_else(bad)?;
        Ok(Self { client, probe })
    }

    pub(super) fn of_client(&self) -> zk::TlsOptions {
        self.client.clone()
    }

    /// Returns why a TLS handshake with one of the hosts fails; `None` if none can be reached, or
    /// one succeeds.
    pub(super) async fn failure(&self, hosts: &str) -> Option<Error> {
        let probing = async {
            for host in hosts.split(',') {
                let Ok(stream) = TcpStream::connect(host).await else { continue };
                match self.probe.handshake(name_of(host), stream).await {
                    Ok(()) => return None,
                    Err(Some(why)) => {
                        return Some(Error::Tls { host: host.to_owned(), why });
                    }
                    Err(None) => {}
                }
            }
            None
        };
        timeout(PROBE_TIMEOUT, probing).await.ok().flatten()
    }
}

/// Returns why connections without TLS fail, if one of the hosts requires TLS.
pub(super) async fn plain_failure(hosts: &str) -> Option<Error> {
    let probing = async {
        for host in hosts.split(',') {
            let Ok(stream) = TcpStream::connect(host).await else { continue };
            if speaks_tls(name_of(host), stream).await {
                return Some(Error::TlsRequired { host: host.to_owned() });
            }
        }
        None
    };
    timeout(PROBE_TIMEOUT, probing).await.ok().flatten()
}
