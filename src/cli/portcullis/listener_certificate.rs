//! The certificate of a listener that is not on loopback, in `DATA/identity/ROLE.pem`. It is issued
//! with the key of the environment's authority on this host, for the names and addresses of the
//! host, and renewed while the process runs. Listeners read the file again when it changes.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use tracing::info;

use crate::cli::authority::issue_if_due;
use crate::cli::portcullis::issuer::check_hourly;
use crate::identity::files::MachineIdentity;
use crate::net::tls::authority::{Authority, Names};
use crate::net::tls::{ClientAuth, ServerFiles, ServerTls};
use crate::runtime::clock::utc;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::runtime::trusted_path;

pub(super) struct ListenerCertificate {
    files: MachineIdentity,
    role: &'static str,
    listen: SocketAddr,
    /// Further DNS names and addresses.
    more: Vec<String>,
    authority: Authority,
}

impl ListenerCertificate {
    /// Prepares the directory for the files, below the data directory.
    pub(super) fn new(
        authority: Authority,
        data: &Path,
        (role, listen): (&'static str, SocketAddr),
        more: &[String],
    ) -> anyhow::Result<Self> {
        let directory = data.join("identity");
        trusted_path::ensure_directory(&directory, 0o700)
            .with_context(|| format!("cannot use directory {}", directory.display()))?;
        let files = MachineIdentity::of_listener(directory, role);
        Ok(Self { files, role, listen, more: more.to_vec(), authority })
    }

    /// Issues the certificate if it is missing, due for renewal, or not for the present names, and
    /// returns the configuration of the listener. Clients may present certificates of the
    /// environment's CA.
    pub(super) fn ensure(&self) -> anyhow::Result<ServerTls> {
        self.renew()?;
        let client_ca = Some((self.files.ca(), ClientAuth::Optional));
        let tls = ServerTls::load(ServerFiles { identity: self.files.files(), client_ca });
        tls.with_context(|| format!("cannot serve TLS on {}", self.listen))
    }

    fn renew(&self) -> anyhow::Result<()> {
        let names = self.names();
        if let Some(validity) = issue_if_due(&self.files, &self.authority, &names)? {
            let until = utc(validity.until_ms);
            info!(role = self.role, %names, until, "certificate of the listener issued");
        }
        Ok(())
    }

    /// The names that clients may use for this host.
    fn names(&self) -> Names {
        let uname = rustix::system::uname();
        let host = uname.nodename().to_string_lossy().into_owned();
        let fixed = [self.role, "localhost", "127.0.0.1", "::1", &host].map(str::to_owned);
        let listen = Some(self.listen.ip()).filter(|ip| !ip.is_unspecified());
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        let addresses = interfaces.iter().map(if_addrs::Interface::ip).chain(listen);
        let addresses = addresses.map(|ip| ip.to_canonical().to_string());
        Names::of(fixed.into_iter().chain(addresses).chain(self.more.iter().cloned())).without_invalid()
    }

    /// Keeps the certificate valid while the process runs.
    pub(super) fn start_renewal(self, service: &mut Service<anyhow::Error>) {
        service.start(self.role, OnEnd::Continue, |mut stop| async move {
            tokio::select! {
                () = stopped(&mut stop) => Ok(()),
                never = check_hourly(self.role, || self.renew()) => match never {},
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::key::PrivateKey;
    use crate::runtime::clock::wall_ms;

    #[test]
    fn a_certificate_is_issued_once_for_the_names_of_the_host() {
        let home = tempfile::tempdir().unwrap();
        let authority = || Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
        let of = |authority, more: &[&str]| {
            let more: Vec<String> = more.iter().map(|name| (*name).to_owned()).collect();
            let listen = "192.0.2.1:1".parse().unwrap();
            ListenerCertificate::new(authority, home.path(), ("keeper", listen), &more).unwrap()
        };
        let first = of(authority(), &[]);
        first.ensure().unwrap();
        let made = first.files.certificate().unwrap().unwrap();
        let wanted = Names::of(["keeper", "localhost", "127.0.0.1", "::1", "192.0.2.1"]);
        assert_eq!(wanted.first_outside(made.names()), None);
        first.ensure().unwrap();
        assert_eq!(first.files.certificate().unwrap().unwrap(), made, "converged");
        let again = Authority::load(first.authority.certificate(), first.authority.key()).unwrap();
        let renamed = of(again, &["store.example", "198.51.100.7"]);
        renamed.ensure().unwrap();
        let names = renamed.files.certificate().unwrap().unwrap().names().clone();
        assert_eq!(Names::of(["store.example", "198.51.100.7"]).first_outside(&names), None);
        let other = of(authority(), &["store.example", "198.51.100.7"]);
        other.ensure().unwrap();
        assert_eq!(std::fs::read_to_string(other.files.ca()).unwrap(), other.authority.certificate());
    }
}
