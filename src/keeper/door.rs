//! Where clients come in: listening sockets, and connections with TLS or without. Nothing here blocks, and nothing here
//! knows what the bytes mean.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;

use mio::event::Source;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Poll, Registry, Token};
use rustls::{ServerConfig, ServerConnection};

use super::start::KeeperError;

/// Where connections come in.
#[derive(Debug)]
pub struct Door {
    pub listener: TcpListener,
    pub addr: SocketAddr,
    /// Spoken on every connection, if any.
    pub tls: Option<Arc<ServerConfig>>,
}

impl Door {
    pub fn open(
        poll: &Poll,
        token: Token,
        addr: SocketAddr,
        tls: Option<Arc<ServerConfig>>,
    ) -> Result<Self, KeeperError> {
        let failed = |source| KeeperError::Listen { addr, source };
        let mut listener = TcpListener::bind(addr).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        poll.registry().register(&mut listener, token, Interest::READABLE).map_err(KeeperError::Poll)?;
        Ok(Door { listener, addr, tls })
    }
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream>),
}

#[derive(Debug)]
pub struct TlsStream {
    socket: TcpStream,
    session: ServerConnection,
    /// How reading ended, kept until what came before it has been handed out.
    ended: Option<io::Result<usize>>,
}

impl Stream {
    pub fn tls(socket: TcpStream, config: &Arc<ServerConfig>) -> io::Result<Self> {
        let session = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
        Ok(Stream::Tls(Box::new(TlsStream { socket, session, ended: None })))
    }

    /// Whether something is on its way that the socket has not taken, which the caller knows nothing of.
    pub fn holds_back(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => tls.session.wants_write(),
        }
    }

    /// Whether the next read tells an end that came in behind the bytes of the last. The socket may be silent from here
    /// on, so nothing else announces it.
    pub fn has_ended(&self) -> bool {
        matches!(self, Stream::Tls(tls) if tls.ended.is_some())
    }

    /// Ends the connection. Best effort: the peer may be gone already.
    pub fn end(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.session.send_close_notify();
            tls.pump().ok();
        }
        self.socket().shutdown(Shutdown::Both).ok();
    }

    fn socket(&mut self) -> &mut TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(tls) => &mut tls.socket,
        }
    }
}

impl TlsStream {
    /// Hands the socket what the session has for it.
    fn pump(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(err) if err.kind() == ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
        Ok(())
    }

    /// Takes from the socket what is there, and answers what TLS itself asks. False at its end.
    fn take_in(&mut self) -> io::Result<bool> {
        if self.session.read_tls(&mut self.socket)? == 0 {
            return Ok(false);
        }
        let processed = self.session.process_new_packets();
        // Also after an error: the alert says why.
        match self.pump() {
            Err(err) if err.kind() != ErrorKind::WouldBlock => return Err(err),
            _ => {}
        }
        processed.map_err(|err| io::Error::new(ErrorKind::InvalidData, err))?;
        Ok(true)
    }

    /// As much as fits, until the socket has nothing more: a short read of a socket that is reported once per change
    /// must mean that it is empty, or `ended` says how it ended.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.session.reader().read(&mut buffer[filled..]) {
                Ok(n) if n > 0 => filled += n,
                Err(err) if err.kind() == ErrorKind::WouldBlock && self.ended.is_none() => {
                    match self.take_in() {
                        Ok(true) => {}
                        Ok(false) => self.ended = Some(Ok(0)),
                        Err(err) if err.kind() == ErrorKind::Interrupted => {}
                        Err(err) if err.kind() == ErrorKind::WouldBlock && filled > 0 => break,
                        Err(err) if err.kind() == ErrorKind::WouldBlock => return Err(err),
                        // What came in before it is still to be read.
                        Err(err) => self.ended = Some(Err(err)),
                    }
                }
                // All is read that came before the end, be that a farewell, a failure, or neither.
                _ if filled > 0 => {
                    self.ended.get_or_insert(Ok(0));
                    break;
                }
                _ => return self.ended.take().unwrap_or(Ok(0)),
            }
        }
        Ok(filled)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(buffer),
            Stream::Tls(tls) => tls.fill(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(tls) => {
                // What does not fit into the session waits for what is in it.
                match tls.session.writer().write(bytes)? {
                    0 => tls.pump().and(Err(ErrorKind::Interrupted.into())),
                    n => Ok(n),
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.pump(),
        }
    }
}

impl Source for Stream {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket().register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket().reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.socket().deregister(registry)
    }
}
