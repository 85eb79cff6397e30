//! Calls to `https://` addresses are made only if the server's certificate is valid.

use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::authority::TestCa;
use crate::harness::{Store, wait_for};
use crate::process::{Client, Got, Site, serve_over};

const DEADLINE: Duration = Duration::from_secs(30);

/// A server that counts handshakes.
struct Listener {
    port: u16,
    heard: Arc<Mutex<Vec<Got>>>,
    /// Completed handshakes, and those that the caller aborted.
    done: Arc<AtomicUsize>,
    broken: Arc<AtomicUsize>,
}

/// Starts a server with a certificate for `name`.
fn listener(ca: &TestCa, name: &str) -> Listener {
    let (chain, key) = ca.issue_der(&[name]);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let config = Arc::new(config);
    let got: Arc<Mutex<Vec<Got>>> = Arc::default();
    let book = Arc::clone(&got);
    let (done, broken) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counts = (Arc::clone(&done), Arc::clone(&broken));
    let open = move |mut stream: TcpStream| {
        let mut connection = ServerConnection::new(Arc::clone(&config)).unwrap();
        while connection.is_handshaking() {
            if connection.complete_io(&mut stream).is_err() {
                counts.1.fetch_add(1, Ordering::SeqCst);
                return None;
            }
        }
        counts.0.fetch_add(1, Ordering::SeqCst);
        Some(StreamOwned::new(connection, stream))
    };
    let addr = serve_over(open, move |call| {
        book.lock().unwrap().push(call.clone());
        Some(204)
    });
    Listener { port: addr.port(), heard: got, done, broken }
}

#[test]
fn only_servers_with_a_valid_certificate_get_calls() {
    let (ours, theirs) = (TestCa::new(), TestCa::new());
    let good = listener(&ours, "localhost");
    let stranger = listener(&theirs, "localhost");
    let misnamed = listener(&ours, "elsewhere.example");
    let site = Site::new(Store::keeper());
    let ca = site.home().join("ca.pem");
    std::fs::write(&ca, ours.pem()).unwrap();
    let tracker = site.tracker(&["--open", "--ca-file", ca.to_str().unwrap()]);
    let url = |port: u16| format!("Sm_url=https://localhost:{port}/hsm/v2");
    let failures = || {
        let (_, text) = tracker.get("/metrics");
        let line = text.lines().find_map(|line| line.strip_prefix("portcullis_heartbeat_manager_failures "));
        line.and_then(|number| number.parse::<u32>().ok()).unwrap_or(0)
    };
    let mut client = Client::connect(tracker.addr).unwrap();
    for listener in [&stranger, &misnamed] {
        site.juju(&["heartbeat", "params", &url(listener.port)]);
        assert_eq!(client.beat("x1c0").unwrap(), 200);
        let before = failures();
        wait_for("a call that fails", DEADLINE, || (failures() > before).then_some(()));
        wait_for("a handshake that is broken off", DEADLINE, || {
            (listener.broken.load(Ordering::SeqCst) > 0).then_some(())
        });
        assert_eq!(listener.done.load(Ordering::SeqCst), 0, "in spite of its certificate");
        assert!(listener.heard.lock().unwrap().is_empty(), "told something in spite of its certificate");
    }
    let hook = format!("Webhook_url=https://localhost:{}/told", good.port);
    site.juju(&["heartbeat", "params", &url(good.port), &hook]);
    wait_for("both told", DEADLINE, || {
        let heard = good.heard.lock().unwrap();
        let update = |line: &str| heard.iter().any(|got| got.head.starts_with(line));
        (update("PATCH /hsm/v2/State/Components/BulkStateData ") && update("POST /told ")).then_some(())
    });
    assert!(good.done.load(Ordering::SeqCst) >= 1);
    assert_eq!(good.broken.load(Ordering::SeqCst), 0);
    tracker.end();
}

#[test]
fn invalid_ca_files_are_refused_at_the_start() {
    let site = Site::new(Store::keeper());
    let path = site.home().join("ca.pem");
    for (text, problem) in [(None, "does not exist"), (Some("hello"), "no valid CA certificate in")] {
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
        let mut command = site.command("portcullis");
        command.args(["heartbeat", "--listen", "127.0.0.1:0", "--ca-file"]).arg(&path);
        let done = command.output().unwrap();
        let printed = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(1) && printed.contains(problem), "{printed}");
    }
}
