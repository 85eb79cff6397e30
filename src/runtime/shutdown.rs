//! When to stop: the first SIGTERM or SIGINT.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The two signals that ask a process to end, caught from the moment this is made.
#[derive(Debug)]
pub struct Shutdown {
    terminate: Signal,
    interrupt: Signal,
}

impl Shutdown {
    /// Must be made on a running tokio runtime, before anything is started that has to be stopped in order.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The name of the signal that came. Cancel-safe.
    pub async fn asked(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
