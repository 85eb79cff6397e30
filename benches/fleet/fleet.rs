//! The processes of a fleet: a manager on a private bus, and agents. It measures nothing itself.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use portcullis::net::tls::IdentityFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

use crate::world::Daemon;

/// A process that ends with this value.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    /// Starts a program of this package.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::of(Command::new(env!("CARGO_BIN_EXE_portcullis")).args(arguments))
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        command.env("RUST_LOG", "error").stdin(Stdio::null()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// Returns the rest of the first line that the process prints.
    pub(crate) fn printed(&mut self, before: &str) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        line.trim().strip_prefix(before).unwrap().to_owned()
    }

    /// The resident memory in megabytes, and the part of it that is no file's: the pages of the
    /// program and its libraries are shared by all processes that use them.
    pub(crate) fn megabytes(&self) -> (f64, f64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
        };
        (field("VmRSS:"), field("RssAnon:"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// An authority, and the certificates that it has issued.
pub(crate) struct Authority {
    dir: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("ca.pem"), &issuer.pem());
        Self { dir, issuer }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    pub(crate) fn issue(&self, name: &str) -> IdentityFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |end| self.dir.path().join(format!("{name}.{end}"));
        let (certificates, key_file) = (path("pem"), path("key"));
        write(&certificates, &certificate.pem());
        write(&key_file, &key.serialize_pem());
        IdentityFiles { certificates, key: key_file }
    }
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(path, mode).unwrap();
}

/// A private bus, and the options of a manager on it.
pub(crate) struct Site {
    pub(crate) bus: Daemon,
    pub(crate) authority: Authority,
    config: PathBuf,
    identity: IdentityFiles,
    _dir: TempDir,
}

impl Site {
    pub(crate) fn new(nodes: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("manager.ini");
        write(&config, &format!("[hirte]\nAllowedNodeNames={}\n", nodes.join(",")));
        let authority = Authority::new();
        let identity = authority.issue("127.0.0.1");
        Self { bus: Daemon::start(&dir), authority, config, identity, _dir: dir }
    }

    /// Permits a node to depend on another one. Takes effect in managers that start later.
    pub(crate) fn allow(&self, node: &str, on: &str) {
        let config = std::fs::read_to_string(&self.config).unwrap();
        write(&self.config, &format!("{config}[node {node}]\nAllowDependenciesOn={on}\n"));
    }

    /// Starts a manager. Returns its address, too.
    pub(crate) fn manager(&self, listen: &str) -> (Process, String) {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (certificate, key) = (text(&self.identity.certificates), text(&self.identity.key));
        let (config, ca) = (text(&self.config), text(&self.authority.file()));
        let options = ["manager", "--config", &config, "--listen", listen, "--bus", &self.bus.address];
        let tls = ["--tls-cert", &certificate, "--tls-key", &key, "--client-ca", &ca];
        let mut process = Process::start(&[&options[..], &tls].concat());
        let address = process.printed("listening on ");
        (process, address)
    }
}
