//! The keeper's TLS door: the protocol is the one of the plain door, whatever comes in whichever pieces, and who should
//! not come in does not.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use portcullis::keeper::tls::{self, Clients, Tls};
use portcullis::keeper::{Config, Keeper, Limits};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::harness::wire::{Client, Create, Put, REPLY_DEADLINE, Take, op};

/// An authority of the test's own.
struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        Authority { certificate, issuer: Issuer::new(params, key) }
    }

    /// Certificate and key, both PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new([name.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }

    fn keeper(&self, clients: Option<&Authority>, limits: Limits) -> (Keeper, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("a directory");
        let (certificate, key) = self.issue("localhost");
        let clients = clients.map(|authority| authority.certificate.as_bytes());
        let config = tls::server_config(certificate.as_bytes(), key.as_bytes(), clients, Clients::MustShow)
            .expect("fits");
        let anywhere = ([127, 0, 0, 1], 0).into();
        let tls = Some(Tls { listen: anywhere, config });
        let config = Config { limits, tls, ..Config::new(dir.path(), anywhere) };
        (Keeper::start(config).expect("a keeper"), dir)
    }
}

type Connection = StreamOwned<ClientConnection, TcpStream>;

/// A connection that trusts `authority`, and shows a certificate if it has one. Nothing is sent yet.
fn dial(keeper: &Keeper, authority: &Authority, own: Option<(String, String)>) -> Connection {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_slice(authority.certificate.as_bytes()).expect("PEM");
    roots.add(root).expect("an authority");
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).expect("PEM");
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("PEM");
            builder.with_client_auth_cert(vec![certificate], key).expect("fits")
        }
    };
    let socket = TcpStream::connect(keeper.tls_addr().expect("a TLS door")).expect("connected");
    socket.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    let name = ServerName::try_from("localhost").expect("a name");
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).expect("a session"), socket)
}

fn receive(connection: &mut Connection) -> io::Result<Vec<u8>> {
    let mut head = [0; 4];
    connection.read_exact(&mut head)?;
    let mut body = vec![0; u32::from_be_bytes(head) as usize];
    connection.read_exact(&mut body)?;
    Ok(body)
}

/// Opens a session that outlasts `REPLY_DEADLINE`, so that its end closes nothing that a test waits for; the answer's
/// length says that it was one.
fn connect(connection: &mut Connection) -> io::Result<usize> {
    let hello = Put::new().int(0).long(0).int(40_000).long(0).bytes([0; 16]).bool(false);
    connection.write_all(&hello.framed())?;
    Ok(receive(connection)?.len())
}

fn get(xid: i32, path: &str) -> Vec<u8> {
    Put::new().int(xid).int(op::GET_DATA).bytes(path).bool(false).framed()
}

pub(crate) fn the_protocol_is_the_same_inside() {
    const ASKED: i32 = 300;
    let authority = Authority::new();
    let limits = Limits { max_outstanding_bytes: 64 << 10, ..Limits::default() };
    let (keeper, _dir) = authority.keeper(None, limits);
    let mut plain = Client::connect(keeper.local_addr());
    plain.create("/big", &[7; 100_000], Create::Persistent);

    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    // More than the keeper holds for a client, before the first answer is read: 30 MB in all.
    for xid in 1..=ASKED {
        connection.write_all(&get(xid, "/big")).expect("sent");
    }
    for xid in 1..=ASKED {
        let reply = receive(&mut connection).expect("every answer");
        let mut take = Take(&reply);
        assert_eq!((take.int(), take.long() > 0, take.int()), (xid, true, 0));
        assert_eq!(take.bytes().len(), 100_000);
    }
    let large = Put::new().int(1).int(op::CREATE).bytes("/large").bytes(vec![8; 1_000_000]);
    connection.write_all(&large.open_acl().int(0).framed()).expect("sent");
    assert_eq!(Take(&receive(&mut connection).expect("made")[12..]).int(), 0);
    assert_eq!(plain.get("/large").expect("seen on the plain door").0.len(), 1_000_000);

    let mut words = dial(&keeper, &authority, None);
    words.write_all(b"conf").expect("sent");
    let mut answer = String::new();
    words.read_to_string(&mut answer).expect("an answer, and a farewell");
    let port = keeper.tls_addr().expect("a TLS door").port();
    assert!(answer.contains(&format!("secureClientPort={port}\n")), "{answer}");
}

