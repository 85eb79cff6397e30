//! Beats at the pace of machines: each of 10,000 keeps its connection and beats every three
//! seconds, over plain TCP and over TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::Row;
use crate::authority::TestCa;
use crate::harness::Store;
use crate::load::request;
use crate::measure::{NAMES, beat_all, cpu};
use crate::process::Site;

const PERIOD: Duration = Duration::from_secs(3);
/// Measured periods, after one that is not measured.
const PERIODS: u32 = 8;
const THREADS: usize = 2;

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

/// The request of a machine and its connection.
type Machine = (Vec<u8>, Box<dyn Stream>);

/// Opens the connections of all machines, divided among the threads.
fn connect(addr: SocketAddr, tls: Option<&Arc<ClientConfig>>) -> Vec<Vec<Machine>> {
    let one = |number: usize| {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        let stream: Box<dyn Stream> = match tls {
            None => Box::new(stream),
            Some(config) => {
                let name = ServerName::try_from("localhost").unwrap();
                let client = ClientConnection::new(Arc::clone(config), name).unwrap();
                Box::new(StreamOwned::new(client, stream))
            }
        };
        let mut machine = (request(number), stream);
        // A connection that sends nothing is closed.
        beat(&mut machine);
        machine
    };
    (0..THREADS).map(|thread| (thread..NAMES).step_by(THREADS).map(one).collect()).collect()
}

fn beat((request, stream): &mut Machine) {
    stream.write_all(request).unwrap();
    stream.flush().unwrap();
    let (mut buffer, mut length) = ([0; 1024], 0);
    while !buffer[..length].ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut buffer[length..]).unwrap();
        assert!(read > 0, "the tracker closed a connection");
        length += read;
    }
    assert!(buffer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&buffer));
}

/// Beats for some periods, spread evenly over each.
fn beats(machines: &mut [Vec<Machine>], periods: u32) {
    let begun = Instant::now();
    scope(|scope| {
        for machines in machines {
            scope.spawn(move || {
                let count = u32::try_from(machines.len()).unwrap();
                for period in 0..periods {
                    for (number, machine) in (0..count).zip(machines.iter_mut()) {
                        let due = begun + PERIOD * period + PERIOD * number / count;
                        sleep(due.saturating_duration_since(Instant::now()));
                        beat(machine);
                    }
                }
            });
        }
    });
}

pub(crate) fn tls() -> Vec<Row> {
    let site = Site::new(Store::keeper());
    let (ca, directory) = (TestCa::new(), tempfile::tempdir().unwrap());
    let files = ca.write_identity(directory.path());
    let [cert, key] = [files.certificates, files.key].map(|path| path.display().to_string());
    let args = ["--open", "--tls-listen", "127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key];
    let tracker = site.tracker(&args);
    beat_all(&tracker, NAMES);
    let mut roots = RootCertStore::empty();
    roots.add(ca.der()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let secure = tracker.secure.unwrap();
    let [plain, tls] = [(tracker.addr, None), (secure, Some(&config))].map(|(addr, config)| {
        let mut machines = connect(addr, config);
        beats(&mut machines, 1);
        let before = cpu(tracker.pid());
        beats(&mut machines, PERIODS);
        (cpu(tracker.pid()) - before).as_secs_f64() / (PERIOD * PERIODS).as_secs_f64() * 100.0
    });
    vec![Row {
        what: "10,000 machines, a beat in 3 s: CPU with TLS (plain)",
        ours: format!("{tls:.1} % ({plain:.1} %)"),
        theirs: "",
        goal: "2x",
        met: tls <= 2.0 * plain,
    }]
}
