//! Sends beats as fast as the tracker accepts them, over persistent connections. It measures
//! nothing itself.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

pub(crate) fn name(number: usize) -> String {
    format!("x{}c{}s{}b{}n{}", number / 1024, number / 256 % 4, number / 32 % 8, number / 16 % 2, number % 16)
}

pub(crate) fn request(number: usize) -> Vec<u8> {
    let body = format!(
        "{{\"Component\":\"{}\",\"Hostname\":\"nid{number:06}\",\"NID\":\"{number}\",\"Status\":\"OK\",\
         \"Timestamp\":\"2026-01-01T00:00:00Z\"}}",
        name(number)
    );
    format!(
        "POST /hmi/v1/heartbeat HTTP/1.1\r\nhost: hbtd\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Returns a list of beats in the format of a relay.
pub(crate) fn relay_body(numbers: std::ops::Range<usize>) -> Vec<u8> {
    let one = |number| {
        format!(
            "{{\"Component\":\"{}\",\"Hostname\":\"h\",\"NID\":\"1\",\"Status\":\"OK\",\"Timestamp\":\"t\"}}",
            name(number)
        )
    };
    format!("[{}]", numbers.map(one).collect::<Vec<_>>().join(",")).into_bytes()
}

/// The parameters of a load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) threads: usize,
    pub(crate) connections: usize,
    /// Requests that a connection sends before it reads.
    pub(crate) pipelined: usize,
    pub(crate) names: usize,
}

/// Connected clients, divided among the threads.
pub(crate) struct Clients {
    shape: Shape,
    streams: Vec<Vec<TcpStream>>,
}

pub(crate) fn connect(addr: SocketAddr, shape: Shape) -> Clients {
    let one = || {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    };
    let share = || (0..shape.connections / shape.threads).map(|_| one()).collect();
    Clients { shape, streams: (0..shape.threads).map(|_| share()).collect() }
}

impl Clients {
    /// Sends beats for `time` and returns the number of responses with status 200.
    pub(crate) fn run(&mut self, time: Duration) -> u64 {
        let (taken, stop, shape) = (AtomicU64::new(0), AtomicBool::new(false), self.shape);
        scope(|scope| {
            for (thread, streams) in self.streams.iter_mut().enumerate() {
                let (taken, stop) = (&taken, &stop);
                scope.spawn(move || send(streams, shape, thread, taken, stop));
            }
            let end = Instant::now() + time;
            while Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
            stop.store(true, Ordering::Relaxed);
        });
        taken.into_inner()
    }
}

fn send(streams: &mut [TcpStream], shape: Shape, thread: usize, taken: &AtomicU64, stop: &AtomicBool) {
    let mine: Vec<Vec<u8>> = (thread..shape.names).step_by(shape.threads).map(request).collect();
    let (mut next, mut buffer) = (0, vec![0; 64 * 1024]);
    while !stop.load(Ordering::Relaxed) {
        for stream in streams.iter_mut() {
            let mut bytes = Vec::new();
            for _ in 0..shape.pipelined {
                bytes.extend_from_slice(&mine[next % mine.len()]);
                next += 1;
            }
            stream.write_all(&bytes).unwrap();
        }
        for stream in streams.iter_mut() {
            let (mut seen, mut text) = (0, Vec::new());
            while seen < shape.pipelined {
                let read = stream.read(&mut buffer).unwrap();
                assert!(read > 0, "the tracker closed a connection");
                text.extend_from_slice(&buffer[..read]);
                seen = text.windows(4).filter(|end| end == b"\r\n\r\n").count();
            }
            let good = text.windows(12).filter(|line| line == b"HTTP/1.1 200").count();
            assert_eq!(good, shape.pipelined, "{}", String::from_utf8_lossy(&text));
            taken.fetch_add(good as u64, Ordering::Relaxed);
        }
    }
}
