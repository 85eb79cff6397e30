//! The keeper's TLS listener: it serves the same protocol as the plain one, however the bytes are
//! split, and refuses untrusted clients.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use portcullis::keeper::{Config, Keeper, Limits, TlsListen};
use portcullis::net::tls::{ClientAuth, ServerFiles, ServerTls};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::authority::{TestCa, TestIdentity, write};
use crate::harness::wire::{Client, Create, Put, REPLY_DEADLINE, Take, op};

/// Starts a keeper with a certificate of `servers`. Clients need one of `clients`, if there is one.
fn start_keeper(servers: &TestCa, clients: Option<&TestCa>, limits: Limits) -> (Keeper, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("data");
    fs::create_dir(&data).expect("a data directory");
    let identity = servers.write_identity(dir.path());
    let client_ca = clients.map(|ca| (write(dir.path().join("clients.pem"), ca.pem()), ClientAuth::Required));
    let config = ServerTls::load(ServerFiles { identity, client_ca }).expect("usable files");
    let anywhere = ([127, 0, 0, 1], 0).into();
    let tls = Some(TlsListen { listen: anywhere, config });
    let config = Config { limits, tls, ..Config::new(data, anywhere) };
    (Keeper::start(config).expect("a keeper"), dir)
}

type Connection = StreamOwned<ClientConnection, TcpStream>;

/// Opens a connection that trusts `authority` and presents the certificate `own`. The handshake
/// happens with the first use.
fn dial(keeper: &Keeper, authority: &TestCa, own: Option<TestIdentity>) -> Connection {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der()).expect("an authority");
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).expect("fits"),
    };
    let socket = TcpStream::connect(keeper.tls_addr().expect("a TLS listener")).expect("connected");
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

/// Opens a session that outlasts `REPLY_DEADLINE`, so that its expiry does not close the connection
/// during a test. Returns the length of the reply.
fn connect(connection: &mut Connection) -> io::Result<usize> {
    let hello = Put::new().int(0).long(0).int(40_000).long(0).bytes([0; 16]).bool(false);
    connection.write_all(&hello.framed())?;
    Ok(receive(connection)?.len())
}

fn get(xid: i32, path: &str) -> Vec<u8> {
    Put::new().int(xid).int(op::GET_DATA).bytes(path).bool(false).framed()
}

#[test]
fn protocol_is_the_same_over_tls() {
    const ASKED: i32 = 300;
    let authority = TestCa::new();
    let limits = Limits { max_outstanding_bytes: 64 << 10, ..Limits::default() };
    let (keeper, _dir) = start_keeper(&authority, None, limits);
    let mut plain = Client::connect(keeper.local_addr());
    plain.create("/big", &[7; 100_000], Create::Persistent);

    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    // 30 MB of replies, more than the keeper buffers for a client, before the first one is read.
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
    assert_eq!(plain.get("/large").expect("visible on the plain listener").0.len(), 1_000_000);

    let mut command = dial(&keeper, &authority, None);
    command.write_all(b"conf").expect("sent");
    let mut answer = String::new();
    command.read_to_string(&mut answer).expect("a reply and a close_notify");
    let port = keeper.tls_addr().expect("a TLS listener").port();
    assert!(answer.contains(&format!("secureClientPort={port}\n")), "{answer}");
}

#[test]
fn clients_without_a_trusted_certificate_are_refused() {
    let (servers, clients) = (TestCa::new(), TestCa::new());
    let (keeper, _dir) = start_keeper(&servers, Some(&clients), Limits::default());
    let tried = |own| connect(&mut dial(&keeper, &servers, own));
    assert_eq!(tried(Some(clients.issue_der(&["machine-1"]))).expect("served"), 37);
    for own in [None, Some(servers.issue_der(&["machine-1"]))] {
        let refused = tried(own).expect_err("stays out");
        // The alert, or the end of the connection if it arrives first.
        let printed = refused.to_string().starts_with("received fatal alert: ");
        assert!(printed || refused.kind() == io::ErrorKind::ConnectionReset, "{refused}");
    }
}