pub(crate) fn who_shows_no_certificate_of_the_authority_stays_out() {
    let (servers, clients) = (Authority::new(), Authority::new());
    let (keeper, _dir) = servers.keeper(Some(&clients), Limits::default());
    let tried = |own| connect(&mut dial(&keeper, &servers, own));
    assert_eq!(tried(Some(clients.issue("machine-1"))).expect("served"), 37);
    for own in [None, Some(servers.issue("machine-1"))] {
        let refused = tried(own).expect_err("stays out");
        // The alert, or the end of the connection if that overtakes it.
        let said = refused.to_string().starts_with("received fatal alert: ");
        assert!(said || refused.kind() == io::ErrorKind::ConnectionReset, "{refused}");
    }
}

pub(crate) fn a_keeper_of_another_authority_is_found_out() {
    let authority = Authority::new();
    let (keeper, _dir) = authority.keeper(None, Limits::default());
    let refused = connect(&mut dial(&keeper, &Authority::new(), None)).expect_err("not trusted").to_string();
    assert!(refused.contains("certificate"), "{refused}");
    assert_eq!(connect(&mut dial(&keeper, &authority, None)).expect("others are served"), 37);
}

pub(crate) fn what_is_no_tls_is_closed() {
    let authority = Authority::new();
    let (keeper, _dir) = authority.keeper(None, Limits::default());
    let mut socket = TcpStream::connect(keeper.tls_addr().expect("a TLS door")).expect("connected");
    socket.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    socket.write_all(b"ruok").expect("sent");
    socket.write_all(&[0; 1000]).expect("sent");
    let mut answer = Vec::new();
    // Closed, or reset with bytes of ours unread: an alert at most, and never an answer.
    socket.read_to_end(&mut answer).ok();
    assert!(answer.len() < 16 && !answer.starts_with(b"imok"), "{answer:?}");
    assert_eq!(connect(&mut dial(&keeper, &authority, None)).expect("others are served"), 37);
}

/// What the session has for the socket, in one piece.
fn flight(connection: &mut Connection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while connection.conn.wants_write() {
        connection.conn.write_tls(&mut bytes).expect("memory");
    }
    bytes
}

pub(crate) fn a_farewell_right_behind_a_request_is_seen_after_its_answer() {
    let authority = Authority::new();
    let (keeper, _dir) = authority.keeper(None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    connection.conn.writer().write_all(&get(7, "/")).expect("taken");
    connection.conn.send_close_notify();
    // The socket stays open: only what is inside says that this is the end.
    let bytes = flight(&mut connection);
    connection.sock.write_all(&bytes).expect("sent");
    assert_eq!(Take(&receive(&mut connection).expect("an answer")).int(), 7);
    assert_eq!(connection.read(&mut [0; 1]).expect("a farewell in return"), 0);
}

pub(crate) fn a_request_before_garbage_is_handled() {
    let authority = Authority::new();
    let (keeper, _dir) = authority.keeper(None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    let create = Put::new().int(1).int(op::CREATE).bytes("/before").bytes(b"").open_acl().int(0).framed();
    connection.conn.writer().write_all(&create).expect("taken");
    let mut bytes = flight(&mut connection);
    bytes.extend_from_slice(&[0xff; 64]);
    connection.sock.write_all(&bytes).expect("sent");
    // The alert may overtake the answer, and ends what the client can read.
    connection.sock.read_to_end(&mut Vec::new()).expect("closed");
    assert!(Client::connect(keeper.local_addr()).get("/before").is_ok());
}

pub(crate) fn a_keeper_that_stops_says_farewell() {
    let authority = Authority::new();
    let (keeper, _dir) = authority.keeper(None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    drop(keeper);
    assert_eq!(connection.read(&mut [0; 1]).expect("a farewell, and no mere end"), 0);
}
