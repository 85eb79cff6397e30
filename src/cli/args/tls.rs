//! The flags of a TLS listener beside a plain one. `net::tls` reads the files.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use crate::net::tls::{ClientAuth, IdentityFiles, ServerFiles, ServerTls};

#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct TlsArgs {
    /// Additional address to listen on with TLS
    #[arg(long, value_name = "ADDR", requires_all = ["tls_cert", "tls_key"])]
    tls_listen: Option<SocketAddr>,
    /// Certificate chain (PEM), the server's certificate first
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM); the file must not be readable by other users
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_key: Option<PathBuf>,
}

impl TlsArgs {
    /// Whether there is a TLS listener beside the plain one.
    pub(in crate::cli) fn is_given(&self) -> bool {
        self.tls_listen.is_some()
    }

    /// Returns the address and the certificates of the TLS listener, if there is one. `client_ca`
    /// is the CA of clients' certificates.
    pub(in crate::cli) fn load(
        &self,
        client_ca: Option<&Path>,
        auth: ClientAuth,
    ) -> anyhow::Result<Option<(SocketAddr, ServerTls)>> {
        let (Some(listen), Some(cert), Some(key)) = (self.tls_listen, &self.tls_cert, &self.tls_key) else {
            return Ok(None);
        };
        let identity = IdentityFiles { certificates: cert.clone(), key: key.clone() };
        let client_ca = client_ca.map(|path| (path.to_owned(), auth));
        let tls = ServerTls::load(ServerFiles { identity, client_ca });
        Ok(Some((listen, tls.with_context(|| format!("cannot serve TLS on {listen}"))?)))
    }
}