#[test]
fn client_refuses_a_keeper_of_another_authority() {
    let authority = TestCa::new();
    let (keeper, _dir) = start_keeper(&authority, None, Limits::default());
    let refused = connect(&mut dial(&keeper, &TestCa::new(), None)).expect_err("not trusted").to_string();
    assert!(refused.contains("certificate"), "{refused}");
    assert_eq!(connect(&mut dial(&keeper, &authority, None)).expect("others are served"), 37);
}

#[test]
fn plain_bytes_on_the_tls_listener_close_the_connection() {
    let authority = TestCa::new();
    let (keeper, _dir) = start_keeper(&authority, None, Limits::default());
    let mut socket = TcpStream::connect(keeper.tls_addr().expect("a TLS listener")).expect("connected");
    socket.set_read_timeout(Some(REPLY_DEADLINE)).expect("a deadline");
    socket.write_all(b"ruok").expect("sent");
    socket.write_all(&[0; 1000]).expect("sent");
    let mut answer = Vec::new();
    // Closed, or reset because of unread bytes: at most an alert, and never a reply.
    socket.read_to_end(&mut answer).ok();
    assert!(answer.len() < 16 && !answer.starts_with(b"imok"), "{answer:?}");
    assert_eq!(connect(&mut dial(&keeper, &authority, None)).expect("others are served"), 37);
}

/// Returns the pending TLS records in one piece.
fn flight(connection: &mut Connection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while connection.conn.wants_write() {
        connection.conn.write_tls(&mut bytes).expect("memory");
    }
    bytes
}

#[test]
fn close_notify_behind_a_request_is_handled_after_its_reply() {
    let authority = TestCa::new();
    let (keeper, _dir) = start_keeper(&authority, None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    connection.conn.writer().write_all(&get(7, "/")).expect("taken");
    connection.conn.send_close_notify();
    // The socket stays open: only the close_notify marks the end.
    let bytes = flight(&mut connection);
    connection.sock.write_all(&bytes).expect("sent");
    assert_eq!(Take(&receive(&mut connection).expect("an answer")).int(), 7);
    assert_eq!(connection.read(&mut [0; 1]).expect("a close_notify in return"), 0);
}

#[test]
fn request_before_garbage_is_handled() {
    let authority = TestCa::new();
    let (keeper, _dir) = start_keeper(&authority, None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    let create = Put::new().int(1).int(op::CREATE).bytes("/before").bytes(b"").open_acl().int(0).framed();
    connection.conn.writer().write_all(&create).expect("taken");
    let mut bytes = flight(&mut connection);
    bytes.extend_from_slice(&[0xff; 64]);
    connection.sock.write_all(&bytes).expect("sent");
    // The alert may arrive before the reply; the client cannot read beyond it.
    connection.sock.read_to_end(&mut Vec::new()).expect("closed");
    assert!(Client::connect(keeper.local_addr()).get("/before").is_ok());
}

#[test]
fn stopping_keeper_sends_close_notify() {
    let authority = TestCa::new();
    let (keeper, _dir) = start_keeper(&authority, None, Limits::default());
    let mut connection = dial(&keeper, &authority, None);
    assert_eq!(connect(&mut connection).expect("served"), 37);
    drop(keeper);
    assert_eq!(connection.read(&mut [0; 1]).expect("a close_notify before the end of the stream"), 0);
}

#[test]
fn replaced_certificates_are_used_without_a_restart() {
    let (old, new) = (TestCa::new(), TestCa::new());
    let (keeper, dir) = start_keeper(&old, Some(&old), Limits::default());
    let served = |server: &TestCa, client: &TestCa| {
        connect(&mut dial(&keeper, server, Some(client.issue_der(&["client"])))).is_ok()
    };
    let mut open = dial(&keeper, &old, Some(old.issue_der(&["client"])));
    assert_eq!(connect(&mut open).expect("served"), 37);
    new.write_identity(dir.path());
    assert!(!served(&old, &old) && served(&new, &old), "the certificate is new");
    write(dir.path().join("clients.pem"), new.pem());
    assert!(!served(&new, &old) && served(&new, &new), "the CA of clients is new");
    write(dir.path().join("key.pem"), "broken");
    assert!(served(&new, &new), "the last usable key stays");
    open.write_all(&get(1, "/")).expect("sent");
    assert!(!receive(&mut open).expect("an answer").is_empty(), "open connections stay");
}
