//! A way to a store that can be slow, or end in the middle: bytes are passed on until a limit, then nothing more.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// What happens to a connection once its limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Every connection is cut, and new ones too.
    Cut,
    /// Connections stay open and nothing passes any more.
    Silence,
}

/// Ends, with all its connections, when dropped.
pub(crate) struct Proxy {
    addr: SocketAddr,
    state: Arc<State>,
}

struct State {
    /// How many chunks of answers still pass.
    answers: AtomicUsize,
    /// How many chunks clients have sent.
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

    /// How many chunks of requests clients have sent so far.
    pub(crate) fn chunks_sent(&self) -> usize {
        self.state.sent.load(Ordering::Acquire)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::Release);
        // Wakes the accepting thread; if it is gone already there is nothing to wake.
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
        // Either side may be gone already, which is what is wanted.
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}
