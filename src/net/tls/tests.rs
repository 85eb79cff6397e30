//! Handshakes over real sockets, with certificates of the test's own CAs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::authority::{Authority, MACHINE_LIFETIME, Names, Validity};
use super::key::PrivateKey;
use super::*;
use crate::runtime::clock::wall_ms;

/// A CA of a test.
pub(super) fn new_ca() -> Authority {
    Authority::create("test", &PrivateKey::generate().unwrap(), wall_ms()).unwrap()
}

/// Replaces the file as an operator would: a new file is renamed over the old one.
pub(super) fn write(directory: &Path, name: &str, contents: &str) -> PathBuf {
    let (path, new) = (directory.join(name), directory.join("new"));
    fs::write(&new, contents).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, &path).unwrap();
    path
}

/// Writes `NAME.pem` and `NAME.key`.
pub(super) fn issue(directory: &Path, ca: &Authority, name: &str) -> IdentityFiles {
    let key = PrivateKey::generate().unwrap();
    let validity = Validity::starting(wall_ms(), MACHINE_LIFETIME);
    let chain = ca.issue_for(&key, &Names::of([name]), validity).unwrap();
    IdentityFiles {
        certificates: write(directory, &format!("{name}.pem"), &chain),
        key: write(directory, &format!("{name}.key"), key.expose()),
    }
}

/// Returns the names of the client's certificate as the server sees them, if both sides accept the
/// other's certificate.
pub(super) async fn handshake(server: &ServerTls, client: &ClientTls) -> std::io::Result<Vec<String>> {
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
    ClientTls::load(ClientFiles { ca: Some(ca_file.to_owned()), identity, ..ClientFiles::default() }).unwrap()
}

#[tokio::test]
async fn a_client_presents_its_certificate() {
    let (directory, ca, other) = (tempfile::tempdir().unwrap(), new_ca(), new_ca());
    let directory = directory.path();
    let ca_file = write(directory, "ca.pem", ca.certificate());
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
        [("old.pem", &old), ("new.pem", &new)].map(|(name, ca)| write(directory, name, ca.certificate()));
    let client_ca = write(directory, "clients.pem", old.certificate());
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
    write(directory, "clients.pem", new.certificate());
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

#[tokio::test]
async fn a_machine_with_unusable_files_connects_without_a_certificate() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), new_ca());
    let directory = directory.path();
    let ca_file = write(directory, "ca.pem", ca.certificate());
    let client_ca = Some((ca_file.clone(), ClientAuth::Optional));
    let identity = issue(directory, &ca, "localhost");
    let server = ServerTls::load(ServerFiles { identity, client_ca }).unwrap();
    let (own, other) = (issue(directory, &ca, "machine-3"), issue(directory, &ca, "machine-4"));
    let names = async |certificates: &Path, key: &Path, machine_ca: &Path| {
        let identity = IdentityFiles { certificates: certificates.to_owned(), key: key.to_owned() };
        let machine = Some(MachineFiles { ca: machine_ca.to_owned(), identity });
        let client =
            ClientTls::load(ClientFiles { ca: Some(ca_file.clone()), machine, ..ClientFiles::default() });
        handshake(&server, &client.unwrap()).await.unwrap()
    };
    let (certificates, key) = (&*own.certificates, &*own.key);
    let [empty, absent] = [write(directory, "empty", ""), directory.join("absent")];
    assert_eq!(names(certificates, key, &ca_file).await, ["machine-3"]);
    for (certificates, key) in
        [(certificates, &*other.key), (&*empty, key), (certificates, &*empty), (certificates, &*absent)]
    {
        assert!(names(certificates, key, &ca_file).await.is_empty(), "{certificates:?} {key:?}");
    }
    assert_eq!(names(certificates, key, &empty).await, ["machine-3"]);
    fs::set_permissions(key, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(names(certificates, key, &ca_file).await.is_empty());
    // Files that an operator names are an error.
    let named = IdentityFiles { key: other.key, ..own };
    let refused =
        ClientTls::load(ClientFiles { identity: Some(named), ..ClientFiles::default() }).unwrap_err();
    assert!(matches!(refused, TlsError::KeyMismatch { .. }), "{refused}");
}

#[test]
fn unusable_files_are_refused_with_the_reason() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), new_ca());
    let directory = directory.path();
    let (one, two) = (issue(directory, &ca, "one"), issue(directory, &ca, "two"));
    let ca_file = write(directory, "ca.pem", ca.certificate());
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
        let loaded = ClientTls::load(ClientFiles { ca, ..ClientFiles::default() });
        assert!(matches!(loaded, Err(TlsError::BadCa(_))), "{pem}");
    }
}

/// Each refusal of a client's certificate has a reason that the client can report; the control is
/// `a_client_presents_its_certificate`.
#[tokio::test]
async fn refused_client_certificates_have_a_reason() {
    use super::authority::{Authority, Names, Validity};
    use super::key::PrivateKey;
    use crate::runtime::clock::wall_ms;
    const DAY: u64 = 86_400_000;
    let home = tempfile::tempdir().unwrap();
    let directory = home.path();
    let now = wall_ms();
    let authority = || Authority::create("prod", &PrivateKey::generate().unwrap(), now).unwrap();
    let (ca, other) = (authority(), authority());
    let issue = |ca: &Authority, name: &str, validity: Validity| {
        let key = PrivateKey::generate().unwrap();
        let chain = ca.issue_for(&key, &Names::of([name]), validity).unwrap();
        IdentityFiles {
            certificates: write(directory, &format!("{name}.pem"), &chain),
            key: write(directory, &format!("{name}.key"), key.expose()),
        }
    };
    let valid = Validity { from_ms: now - DAY, until_ms: now + DAY };
    let ca_file = write(directory, "ca.pem", ca.certificate());
    let client_ca = Some((ca_file.clone(), ClientAuth::Required));
    let server =
        ServerTls::load(ServerFiles { identity: issue(&ca, "localhost", valid), client_ca }).unwrap();
    let reason = async |identity: Option<IdentityFiles>| {
        let refused = handshake(&server, &trusting(&ca_file, identity)).await.unwrap_err();
        probe::refused_certificate(&refused).unwrap_or_else(|| panic!("{refused:?}"))
    };
    assert_eq!(handshake(&server, &trusting(&ca_file, Some(issue(&ca, "a", valid)))).await.unwrap(), ["a"]);
    let required = "the server requires a certificate of the client: `juju machine renew N` issues a new one \
                    if it has expired";
    assert_eq!(reason(None).await, required);
    let another_ca = "the server refused the certificate of this client: another CA issued it, and `juju \
                      machine renew ID` issues a new one";
    assert_eq!(reason(Some(issue(&other, "b", valid))).await, another_ca);
    // A clock that is a day off: not valid before tomorrow.
    let early = Validity { from_ms: now + DAY, until_ms: now + 2 * DAY };
    let early = reason(Some(issue(&ca, "c", early))).await;
    assert_eq!(
        early,
        "the server refused the certificate of this client, which has expired or is not valid yet: compare \
         the clocks, or issue a new one with `juju machine renew ID`"
    );
    // The client itself holds an expired certificate back, and the server requires one.
    let expired = Validity { from_ms: now - 3 * DAY, until_ms: now - DAY };
    let expired = reason(Some(issue(&ca, "d", expired))).await;
    assert_eq!(expired, required);
}
