//! Calls over real sockets: to the server of this crate, and to servers that close connections
//! before they answer.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::*;
use crate::net::http::{Limits, Reply, Server};
use crate::net::tls::authority::{Authority, Names, Validity};
use crate::net::tls::key::PrivateKey;
use crate::net::tls::{ClientAuth, ClientFiles, IdentityFiles, MachineFiles, ServerFiles, ServerTls};
use crate::runtime::atomic_file::{Privacy, replace};
use crate::runtime::clock::wall_ms;

const DAY: u64 = 86_400_000;

/// Longer than any call here takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

fn beat(url: &str, repeatable: bool) -> Call {
    let body = br#"{"Status":"OK"}"#.to_vec();
    Call { method: "POST", url: url.to_owned(), headers: Vec::new(), body, limit: LIMIT, repeatable }
}

/// Forwards connections to `server`, and counts them.
async fn counting_proxy(server: SocketAddr) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, accepted) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&accepted);
    tokio::spawn(async move {
        let mut forwarding = JoinSet::new();
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            forwarding.spawn(async move {
                let mut far = TcpStream::connect(server).await.unwrap();
                tokio::io::copy_bidirectional(&mut near, &mut far).await
            });
        }
    });
    (port, accepted)
}

async fn serve(tls: Option<ServerTls>) -> (SocketAddr, watch::Sender<bool>) {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), Limits::default()).await.unwrap();
    let address = server.local_addr().unwrap();
    let server = match tls {
        Some(tls) => server.with_tls(tls),
        None => server,
    };
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server.serve(|_| async { Reply::empty(200) }, stopped));
    (address, stop)
}

#[tokio::test]
async fn calls_share_one_connection_without_tls() {
    let (server, _stop) = serve(None).await;
    let (port, accepted) = counting_proxy(server).await;
    let client = Client::default();
    for repeatable in [true, false, true, true, true] {
        let call = beat(&format!("http://127.0.0.1:{port}/beat"), repeatable);
        assert_eq!(client.call(call).await.unwrap(), 200);
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}

fn self_signed(directory: &Path) -> (ServerTls, ClientTls) {
    use std::os::unix::fs::PermissionsExt as _;
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificates, key) = (directory.join("cert.pem"), directory.join("key.pem"));
    std::fs::write(&certificates, cert.pem()).unwrap();
    std::fs::write(&key, signing_key.serialize_pem()).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let ca = Some(certificates.clone());
    let identity = IdentityFiles { certificates, key };
    let server = ServerTls::load(ServerFiles { identity, client_ca: None }).unwrap();
    (server, ClientTls::load(ClientFiles { ca, ..ClientFiles::default() }).unwrap())
}

#[tokio::test]
async fn calls_share_one_connection_with_tls() {
    let directory = tempfile::tempdir().unwrap();
    let (server, trust) = self_signed(directory.path());
    let (server, _stop) = serve(Some(server)).await;
    let (port, accepted) = counting_proxy(server).await;
    let client = Client::new(trust);
    for _ in 0..5 {
        let call = beat(&format!("https://localhost:{port}/beat"), true);
        assert_eq!(client.call(call).await.unwrap(), 200);
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}

/// Writes a certificate of `ca` for `name` as `NAME.pem` and `NAME.key`, valid from `from_ms` for a
/// day.
fn issue(directory: &Path, ca: &Authority, name: &str, from_ms: u64) -> IdentityFiles {
    let key = PrivateKey::generate().unwrap();
    let validity = Validity { from_ms, until_ms: from_ms + DAY };
    let chain = ca.issue_for(&key, &Names::of([name]), validity).unwrap();
    let file = |suffix: &str| directory.join(format!("{name}.{suffix}"));
    let files = IdentityFiles { certificates: file("pem"), key: file("key") };
    replace(&files.key, key.expose().as_bytes(), Privacy::Secret).unwrap();
    replace(&files.certificates, chain.as_bytes(), Privacy::Plain).unwrap();
    files
}

/// A server that answers with 200 only to clients with a certificate for `machine-3`.
async fn serve_machine_3(tls: ServerTls) -> (u16, watch::Sender<bool>) {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), Limits::default()).await.unwrap();
    let port = server.local_addr().unwrap().port();
    let (stop, stopped) = watch::channel(false);
    let answer = |request: crate::net::http::Request| async move {
        let names = request.certificate.map(|der| crate::net::tls::peer::dns_names(&der));
        Reply::empty(if names.is_some_and(|names| names == ["machine-3"]) { 200 } else { 401 })
    };
    tokio::spawn(server.with_tls(tls).serve(answer, stopped));
    (port, stop)
}

