//! One request of any kind on a connection: reads its head and body within the limits, checks the
//! framing, asks the handler, and writes the reply. The decisions about framing are in `framing`
//! and `chunked`.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes, BytesMut};
use httparse::EMPTY_HEADER;
use hyper::http::request::Parts;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::buffer_limits::Reservation;
use super::chunked::Chunked;
use super::fast_path::now;
use super::framing::{self, BodyLength, Expect, Invalid};
use super::message::{BodyError, Reply, Request, Wire};
use super::server::{Caller, Endpoint, Handler, Limits, TOO_SLOW};
use crate::net::tls::refused_client::{TLS_HANDSHAKE, UNEXPECTED_TLS};
use crate::runtime::service::stopped;

/// Header fields of a request.
const MAX_HEADERS: usize = 100;

/// Bytes that one read takes at most.
const READ_BYTES: usize = 64 * 1024;

/// While a stream is sent to a client, the client may send this much of its next request.
const AHEAD_BYTES: usize = 4 * 1024;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
const SLOW_HEAD: &str = "The request head did not come in time";
const NO_BUFFER: &str = "Too much unfinished input; try again later";

thread_local! {
    /// All connections of a thread read into this buffer in turn, and keep only what they received:
    /// an idle connection, or one with a slow head, has no buffer of a fixed size.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Reads once and calls `take` with the new bytes.
pub(super) fn poll_received<S: AsyncRead + Unpin, R>(
    stream: &mut S,
    cx: &mut Context<'_>,
    take: impl FnOnce(&[u8]) -> R,
) -> Poll<io::Result<R>> {
    let mut buffer = BUFFER.take();
    buffer.resize(READ_BYTES, 0);
    let mut filled = ReadBuf::new(&mut buffer);
    let polled = Pin::new(stream).poll_read(cx, &mut filled);
    let taken = polled.map_ok(|()| take(filled.filled()));
    BUFFER.set(buffer);
    taken
}

/// Appends the next bytes to `read`; 0 at the end of the connection. Cancel-safe.
async fn receive<S: AsyncRead + Unpin>(stream: &mut S, read: &mut BytesMut) -> io::Result<usize> {
    poll_fn(|cx| {
        poll_received(stream, cx, |bytes| {
            read.extend_from_slice(bytes);
            bytes.len()
        })
    })
    .await
}

/// A request that the server answers without calling the handler; its connection is then closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    Invalid(Invalid),
    SlowHead,
    /// The limits for unfinished requests are reached.
    NoBuffer,
    /// The client closed the connection, or sent no request before the idle timeout.
    Silently,
}

impl From<Invalid> for Refused {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

impl Refused {
    fn reply(self) -> Option<Reply> {
        match self {
            Self::Invalid(invalid) => Some(Reply::refused(invalid.status(), &invalid.to_string())),
            Self::SlowHead => Some(Reply::refused(408, SLOW_HEAD)),
            Self::NoBuffer => Some(Reply::unavailable(NO_BUFFER)),
            Self::Silently => None,
        }
    }
}

/// A checked head.
struct Asked {
    head: Parts,
    body: BodyLength,
    keep_alive: bool,
    expect: Expect,
    wire: Wire,
}

/// Takes a whole head off the front of `read`.
fn take_head(read: &mut BytesMut, limits: &Limits) -> Result<Option<Asked>, Invalid> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let most = read.len().min(limits.head_bytes);
    let Some(head) = framing::head(&read[..most], &mut headers)? else {
        return if read.len() < limits.head_bytes { Ok(None) } else { Err(Invalid::HeadTooLarge) };
    };
    let asked = Asked {
        head: Request::head(head.method, head.target, head.headers).ok_or(Invalid::Syntax)?,
        body: head.body,
        keep_alive: head.keep_alive,
        expect: head.expect,
        wire: Wire { without_body: head.method == "HEAD", chunks: head.http_11, close: false },
    };
    let bytes = head.bytes;
    read.advance(bytes);
    Ok(Some(asked))
}

