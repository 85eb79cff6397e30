//! A tracker's TLS listener: a client with a certificate may send beats for the names in it, a
//! token is valid there as well, and other clients are rejected.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use portcullis::heartbeat::core::token;
use portcullis::model::MachineId;
use portcullis::net::tls::IdentityFiles;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value, json};

use crate::api::machine_credential;
use crate::authority::{TestCa, write};
use crate::harness::{Store, wait_for};
use crate::process::{Client, Site, Tracker};

const DEADLINE: Duration = Duration::from_secs(30);

type Secure = Client<StreamOwned<ClientConnection, TcpStream>>;

/// Writes a file, or replaces it.
fn written(site: &Site, name: &str, text: &str) -> PathBuf {
    write(site.home().join(name), text)
}

/// A tracker with both listeners; `server` signs its certificate, `clients` those of clients.
fn tracker(site: &Site, server: &TestCa, clients: &TestCa, more: &[&str]) -> Tracker {
    let IdentityFiles { certificates, key } = server.write_identity(site.home());
    let files = [certificates, key, written(site, "clients.pem", clients.pem())];
    let [cert, key, clients] = [0, 1, 2].map(|at: usize| Path::to_str(&files[at]).unwrap());
    let args = ["--tls-listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key, "--client-ca", clients];
    site.tracker(&[&args[..], more].concat())
}

/// A client that trusts `server`, with an optional certificate for `names`.
fn client(addr: SocketAddr, server: &TestCa, own: Option<(&TestCa, &[&str])>) -> Secure {
    let mut roots = RootCertStore::empty();
    roots.add(server.der()).unwrap();
    let builder =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some((issuer, names)) => {
            let (chain, key) = issuer.issue_any_der(names);
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let connection =
        ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
    Client(BufReader::new(StreamOwned::new(connection, stream)))
}

fn beat(client: &mut Secure, name: &str, token: Option<&str>) -> (u16, String) {
    let headers: Vec<(&str, &str)> = token.iter().map(|token| ("authorization", *token)).collect();
    let body = br#"{"Status":"OK","Timestamp":"t"}"#;
    let answer = client.ask("POST", &format!("/hmi/v1/heartbeat/{name}"), &headers, body).unwrap();
    (answer.status, answer.json_detail())
}

#[test]
fn certificate_allows_beats_for_its_names() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    let (server, clients, strangers) = (TestCa::new(), TestCa::new(), TestCa::new());
    let tracker = tracker(&site, &server, &clients, &[]);
    let listener = tracker.secure.unwrap();
    let refused = |name: &str| (403, format!("This certificate is not for {name}"));
    let good = (200, String::new());

    let mut node = client(listener, &server, Some((&clients, &["x1c0", "X2c0"])));
    assert_eq!(beat(&mut node, "x1c0", None), good);
    assert_eq!(beat(&mut node, "x2c0", None), good);
    assert_eq!(beat(&mut node, "x3c0", None), refused("x3c0"));
    assert_eq!(beat(&mut node, "machine-0", None), refused("machine-0"));
    let one =
        |name| json!({"Component": name, "Hostname": "h", "NID": "1", "Status": "OK", "Timestamp": "t"});
    let both = json!([one("x1c0"), one("x4c0")]).to_string();
    let answer = node.ask("POST", "/hmi/v1/heartbeats", &[], both.as_bytes()).unwrap();
    assert_eq!((answer.status, answer.json_detail()), refused("x4c0"));
    let mut many = client(listener, &server, Some((&clients, &["*.rack", "localhost"])));
    assert_eq!(beat(&mut many, "n1.rack", None), refused("n1.rack"), "a wildcard name is not accepted");

    let mut machine = client(listener, &server, Some((&clients, &["machine-0", "machine-7"])));
    assert_eq!(beat(&mut machine, "machine-0", None), good);
    assert_eq!(beat(&mut machine, "machine-7", None), refused("machine-7"), "there is none");

    // Without a certificate, a token is needed, as at the plain listener.
    let mut bare = client(listener, &server, None);
    assert_eq!(beat(&mut bare, "x1c0", None), (401, "No token".to_owned()));
    let mine = token::authorization(MachineId::new(0), &machine_credential(&site, 0));
    assert_eq!(beat(&mut bare, "machine-0", Some(&mine)), good);
    assert_eq!(beat(&mut bare, "machine-1", Some(&mine)).0, 403);

    // A client with an untrusted certificate gets no answer, nor does one without TLS.
    let mut stranger = client(listener, &server, Some((&strangers, &["x1c0"])));
    assert!(stranger.ask("GET", "/hmi/v1/liveness", &[], b"").is_err());
    let mut plain = TcpStream::connect(listener).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    plain.write_all(b"GET /hmi/v1/liveness HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // Closed with an alert, or reset.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    assert_eq!(beat(&mut node, "x1c0", None), good, "others are served");
    tracker.end();
}

/// With open access, a client with a certificate is limited to its names.
#[test]
fn open_access_limits_a_certificate_to_its_names() {
    let site = Site::new(Store::keeper());
    let (server, clients) = (TestCa::new(), TestCa::new());
    let tracker = tracker(&site, &server, &clients, &["--open"]);
    let listener = tracker.secure.unwrap();
    let mut node = client(listener, &server, Some((&clients, &["x1c0"])));
    assert_eq!(beat(&mut node, "x1c0", None).0, 200);
    assert_eq!(beat(&mut node, "x2c0", None), (403, "This certificate is not for x2c0".to_owned()));
    assert_eq!(beat(&mut client(listener, &server, None), "x2c0", None).0, 200);
    tracker.end();
}

#[test]
fn machine_sends_beats_over_tls() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    let (server, clients, strangers) = (TestCa::new(), TestCa::new(), TestCa::new());
    let tracker = tracker(&site, &server, &clients, &[]);
    let url = format!("https://localhost:{}", tracker.secure.unwrap().port());
    let ca = written(&site, "ca.pem", server.pem());
    let other = written(&site, "other.pem", strangers.pem());
    let agent = |ca: &Path| {
        let mut command = site.command("portcullis");
        command.args(["machine", "--id", "0", "--beat-to", &url, "--ca-file"]).arg(ca);
        command.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let end = |mut agent: std::process::Child| {
        let done = std::process::Command::new("kill").arg(agent.id().to_string()).status().unwrap();
        assert!(done.success() && agent.wait().unwrap().success());
    };
    // A client that trusts another CA does not send its token.
    let mut wary = agent(&other);
    let lines = std::io::BufRead::lines(BufReader::new(wary.stderr.take().unwrap()));
    let mut lines = lines.map_while(Result::ok);
    assert!(lines.any(|line| line.contains("no tracker accepts beats")));
    assert!(!site.juju(&["heartbeat", "list"]).contains("machine-0"));
    std::thread::spawn(move || lines.for_each(drop));
    end(wary);
    let mut good = agent(&ca);
    let mut words = good.stderr.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut words, &mut std::io::sink()));
    wait_for("a machine that is heard", DEADLINE, || {
        let status: Value = serde_json::from_str(&site.juju(&["status", "--format", "json"])).unwrap();
        (status["machines"]["0"]["health"] == "ok").then_some(())
    });
    end(good);
    tracker.end();
}

#[test]
fn replaced_certificates_are_used_without_a_restart() {
    let site = Site::new(Store::keeper());
    let (old, new) = (TestCa::new(), TestCa::new());
    let tracker = tracker(&site, &old, &old, &["--open"]);
    let address = tracker.secure.unwrap();
    let beats = |server: &TestCa, clients: &TestCa| {
        let mut client = client(address, server, Some((clients, &["x1c0"])));
        client.ask("POST", "/hmi/v1/heartbeat/x1c0", &[], br#"{"Status":"OK","Timestamp":"t"}"#)
    };
    assert_eq!(beats(&old, &old).unwrap().status, 200);
    new.write_identity(site.home());
    written(&site, "clients.pem", new.pem());
    assert!(beats(&old, &new).is_err() && beats(&new, &old).is_err());
    assert_eq!(beats(&new, &new).unwrap().status, 200);
    written(&site, "key.pem", "broken");
    assert_eq!(beats(&new, &new).unwrap().status, 200, "the last usable key stays");
    tracker.end();
}