#[tokio::test]
async fn beats_with_a_certificate_need_one_handshake_and_follow_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let now = wall_ms();
    let ca = Authority::create("prod", &PrivateKey::generate().unwrap(), now).unwrap();
    let ca_file = directory.join("ca.pem");
    let identity = issue(directory, &ca, "localhost", now - 1000);
    let machine = MachineFiles {
        ca: ca_file.clone(),
        identity: IdentityFiles {
            certificates: directory.join("machine-3.pem"),
            key: directory.join("machine-3.key"),
        },
    };
    // No file of the machine exists yet.
    let client = ClientTls::load(ClientFiles { machine: Some(machine), ..ClientFiles::default() }).unwrap();
    replace(&ca_file, ca.certificate().as_bytes(), Privacy::Plain).unwrap();
    let client_ca = Some((ca_file.clone(), ClientAuth::Optional));
    let server = ServerTls::load(ServerFiles { identity, client_ca }).unwrap();
    let (port, _stop) = serve_machine_3(server.clone()).await;
    let url = format!("https://localhost:{port}/beat");
    let sender = Client::new(client.clone());
    assert_eq!(sender.call(beat(&url, true)).await.unwrap(), 401, "no certificate yet");
    assert!(!client.has_certificate().await);

    issue(directory, &ca, "machine-3", now - 1000);
    assert!(client.has_certificate().await);
    for _ in 0..20 {
        assert_eq!(sender.call(beat(&url, true)).await.unwrap(), 200);
    }
    let handshakes = server.handshakes();
    assert_eq!((handshakes.full, handshakes.resumed), (2, 0), "one without and one with the certificate");
    // A new connection with the same configuration continues the session, with its certificate.
    let another = Client::new(client.clone());
    assert_eq!(another.call(beat(&url, true)).await.unwrap(), 200);
    let handshakes = server.handshakes();
    assert_eq!((handshakes.full, handshakes.resumed), (2, 1));

    // A renewed certificate is used without a restart, and an expired one is not presented.
    issue(directory, &ca, "machine-3", now - DAY / 2);
    assert_eq!(sender.call(beat(&url, true)).await.unwrap(), 200);
    assert_eq!(server.handshakes().full, 3);
    issue(directory, &ca, "machine-3", now - 2 * DAY);
    assert!(!client.has_certificate().await);
    assert_eq!(sender.call(beat(&url, true)).await.unwrap(), 401);
}

#[tokio::test]
async fn calls_at_the_same_time_have_a_connection_each() {
    let (server, _stop) = serve(None).await;
    let (port, accepted) = counting_proxy(server).await;
    let client = Client::default();
    let mut calls = JoinSet::new();
    for _ in 0..2 * MAX_IDLE {
        let (client, call) = (client.clone(), beat(&format!("http://127.0.0.1:{port}/"), true));
        calls.spawn(async move { client.call(call).await.unwrap() });
    }
    assert_eq!(calls.join_all().await, vec![200; 2 * MAX_IDLE]);
    assert!(accepted.load(Ordering::SeqCst) <= 2 * MAX_IDLE);
    assert!(client.idle().0.values().all(|connections| connections.len() <= MAX_IDLE));
}

/// A server that answers the first request of its first connection, and closes that connection when
/// the second request has come. Later connections are served. Returns the number of requests.
async fn closes_once() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, requests) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&requests);
    tokio::spawn(async move {
        for served in [1, usize::MAX] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 4096];
            for at in 0.. {
                if stream.read(&mut bytes).await.unwrap_or(0) == 0 {
                    break;
                }
                count.fetch_add(1, Ordering::SeqCst);
                if at == served {
                    break;
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            }
        }
    });
    (port, requests)
}

