//! Handshakes over real sockets, with certificates of the test's own CAs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;

type Ca = CertifiedIssuer<'static, KeyPair>;

fn new_ca() -> Ca {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Replaces the file as an operator would: a new file is renamed over the old one.
fn write(directory: &Path, name: &str, contents: &str) -> PathBuf {
    let (path, new) = (directory.join(name), directory.join("new"));
    fs::write(&new, contents).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, &path).unwrap();
    path
}

/// Writes `NAME.pem` and `NAME.key`.
fn issue(directory: &Path, ca: &Ca, name: &str) -> IdentityFiles {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, ca).unwrap();
    IdentityFiles {
        certificates: write(directory, &format!("{name}.pem"), &certificate.pem()),
        key: write(directory, &format!("{name}.key"), &key.serialize_pem()),
    }
}

/// Returns the names of the client's certificate as the server sees them, if both sides accept the
/// other's certificate.
async fn handshake(server: &ServerTls, client: &ClientTls) -> std::io::Result<Vec<String>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let accepted = async {
        let (stream, _) = listener.accept().await?;
        let mut stream = TlsAcceptor::from(server.config()).accept(stream).await?;
        let names = stream.get_ref().1.peer_certificates().map(|chain| peer::dns_names(&chain[0]));
        stream.write_all(b"x").await?;
        stream.shutdown().await?;
        Ok::<_, std::io::Error>(names.unwrap_or_default())
    };
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        let mut stream = client.connect("localhost", stream).await?;
        let mut read = [0];
        // A client sees only with the first bytes whether its certificate was accepted.
        stream.read_exact(&mut read).await
    };
    let (accepted, connected) = tokio::join!(accepted, connected);
    connected?;
    accepted
}

fn trusting(ca_file: &Path, identity: Option<IdentityFiles>) -> ClientTls {
    ClientTls::load(ClientFiles { ca: Some(ca_file.to_owned()), identity }).unwrap()
}

#[tokio::test]
async fn a_client_presents_its_certificate() {
    let (directory, ca, other) = (tempfile::tempdir().unwrap(), new_ca(), new_ca());
    let directory = directory.path();
    let ca_file = write(directory, "ca.pem", &ca.pem());
    let identity = issue(directory, &ca, "localhost");
    let server = |auth| {
        let client_ca = Some((ca_file.clone(), auth));
        ServerTls::load(ServerFiles { identity: identity.clone(), client_ca }).unwrap()
    };
    let (required, optional) = (server(ClientAuth::Required), server(ClientAuth::Optional));
    let named = trusting(&ca_file, Some(issue(directory, &ca, "machine-3")));
    let stranger = trusting(&ca_file, Some(issue(directory, &other, "machine-4")));
    let anonymous = trusting(&ca_file, None);
    assert_eq!(handshake(&required, &named).await.unwrap(), ["machine-3"]);
    assert_eq!(handshake(&optional, &named).await.unwrap(), ["machine-3"]);
    assert!(handshake(&optional, &anonymous).await.unwrap().is_empty());
    assert!(handshake(&required, &anonymous).await.is_err());
    assert!(handshake(&required, &stranger).await.is_err());
    assert!(handshake(&optional, &stranger).await.is_err());
}

#[tokio::test]
async fn a_listener_uses_replaced_files_without_a_restart() {
    let (directory, old, new) = (tempfile::tempdir().unwrap(), new_ca(), new_ca());
    let directory = directory.path();
    let [old_ca, new_ca] =
        [("old.pem", &old), ("new.pem", &new)].map(|(name, ca)| write(directory, name, &ca.pem()));
    let client_ca = write(directory, "clients.pem", &old.pem());
    let identity = issue(directory, &old, "localhost");
    let files = ServerFiles { identity, client_ca: Some((client_ca, ClientAuth::Required)) };
    let server = ServerTls::load(files).unwrap();
    let old_name = issue(directory, &old, "old-client");
    let before = trusting(&old_ca, Some(old_name.clone()));
    assert_eq!(handshake(&server, &before).await.unwrap(), ["old-client"]);

    issue(directory, &new, "localhost");
    assert!(handshake(&server, &before).await.is_err(), "the server has a certificate of the new CA");
    let after = trusting(&new_ca, Some(old_name));
    assert_eq!(handshake(&server, &after).await.unwrap(), ["old-client"]);
    write(directory, "clients.pem", &new.pem());
    assert!(handshake(&server, &after).await.is_err(), "clients need a certificate of the new CA");
    // The client reads its own files again, too.
    let renewed = issue(directory, &new, "old-client");
    assert_eq!(handshake(&server, &after).await.unwrap(), ["old-client"]);

    let last = server.config();
    write(directory, "localhost.key", "broken");
    assert_eq!(handshake(&server, &after).await.unwrap(), ["old-client"], "the old key stays");
    fs::remove_file(directory.join("clients.pem")).unwrap();
    assert!(std::sync::Arc::ptr_eq(&last, &server.config()));
    fs::remove_file(renewed.key).unwrap();
    assert_eq!(handshake(&server, &after).await.unwrap(), ["old-client"]);
}

#[test]
fn unusable_files_are_refused_with_the_reason() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), new_ca());
    let directory = directory.path();
    let (one, two) = (issue(directory, &ca, "one"), issue(directory, &ca, "two"));
    let ca_file = write(directory, "ca.pem", &ca.pem());
    let empty = write(directory, "empty", "");
    let absent = directory.join("absent");
    let refused = |certificates: &Path, key: &Path, client_ca: Option<&Path>| {
        let identity = IdentityFiles { certificates: certificates.to_owned(), key: key.to_owned() };
        let client_ca = client_ca.map(|path| (path.to_owned(), ClientAuth::Required));
        let text = ServerTls::load(ServerFiles { identity, client_ca }).err().map(|error| error.to_string());
        text.map(|text| text.replace(&format!("{}/", directory.display()), ""))
    };
    let (cert, key) = (&*one.certificates, &*one.key);
    assert_eq!(refused(cert, key, None), None);
    assert_eq!(refused(cert, key, Some(&ca_file)), None);
    for (found, expected) in [
        (refused(&absent, key, None), "absent does not exist"),
        (refused(&empty, key, None), "no certificate in PEM form in empty"),
        (refused(key, key, None), "no certificate in PEM form in one.key"),
        (refused(cert, cert, None), "no private key in PEM form in one.pem"),
        (
            refused(cert, &two.key, None),
            "the private key in two.key does not match the certificate in one.pem",
        ),
        (refused(cert, key, Some(&absent)), "absent does not exist"),
        (refused(cert, key, Some(key)), "no valid CA certificate in one.key"),
    ] {
        assert_eq!(found.as_deref(), Some(expected));
    }
    fs::set_permissions(key, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(refused(cert, key, None).as_deref(), Some("cannot load TLS certificates"));
}

#[test]
fn a_file_without_ca_certificates_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for pem in ["", "hello", "-----BEGIN CERTIFICATE-----\n", broken] {
        let ca = Some(write(directory.path(), "ca.pem", pem));
        let loaded = ClientTls::load(ClientFiles { ca, identity: None });
        assert!(matches!(loaded, Err(TlsError::BadCa(_))), "{pem}");
    }
}
