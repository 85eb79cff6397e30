//! Non-blocking sockets: listeners, and connections with or without TLS. Interpreting the bytes
//! does not belong here.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;

use mio::event::Source;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Poll, Registry, Token};
use rustls::{ServerConfig, ServerConnection};

use super::handle::KeeperError;
use crate::net::tls::ServerTls;

/// A bound listening socket.
#[derive(Debug)]
pub struct Listener {
    pub socket: TcpListener,
    pub addr: SocketAddr,
    /// The TLS configuration of every accepted connection; `None` accepts plain TCP.
    pub tls: Option<ServerTls>,
}

impl Listener {
    pub fn open(
        poll: &Poll,
        token: Token,
        addr: SocketAddr,
        tls: Option<ServerTls>,
    ) -> Result<Self, KeeperError> {
        let failed = |source| KeeperError::Listen { addr, source };
        let mut socket = TcpListener::bind(addr).map_err(failed)?;
        let addr = socket.local_addr().map_err(failed)?;
        poll.registry().register(&mut socket, token, Interest::READABLE).map_err(KeeperError::Poll)?;
        Ok(Listener { socket, addr, tls })
    }
}

/// An accepted connection.
#[derive(Debug)]
pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream>),
}

#[derive(Debug)]
pub struct TlsStream {
    socket: TcpStream,
    session: ServerConnection,
    /// How reading ended; reported only after all bytes before the end have been returned.
    ended: Option<io::Result<usize>>,
}

impl Stream {
    pub fn tls(socket: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self> {
        let session = ServerConnection::new(config).map_err(io::Error::other)?;
        Ok(Stream::Tls(Box::new(TlsStream { socket, session, ended: None })))
    }

    /// Returns whether TLS records wait for the socket to become writable. They do not show up in
    /// the caller's own buffers.
    pub fn has_unsent_records(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => tls.session.wants_write(),
        }
    }

    /// Returns whether the next read reports an end of stream that arrived behind the bytes of the
    /// last read. The socket may produce no further event, so the caller has to read again.
    pub fn has_ended(&self) -> bool {
        matches!(self, Stream::Tls(tls) if tls.ended.is_some())
    }

    /// Ends the connection. Best effort: the peer may have disconnected already.
    pub fn end(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.session.send_close_notify();
            tls.write_records().ok();
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
    /// Writes pending TLS records to the socket.
    fn write_records(&mut self) -> io::Result<()> {
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

    /// Reads TLS records from the socket and sends the replies that TLS itself requires. Returns
    /// false at the end of the stream.
    fn read_records(&mut self) -> io::Result<bool> {
        if self.session.read_tls(&mut self.socket)? == 0 {
            return Ok(false);
        }
        let processed = self.session.process_new_packets();
        // Also after an error: the TLS alert contains the reason.
        match self.write_records() {
            Err(err) if err.kind() != ErrorKind::WouldBlock => return Err(err),
            _ => {}
        }
        processed.map_err(|err| io::Error::new(ErrorKind::InvalidData, err))?;
        Ok(true)
    }

    /// Fills `buffer` until the socket has no more bytes. Readiness is edge-triggered: after a
    /// short read either the socket is empty, or `ended` holds the end of the stream.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.session.reader().read(&mut buffer[filled..]) {
                Ok(n) if n > 0 => filled += n,
                Err(err) if err.kind() == ErrorKind::WouldBlock && self.ended.is_none() => {
                    match self.read_records() {
                        Ok(true) => {}
                        Ok(false) => self.ended = Some(Ok(0)),
                        Err(err) if err.kind() == ErrorKind::Interrupted => {}
                        Err(err) if err.kind() == ErrorKind::WouldBlock && filled > 0 => break,
                        Err(err) if err.kind() == ErrorKind::WouldBlock => return Err(err),
                        // The bytes before the error are returned first.
                        Err(err) => self.ended = Some(Err(err)),
                    }
                }
                // All bytes before the end have been read; the end may be clean, an error, or
                // abrupt.
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
                // A full session buffer has to be written before it takes more bytes.
                match tls.session.writer().write(bytes)? {
                    0 => tls.write_records().and(Err(ErrorKind::Interrupted.into())),
                    n => Ok(n),
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.write_records(),
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