/// A connection, between two requests or in one.
pub(super) struct Exchange<'a, S, H> {
    pub(super) stream: S,
    /// Received and not yet used.
    pub(super) read: &'a mut BytesMut,
    pub(super) caller: &'a Caller,
    pub(super) endpoint: &'a Endpoint<H>,
    pub(super) stop: watch::Receiver<bool>,
    /// When the bytes in `read` began to come.
    pub(super) since: Instant,
}

impl<S: AsyncRead + AsyncWrite + Unpin, H: Handler> Exchange<'_, S, H> {
    /// Serves one request. Returns whether another one may follow on the connection; if not, the
    /// connection is closed.
    pub(super) async fn serve(mut self) -> io::Result<bool> {
        let mut pending = self.endpoint.buffers.pending(self.caller.peer.ip());
        let (reply, mut wire, whole) = match self.request(&mut pending).await {
            Ok((request, wire, keep_alive)) => {
                let failed = request.body.as_ref().err().copied();
                let answer = self.endpoint.handler.answer(request);
                let reply = timeout(self.endpoint.limits.request_time, answer).await;
                let reply = reply.unwrap_or_else(|_| Reply::unavailable(TOO_SLOW));
                let reply =
                    if failed == Some(BodyError::Busy) { reply.with("retry-after", "1") } else { reply };
                let close = !keep_alive || failed.is_some() || *self.stop.borrow();
                (reply, Wire { close, ..wire }, failed.is_none())
            }
            Err(refused) => {
                let Some(reply) = refused.reply() else { return Ok(false) };
                (reply, Wire { without_body: false, chunks: true, close: true }, false)
            }
        };
        drop(pending);
        wire.close |= reply.closes();
        let mut bytes = Vec::new();
        let stream = reply.write_to(&mut bytes, &now(), wire);
        self.stream.write_all(&bytes).await?;
        let ended = match stream {
            Some(pieces) => self.send_stream(pieces, wire).await?,
            None => true,
        };
        self.stream.flush().await?;
        if !wire.close && ended {
            return Ok(true);
        }
        self.stream.shutdown().await?;
        if !whole {
            self.discard().await;
        }
        Ok(false)
    }

    async fn request(&mut self, pending: &mut Reservation) -> Result<(Request, Wire, bool), Refused> {
        let (asked, due) = self.head(pending).await?;
        let Asked { head, body, keep_alive, expect, wire } = asked;
        if expect == Expect::Unknown {
            return Err(Invalid::Expectation.into());
        }
        let limits = &self.endpoint.limits;
        let allowed = limits.body_limit(head.uri.path());
        // A length that was not announced may be anything that is allowed.
        let length = match body {
            BodyLength::Exactly(length) => usize::try_from(length).unwrap_or(usize::MAX),
            BodyLength::Chunked => allowed,
        };
        let room = limits.large(length).filter(|_| length <= allowed);
        let room = room.map(|bytes| self.endpoint.buffers.large(self.caller.peer.ip(), bytes));
        let body = if length > allowed {
            Err(BodyError::TooLarge)
        } else if matches!(room, Some(None)) {
            Err(BodyError::Busy)
        } else {
            let counted = room.is_none().then_some(pending);
            let expected = expect == Expect::Continue && length > 0 && self.read.is_empty();
            let reading = self.body(body, allowed, expected, counted);
            timeout_at(due, reading).await.unwrap_or(Ok(Err(BodyError::TooSlow)))?
        };
        let Caller { peer, certificate } = self.caller.clone();
        Ok((Request { head, body, peer, certificate, _room: room.flatten() }, wire, keep_alive))
    }

    /// Logs a client that begins a TLS handshake.
    fn log_tls(&self) {
        if self.read.first() == Some(&TLS_HANDSHAKE) {
            self.endpoint.refused.log(self.caller.peer, &UNEXPECTED_TLS);
        }
    }

    /// The head, and when the body has to be complete.
    async fn head(&mut self, pending: &mut Reservation) -> Result<(Asked, Instant), Refused> {
        let limits = self.endpoint.limits;
        let head_time = limits.head_time.min(limits.request_time);
        let mut begun = !self.read.is_empty();
        let mut received = false;
        let mut due = self.since + if begun { head_time } else { limits.head_time };
        loop {
            if !self.read.is_empty() && !begun {
                begun = true;
                due = Instant::now() + head_time;
            }
            if begun && let Some(asked) = take_head(self.read, &limits).inspect_err(|_| self.log_tls())? {
                // Time already spent waiting for the body counts towards its limit.
                let since = if received { Instant::now() } else { self.since };
                return Ok((asked, since + limits.request_time));
            }
            if !pending.grow_to(self.read.capacity()) {
                return Err(Refused::NoBuffer);
            }
            let more = timeout_at(due, receive(&mut self.stream, self.read));
            let more = tokio::select! {
                more = more => more,
                () = stopped(&mut self.stop), if !begun => return Err(Refused::Silently),
            };
            match more {
                Ok(Ok(1..)) => received = true,
                Err(_) if begun => return Err(Refused::SlowHead),
                _ => return Err(Refused::Silently),
            }
        }
    }

    /// Reads the body; `counted` is for a body that does not count as a large one.
    async fn body(
        &mut self,
        length: BodyLength,
        allowed: usize,
        expected: bool,
        mut counted: Option<&mut Reservation>,
    ) -> Result<Result<Bytes, BodyError>, Refused> {
        if expected && self.stream.write_all(CONTINUE).await.is_err() {
            return Err(Refused::Silently);
        }
        let (mut chunked, mut body) = (Chunked::default(), BytesMut::new());
        loop {
            match length {
                BodyLength::Exactly(length) => {
                    let length = usize::try_from(length).unwrap_or(usize::MAX);
                    if self.read.len() >= length {
                        return Ok(Ok(self.read.split_to(length).freeze()));
                    }
                }
                BodyLength::Chunked => {
                    let mut total = body.len();
                    let used = chunked.read(self.read, |data| {
                        total += data.len();
                        if total <= allowed {
                            body.extend_from_slice(data);
                        }
                    })?;
                    self.read.advance(used);
                    if total > allowed {
                        return Ok(Err(BodyError::TooLarge));
                    }
                    if chunked.is_done() {
                        return Ok(Ok(body.freeze()));
                    }
                }
            }
            let held = self.read.capacity() + body.capacity();
            if counted.as_mut().is_some_and(|counted| !counted.grow_to(held)) {
                return Ok(Err(BodyError::Busy));
            }
            match receive(&mut self.stream, self.read).await {
                Ok(1..) => {}
                _ => return Ok(Err(BodyError::Broken)),
            }
        }
    }

    /// Sends the pieces of a reply as they come. Returns whether the reply has come to its end: a
    /// client that is gone, or a server that stops, ends it early.
    async fn send_stream(&mut self, mut pieces: mpsc::Receiver<Bytes>, wire: Wire) -> io::Result<bool> {
        let whole = loop {
            let piece = tokio::select! {
                piece = pieces.recv() => piece,
                received = receive(&mut self.stream, self.read), if self.read.len() < AHEAD_BYTES => {
                    if received? == 0 {
                        return Ok(false);
                    }
                    continue;
                }
                () = stopped(&mut self.stop) => break false,
            };
            let Some(piece) = piece else { break true };
            if piece.is_empty() {
                continue;
            }
            if wire.chunks {
                let size = format!("{:x}\r\n", piece.len());
                self.stream.write_all(&[size.as_bytes(), &piece, b"\r\n"].concat()).await?;
            } else {
                self.stream.write_all(&piece).await?;
            }
            self.stream.flush().await?;
        };
        if wire.chunks {
            self.stream.write_all(b"0\r\n\r\n").await?;
        }
        Ok(whole)
    }

    /// Reads the rest of a refused request for a while: a connection that is closed with unread
    /// bytes is reset, and its client might never see the reply.
    async fn discard(&mut self) {
        let limits = self.endpoint.limits;
        let mut left = limits.spill_bytes;
        // The reservation of the request is free already, so no buffer may stay.
        *self.read = BytesMut::new();
        let discarding = async {
            loop {
                match poll_fn(|cx| poll_received(&mut self.stream, cx, <[u8]>::len)).await {
                    Ok(bytes @ 1..) if bytes < left => left -= bytes,
                    _ => break,
                }
            }
        };
        // The connection is closed after a timeout as well.
        let _ = timeout(limits.request_time, discarding).await;
    }
}
