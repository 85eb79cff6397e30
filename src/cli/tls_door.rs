//! A door that speaks TLS beside a plain one: how it is asked for, and the files that it takes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::file;
use crate::keeper::tls::{self, Clients};

/// A chain of certificates is some kilobytes.
const MAX_PEM_BYTES: usize = 256 << 10;

#[derive(Debug, Clone, Args)]
pub(super) struct TlsDoor {
    /// Address to serve TLS on as well, for clients that want it
    #[arg(long, value_name = "ADDR", requires_all = ["tls_cert", "tls_key"])]
    tls_listen: Option<SocketAddr>,
    /// Certificates in PEM form, the server's own first
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate in PEM form; no one else may be able to read the file
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_key: Option<PathBuf>,
}

impl TlsDoor {
    /// Where it is and what is served with there, if it was asked for. `authority` is that of clients' certificates.
    pub(super) fn read(
        &self,
        authority: Option<&Path>,
        clients: Clients,
    ) -> anyhow::Result<Option<(SocketAddr, tls::Config)>> {
        let (Some(listen), Some(cert), Some(key)) = (self.tls_listen, &self.tls_cert, &self.tls_key) else {
            return Ok(None);
        };
        let certificates = present(file::read_trusted(cert, MAX_PEM_BYTES)?, cert)?;
        let secret = present(file::read_secret(key, MAX_PEM_BYTES)?, key)?;
        let read = |path| present(file::read_trusted(path, MAX_PEM_BYTES)?, path);
        let trusted = authority.map(read).transpose()?;
        let config = tls::server_config(&certificates, &secret, trusted.as_deref(), clients);
        let config = config.with_context(|| {
            let authority = authority.map(|path| format!(" for clients of {}", path.display()));
            let (cert, key) = (cert.display(), key.display());
            format!("cannot serve TLS with {cert} and {key}{}", authority.unwrap_or_default())
        })?;
        Ok(Some((listen, config)))
    }
}

fn present(read: Option<Vec<u8>>, path: &Path) -> anyhow::Result<Vec<u8>> {
    read.with_context(|| format!("there is no file {}", path.display()))
}
