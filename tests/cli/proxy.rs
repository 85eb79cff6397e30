//! A proxy in front of a store that delays data and fails after a limit.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Behaviour after the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// All connections are closed, and new ones, too.
    Cut,
    /// Connections stay open, and no data passes.
    Silence,
}

/// Closed with all its connections when dropped.
pub(crate) struct Proxy {
    addr: SocketAddr,
    state: Arc<State>,
}

struct State {
    /// Number of chunks of responses that still pass.
    answers: AtomicUsize,
    /// Number of chunks that clients have sent.
    sent: AtomicUsize,
    then: Then,
    delay: Duration,
    ended: AtomicBool,
}

impl Proxy {
    pub(crate) fn start(to: SocketAddr, answers: usize, then: Then, delay: Duration) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let addr = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            answers: AtomicUsize::new(answers),
            sent: AtomicUsize::new(0),
            then,
            delay,
            ended: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.ended.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(server) = TcpStream::connect(to) {
                    accepting.clone().join(client, server);
                }
            }
        });
        Self { addr, state }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Number of chunks that clients have sent so far.
    pub(crate) fn chunks_sent(&self) -> usize {
        self.state.sent.load(Ordering::Acquire)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::Release);
        // Wakes the accepting thread, if it still runs.
        let _ = TcpStream::connect(self.addr);
    }
}

impl State {
    fn join(self: Arc<Self>, client: TcpStream, server: TcpStream) {
        let (from_client, to_client) = (client.try_clone().expect("a handle"), client);
        let (from_server, to_server) = (server.try_clone().expect("a handle"), server);
        let asking = Arc::clone(&self);
        thread::spawn(move || asking.pass(from_client, to_server, false));
        thread::spawn(move || self.pass(from_server, to_client, true));
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream, counted: bool) {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if !counted {
                self.sent.fetch_add(1, Ordering::AcqRel);
            }
            let spent = counted
                && self
                    .answers
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1))
                    .is_err();
            match (spent, self.then) {
                (true, Then::Cut) => break,
                (true, Then::Silence) => continue,
                (false, _) => {}
            }
            thread::sleep(self.delay);
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        // Either side may be closed already.
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}
