//! Certificates and private keys in PEM files. Other users must not be able to change any of the
//! files, nor to read a key. [`Reloaded`] holds the configuration that was built from such files,
//! and builds it again when one of them changes.

use std::error::Error as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys, RootCertStore};
use tracing::{info, warn};

use crate::runtime::trusted_file::{ReadError, read_secret, read_trusted};

/// A certificate chain or a key has a few kilobytes.
const MAX_IDENTITY_BYTES: usize = 256 << 10;

/// More than the certificates of all public authorities.
const MAX_CA_BYTES: usize = 4 << 20;

/// The reason why TLS cannot be used with some files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot load TLS certificates")]
    Read(#[from] ReadError),
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    #[error("no certificate in PEM form in {}", .0.display())]
    NoCertificate(PathBuf),
    #[error("no private key in PEM form in {}", .0.display())]
    NoKey(PathBuf),
    #[error("the type of the private key in {} is not supported", .0.display())]
    UnsupportedKey(PathBuf),
    #[error(
        "the private key in {} does not match the certificate in {}",
        key.display(),
        certificates.display()
    )]
    KeyMismatch { key: PathBuf, certificates: PathBuf },
    #[error("no valid CA certificate in {}", .0.display())]
    BadCa(PathBuf),
    #[error("no trusted root certificates found on this system")]
    NoRoots,
}

/// The files of a server's or a client's own identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityFiles {
    /// The certificate chain, the own certificate first.
    pub certificates: PathBuf,
    pub key: PathBuf,
}

impl IdentityFiles {
    pub(super) fn read(&self, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
        let Self { certificates, key } = self;
        let chain = existing(read_trusted(certificates, MAX_IDENTITY_BYTES)?, certificates)?;
        let chain =
            parse_certificates(&chain).ok_or_else(|| TlsError::NoCertificate(certificates.clone()))?;
        let secret = existing(read_secret(key, MAX_IDENTITY_BYTES)?, key)?;
        let secret = PrivateKeyDer::from_pem_slice(&secret).map_err(|_| TlsError::NoKey(key.clone()))?;
        let secret = provider.key_provider.load_private_key(secret);
        let secret = secret.map_err(|_| TlsError::UnsupportedKey(key.clone()))?;
        let certified = CertifiedKey::new(chain, secret);
        // Other failures are no errors: clients accept certificates of the first X.509 version,
        // which rustls cannot read.
        match certified.keys_match() {
            Err(Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
                let (key, certificates) = (key.clone(), certificates.clone());
                Err(TlsError::KeyMismatch { key, certificates })
            }
            _ => Ok(certified),
        }
    }
}

/// Adds the CA certificates of a file. Every one of them has to be valid.
pub(super) fn add_ca_file(roots: &mut RootCertStore, path: &Path) -> Result<(), TlsError> {
    let bad = || TlsError::BadCa(path.to_owned());
    let pem = existing(read_trusted(path, MAX_CA_BYTES)?, path)?;
    for certificate in parse_certificates(&pem).ok_or_else(bad)? {
        roots.add(certificate).map_err(|_| bad())?;
    }
    Ok(())
}

fn existing(read: Option<Vec<u8>>, path: &Path) -> Result<Vec<u8>, TlsError> {
    read.ok_or_else(|| TlsError::Missing(path.to_owned()))
}

fn parse_certificates(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    found.ok().filter(|found| !found.is_empty())
}

/// Device, inode, size, and the times of the last changes in nanoseconds; none without a file.
type FileId = Option<(u64, u64, u64, [i64; 4])>;

fn file_id(path: &Path) -> FileId {
    let found = std::fs::metadata(path).ok()?;
    let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
    Some((found.dev(), found.ino(), found.size(), times))
}

fn file_ids(paths: &[&Path]) -> Vec<FileId> {
    paths.iter().map(|path| file_id(path)).collect()
}

/// A value that was built from files.
#[derive(Debug)]
pub(super) struct Reloaded<T>(Mutex<(Vec<FileId>, T)>);

impl<T: Clone> Reloaded<T> {
    pub(super) fn new(
        paths: &[&Path],
        build: impl FnOnce() -> Result<T, TlsError>,
    ) -> Result<Self, TlsError> {
        // Taken before the files are read: `get` sees a change that happens meanwhile.
        let ids = file_ids(paths);
        Ok(Self(Mutex::new((ids, build()?))))
    }

    /// Returns the value, and builds it again if a file has changed since the last call. Costs one
    /// `stat` for each file. If the changed files cannot be used, the old value stays, and a warning
    /// is logged once for each change.
    pub(super) fn get(&self, paths: &[&Path], build: impl FnOnce() -> Result<T, TlsError>) -> T {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (seen, value) = &mut *current;
        let ids = file_ids(paths);
        if *seen != ids {
            *seen = ids;
            match build() {
                Ok(built) => {
                    *value = built;
                    info!(?paths, "TLS certificates reloaded");
                }
                Err(error) => {
                    let cause = error.source().map(ToString::to_string);
                    warn!(%error, cause, "changed TLS certificates cannot be used; keeping the old ones");
                }
            }
        }
        value.clone()
    }
}