#[tokio::test]
async fn only_repeatable_calls_are_sent_again_after_a_closed_connection() {
    for (repeatable, expected) in [(true, 3), (false, 2)] {
        let (port, requests) = closes_once().await;
        let client = Client::default();
        let url = format!("http://127.0.0.1:{port}/");
        assert_eq!(client.call(beat(&url, repeatable)).await.unwrap(), 200);
        let second = client.call(beat(&url, repeatable)).await;
        assert_eq!(second.is_ok(), repeatable, "{second:?}");
        assert_eq!(requests.load(Ordering::SeqCst), expected);
        assert_eq!(client.call(beat(&url, repeatable)).await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_connection_that_the_server_closed_while_idle_is_replaced() {
    let client = Client::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    for _ in 0..2 {
        let served = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 4096];
            assert!(stream.read(&mut bytes).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await.unwrap();
        };
        let (status, ()) = tokio::join!(client.call(beat(&url, false)), served);
        assert_eq!(status.unwrap(), 204);
    }
}

#[tokio::test]
async fn a_call_without_an_answer_ends_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let call = Call { limit: Duration::from_millis(50), ..beat(&url, true) };
    assert!(matches!(Client::default().call(call).await, Err(CallError::TooSlow)));
    let invalid = Client::default().call(beat("ftp://a", true)).await;
    assert!(matches!(invalid, Err(CallError::Address(UrlError::Scheme))));
}

/// Each failure of TLS with a tracker is one line that names the remedy; the first call is the
/// control.
#[tokio::test]
async fn failures_of_tls_name_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let (now, place) = (wall_ms(), directory.path());
    let authority = || Authority::create("prod", &PrivateKey::generate().unwrap(), now).unwrap();
    let (ca, other) = (authority(), authority());
    let ca_file = place.join("ca.pem");
    replace(&ca_file, ca.certificate().as_bytes(), Privacy::Plain).unwrap();
    let line = async |served: Option<(&Authority, &str, u64)>, scheme: &str| {
        let tls = served.map(|(issuer, name, from_ms)| {
            let identity = issue(place, issuer, name, from_ms);
            ServerTls::load(ServerFiles { identity, client_ca: None }).unwrap()
        });
        let (server, _stop) = serve(tls).await;
        let url = format!("{scheme}://localhost:{}/beat", server.port());
        let files = ClientFiles { ca: Some(ca_file.clone()), ..ClientFiles::default() };
        let called = Client::new(ClientTls::load(files).unwrap()).call(beat(&url, true)).await;
        called.map_err(|error| error.problem(&url))
    };
    let clock = "compare the clocks; a restart of the server renews its certificate";
    for (served, scheme, expected) in [
        (Some((&ca, "localhost", now)), "https", Ok(200)),
        (
            Some((&other, "localhost", now)),
            "https",
            Err("the server's certificate was issued by another CA: `juju machine renew N` gives machine N \
                 the CA of its environment, and --ca-file names another one"
                .to_owned()),
        ),
        (
            Some((&ca, "localhost", now - 2 * DAY)),
            "https",
            Err(format!(
                "the server's certificate has expired, or the clock of this machine is wrong: {clock}"
            )),
        ),
        (
            Some((&ca, "localhost", now + DAY)),
            "https",
            Err(format!(
                "the server's certificate is not valid yet, or the clock of this machine is wrong: {clock}"
            )),
        ),
        (
            Some((&ca, "elsewhere", now)),
            "https",
            Err("the server's certificate is not valid for 'localhost': use a name or an address that is \
                 in it"
                .to_owned()),
        ),
        (
            None,
            "https",
            Err("the server does not use TLS on this port: choose its TLS port, or connect without TLS, as \
                 http:// does"
                .to_owned()),
        ),
        (None, "http", Ok(200)),
    ] {
        assert_eq!(line(served, scheme).await, expected);
    }
    let plain = line(Some((&ca, "localhost", now)), "http").await.unwrap_err();
    let remedy = ": if the server requires TLS, its address begins with https://";
    assert!(plain.starts_with("no whole answer: ") && plain.ends_with(remedy), "{plain}");
}
