//! A certificate authority for tests, and the certificates that it issues. Each test binary that
//! uses TLS includes this file; checks do not belong here.

// Every test binary compiles this file separately, and none uses all of it.
#![allow(dead_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use portcullis::net::tls::IdentityFiles;
use portcullis::net::tls::authority::{Authority, MACHINE_LIFETIME, Names, Validity};
use portcullis::net::tls::key::PrivateKey;
use portcullis::runtime::clock::wall_ms;
use rcgen::{CertificateParams, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub(crate) struct TestCa(Authority);

/// A certificate with its chain, and its key.
pub(crate) type TestIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl TestCa {
    pub(crate) fn new() -> Self {
        let key = PrivateKey::generate().expect("a key");
        Self(Authority::create("test", &key, wall_ms()).expect("a CA"))
    }

    /// Returns the certificate of the CA as PEM.
    pub(crate) fn pem(&self) -> &str {
        self.0.certificate()
    }

    pub(crate) fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.pem().as_bytes()).expect("PEM")
    }

    /// Returns a certificate with its chain, and its key, all PEM.
    pub(crate) fn issue(&self, names: &[&str]) -> (String, String) {
        let key = PrivateKey::generate().expect("a key");
        let validity = Validity::starting(wall_ms(), MACHINE_LIFETIME);
        let chain = self.0.issue_for(&key, &Names::of(names), validity).expect("a certificate");
        (chain, key.expose().to_owned())
    }

    /// Returns a certificate with its chain, and its key, in the form that rustls takes.
    pub(crate) fn issue_der(&self, names: &[&str]) -> TestIdentity {
        let (chain, key) = self.issue(names);
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).map(|item| item.expect("PEM"));
        (chain.collect(), PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("PEM"))
    }

    /// Like [`issue_der`](Self::issue_der), also for names that an environment's authority refuses,
    /// for example `*.rack`: operators can use a CA of their own.
    pub(crate) fn issue_any_der(&self, names: &[&str]) -> TestIdentity {
        let ca_key = KeyPair::from_pem(self.0.key().expose()).expect("a key");
        let issuer = Issuer::from_ca_cert_pem(self.pem(), ca_key).expect("a CA");
        let key = KeyPair::generate().expect("a key");
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let params = CertificateParams::new(names).expect("names");
        let made = params.signed_by(&key, &issuer).expect("a certificate");
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).expect("PEM");
        (vec![made.der().clone()], key)
    }

    /// Writes a certificate for `localhost` and its key, or replaces both.
    pub(crate) fn write_identity(&self, directory: &Path) -> IdentityFiles {
        let (chain, key) = self.issue(&["localhost"]);
        IdentityFiles {
            certificates: write(directory.join("cert.pem"), &chain),
            key: write(directory.join("key.pem"), &key),
        }
    }
}

/// Writes a file that only its owner can read. An existing file is replaced as an operator would do
/// it: a new file is renamed over the old one.
pub(crate) fn write(path: PathBuf, contents: &str) -> PathBuf {
    let new = path.with_extension("new");
    fs::write(&new, contents).expect("a file");
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).expect("permissions");
    fs::rename(&new, &path).expect("a name");
    path
}
