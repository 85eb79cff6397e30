//! The files of a machine's identity: its private key (mode 0600), which never leaves the machine,
//! its certificate and the CA certificate. Listeners and clients read them again when they change.

use std::io;
use std::path::{Path, PathBuf};

use crate::model::{MachineId, number_name};
use crate::net::tls::certificate::Certificate;
use crate::net::tls::key::PrivateKey;
use crate::net::tls::{IdentityFiles, MachineFiles};
use crate::runtime::atomic_file::{Privacy, create_new, remove_unfinished, replace};
use crate::runtime::trusted_file::{ReadError, read_secret, read_trusted};

/// Maximum size of each file.
const MAX_BYTES: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} holds no private key of the type ECDSA P-256; remove it to get a new key", .0.display())]
    BadKey(PathBuf),
    #[error("the certificate is not one for the private key in {}", .0.display())]
    OtherKey(PathBuf),
    #[error("cannot create a private key")]
    NoKey,
}

/// The directory with the files of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineIdentity {
    directory: PathBuf,
    name: String,
}

impl MachineIdentity {
    /// The directory must exist, and other users must not be able to write to it.
    pub fn new(directory: PathBuf, machine: MachineId) -> Self {
        Self { directory, name: number_name(machine) }
    }

    /// Returns the files of a listener that does not belong to a machine's agent.
    pub fn of_listener(directory: PathBuf, role: &str) -> Self {
        Self { directory, name: role.to_owned() }
    }

    /// Whether the saved CA certificate is this one (PEM).
    ///
    /// # Errors
    /// If the file cannot be read, or other users can write it.
    pub fn has_ca(&self, ca: &str) -> Result<bool, FilesError> {
        Ok(read_trusted(&self.ca(), MAX_BYTES)?.as_deref() == Some(ca.as_bytes()))
    }

    /// The certificate chain and the key, for a listener or a client.
    pub fn files(&self) -> IdentityFiles {
        let file = |suffix: &str| self.directory.join(format!("{}.{suffix}", self.name));
        IdentityFiles { certificates: file("pem"), key: file("key") }
    }

    /// The CA certificate.
    pub fn ca(&self) -> PathBuf {
        self.directory.join("ca.pem")
    }

    /// The files of a client that trusts the CA and presents the machine's certificate, as soon as
    /// there is one.
    pub fn machine_files(&self) -> MachineFiles {
        MachineFiles { ca: self.ca(), identity: self.files() }
    }

    /// Returns the machine's key, and creates it first if there is none.
    ///
    /// # Errors
    /// If the file can be neither read nor written, or other users can read it.
    pub fn ensure_key(&self) -> Result<PrivateKey, FilesError> {
        let path = self.files().key;
        remove_unfinished(&path);
        loop {
            if let Some(bytes) = read_secret(&path, MAX_BYTES)? {
                let text = String::from_utf8(bytes).map_err(|_| FilesError::BadKey(path.clone()))?;
                return PrivateKey::parse(&text).map_err(|_| FilesError::BadKey(path));
            }
            let key = PrivateKey::generate().map_err(|_| FilesError::NoKey)?;
            // If another process has created the file meanwhile, its key is used.
            create_new(&path, key.expose().as_bytes(), Privacy::Secret)
                .map_err(|source| FilesError::Write { path: path.clone(), source })?;
        }
    }

    /// Reads the present certificate, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read, or other users can write it.
    pub fn certificate(&self) -> Result<Option<Certificate>, FilesError> {
        let bytes = read_trusted(&self.files().certificates, MAX_BYTES)?;
        Ok(bytes.and_then(|bytes| Certificate::parse(&String::from_utf8_lossy(&bytes)).ok()))
    }

    /// Saves a certificate chain for the machine's key, whose last certificate is that of the CA.
    /// Equal files are not written. Returns whether one was written.
    ///
    /// # Errors
    /// If the certificate is for another key, or a file cannot be written.
    pub fn install(&self, chain: &str) -> Result<bool, FilesError> {
        let key = self.ensure_key()?;
        if !Certificate::parse(chain).is_ok_and(|certificate| key.matches(&certificate)) {
            return Err(FilesError::OtherKey(self.files().key));
        }
        let ca = chain.rfind("-----BEGIN").map_or(chain, |at| &chain[at..]);
        // The CA is written first, so that a process that reads the new certificate can verify its
        // peers.
        let is_new_ca = write_if_changed(&self.ca(), ca)?;
        Ok(write_if_changed(&self.files().certificates, chain)? || is_new_ca)
    }
}

fn write_if_changed(path: &Path, contents: &str) -> Result<bool, FilesError> {
    if read_trusted(path, MAX_BYTES)?.as_deref() == Some(contents.as_bytes()) {
        return Ok(false);
    }
    let written = replace(path, contents.as_bytes(), Privacy::Plain);
    written.map(|()| true).map_err(|source| FilesError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::net::tls::authority::{Authority, MACHINE_LIFETIME, Names, Validity};
    use crate::runtime::clock::wall_ms;

    #[test]
    fn key_and_certificates_are_saved_once() {
        let home = tempfile::tempdir().unwrap();
        let identity = MachineIdentity::new(home.path().to_owned(), MachineId::new(3));
        let key = identity.ensure_key().unwrap();
        assert_eq!(identity.ensure_key().unwrap(), key);
        let mode = std::fs::metadata(identity.files().key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(identity.certificate().unwrap(), None);
        let ca = Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
        let validity = Validity::starting(wall_ms(), MACHINE_LIFETIME);
        let chain = ca.issue_for(&key, &Names::of(["machine-3"]), validity).unwrap();
        assert!(identity.install(&chain).unwrap());
        assert!(!identity.install(&chain).unwrap(), "equal files are not written");
        assert_eq!(std::fs::read_to_string(identity.ca()).unwrap(), ca.certificate());
        assert_eq!(identity.certificate().unwrap().unwrap().names(), &Names::of(["machine-3"]));
        let other = ca.issue_for(&PrivateKey::generate().unwrap(), &Names::of(["machine-3"]), validity);
        for refused in [other.unwrap(), ca.certificate().to_owned(), String::new()] {
            assert!(matches!(identity.install(&refused), Err(FilesError::OtherKey(_))), "{refused}");
        }
        assert!(!identity.install(&chain).unwrap(), "a refused chain changes no file");
        std::fs::write(identity.files().key, "broken").unwrap();
        let refused = identity.ensure_key().unwrap_err().to_string();
        assert!(refused.contains("machine-3.key") && refused.contains("remove it"), "{refused}");
    }
}
