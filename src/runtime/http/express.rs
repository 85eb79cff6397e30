//! The short way through a door: whole POST requests of the plainest kind, answered straight from the buffer that they came
//! in, all that are there at once. Whatever is the least bit unusual (another method or version, chunks, expectations, a
//! body that is too large, a sender that dawdles, nonsense) goes with every byte of it to the HTTP library, which knows
//! how to be right about it, and the connection stays there.

use std::cell::{Cell, RefCell};
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf as _, BytesMut};
use httparse::{EMPTY_HEADER, Header, Status};
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, timeout};

use super::message::{Reply, Request};
use super::share::Shared;
use super::{Handler, Limits, TOO_SLOW, stopped};

/// Headers of a request that is plain enough.
const MAX_HEADERS: usize = 24;

/// Room for what is read at once. A beat has some 250 bytes.
const ROOM_BYTES: usize = 64 * 1024;

/// A request that is still not whole after this long is not for here.
const DAWDLING: Duration = Duration::from_secs(1);

/// A request as it lies in the buffer.
#[derive(Debug)]
pub struct Glance<'a> {
    /// Path and query, as they were sent.
    pub target: &'a str,
    pub(super) headers: &'a [Header<'a>],
    pub body: &'a [u8],
}

/// What lies at the beginning of the buffer.
#[derive(Debug)]
enum Found<'a> {
    /// A request, and how long it is.
    Whole(Glance<'a>, usize),
    /// Less than a request; how long it and its body will be, if that is known.
    Part {
        length: usize,
        body: usize,
    },
    Unusual,
}

fn find<'a>(bytes: &'a [u8], headers: &'a mut [Header<'a>], limits: &Limits) -> Found<'a> {
    const METHOD: &[u8] = b"POST ";
    if !bytes.starts_with(&METHOD[..METHOD.len().min(bytes.len())]) {
        return Found::Unusual;
    }
    let mut request = httparse::Request::new(headers);
    let head = match request.parse(bytes) {
        Ok(Status::Complete(head)) if head <= limits.head_bytes => head,
        Ok(Status::Partial) if bytes.len() < limits.head_bytes => return Found::Part { length: 0, body: 0 },
        _ => return Found::Unusual,
    };
    let httparse::Request { path: Some(target), version: Some(1), headers, .. } = request else {
        return Found::Unusual;
    };
    let path = target.split('?').next().unwrap_or(target);
    let Some(length) = body_length(headers).filter(|length| *length <= limits.body_limit(path)) else {
        return Found::Unusual;
    };
    match bytes.get(head..head + length) {
        Some(body) => Found::Whole(Glance { target, headers, body }, head + length),
        None => Found::Part { length: head + length, body: length },
    }
}

/// How long the body is; none if that, or anything else about the connection, is not plain.
fn body_length(headers: &[Header<'_>]) -> Option<usize> {
    let mut length = None;
    for header in headers {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let plain = length.is_none() && header.value.iter().all(u8::is_ascii_digit);
            let text = std::str::from_utf8(header.value).ok().filter(|_| plain)?;
            length = Some(text.parse().ok()?);
        } else if is("connection") && !header.value.eq_ignore_ascii_case(b"keep-alive")
            || is("transfer-encoding")
            || is("expect")
            || is("upgrade")
        {
            return None;
        }
    }
    Some(length.unwrap_or(0))
}

/// What is to be done after everything that could be answered at once was.
enum Step {
    /// Needs a thought.
    Ask(Box<Request>),
    /// The rest of a request has to come first; how long it and its body will be, if that is known.
    Read {
        length: usize,
        body: usize,
    },
    HandOver,
}

/// What a read came to: how many bytes, how many of all that are there were answered, and what is to be done then.
struct Turn {
    got: usize,
    done: usize,
    step: Step,
}

/// A connection whose requests were plain so far.
pub(super) struct Plain<'a, H> {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) limits: &'a Limits,
    pub(super) handler: &'a H,
    pub(super) shared: &'a Arc<Shared>,
    pub(super) stop: watch::Receiver<bool>,
}

impl<H: Handler> Plain<'_, H> {
    /// Serves the connection for as long as its requests are plain. What comes back, with what was read of it already, is
    /// for the HTTP library; nothing comes back of a connection that has ended.
    pub(super) async fn serve(mut self) -> io::Result<Option<(TcpStream, BytesMut)>> {
        let mut stop = self.stop.clone();
        let mut stopping = pin!(stopped(&mut stop));
        let mut timer = pin!(tokio::time::sleep(self.limits.head_time));
        let (mut read, mut answers) = (BytesMut::new(), Vec::new());
        let mut since = Instant::now();
        let mut step = Step::Read { length: 0, body: 0 };
        // Of a large body that is on its way, or being answered.
        let mut share = None;
        loop {
            let length = match step {
                Step::HandOver => return Ok(Some((self.stream, read))),
                Step::Ask(request) => {
                    let reply = timeout(self.limits.request_time, self.handler.answer(*request)).await;
                    reply.unwrap_or_else(|_| Reply::unavailable(TOO_SLOW)).push_onto(&mut answers, &now())?;
                    let done;
                    (step, done) = self.answer_all(&read, &mut answers);
                    read.advance(done);
                    self.write(&mut answers).await?;
                    (since, share) = (Instant::now(), None);
                    continue;
                }
                Step::Read { length, body } => {
                    if let Some(bytes) = self.limits.large(body).filter(|_| share.is_none()) {
                        share = self.shared.bytes(self.peer.ip(), bytes);
                        if share.is_none() {
                            return Ok(Some((self.stream, read)));
                        }
                    }
                    length
                }
            };
            // Also for one who always has another request.
            if read.is_empty() && *self.stop.borrow() {
                return Ok(None);
            }
            let due = since + if read.is_empty() { self.limits.head_time } else { DAWDLING };
            if timer.deadline() > due {
                timer.as_mut().reset(due);
            }
            let begun = read.is_empty();
            if begun {
                // What an idle connection had room for goes back.
                read = BytesMut::new();
            } else {
                read.reserve(length.saturating_sub(read.len()));
            }
            let waiting = poll_fn(|cx| match self.poll_turn(&mut read, &mut answers, cx) {
                Poll::Ready(turn) => Poll::Ready(Some(turn)),
                Poll::Pending if stopping.as_mut().poll(cx).is_ready() => Poll::Ready(None),
                Poll::Pending => poll_until(timer.as_mut(), due, cx).map(|()| None),
            });
            match waiting.await.transpose()? {
                // The end of waiting, or of the connection.
                None | Some(Turn { got: 0, .. }) => {
                    return Ok(if read.is_empty() { None } else { Some((self.stream, read)) });
                }
                Some(turn) => {
                    if begun || turn.done > 0 {
                        since = Instant::now();
                    }
                    step = turn.step;
                }
            }
            if !answers.is_empty() {
                self.write(&mut answers).await?;
            }
        }
    }

    /// Answers what can be answered without a thought. Says how much of the bytes is done with.
    fn answer_all(&self, bytes: &[u8], answers: &mut Vec<u8>) -> (Step, usize) {
        let mut done = 0;
        loop {
            let mut headers = [EMPTY_HEADER; MAX_HEADERS];
            match find(&bytes[done..], &mut headers, self.limits) {
                Found::Unusual => return (Step::HandOver, done),
                Found::Part { length, body } => return (Step::Read { length, body }, done),
                Found::Whole(glance, length) => {
                    if self.handler.taken_at_once(&glance) {
                        done += length;
                        push_taken(answers);
                        continue;
                    }
                    let Some(request) = Request::of(&glance, self.peer) else {
                        return (Step::HandOver, done);
                    };
                    return (Step::Ask(Box::new(request)), done + length);
                }
            }
        }
    }

    /// Reads what has come into the room that all connections of this thread use in turn, and answers it from there. Only
    /// what is left is kept with the connection: of thousands that beat now and then, none needs room of its own.
    fn poll_turn(
        &mut self,
        read: &mut BytesMut,
        answers: &mut Vec<u8>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Turn>> {
        let mut room = ROOM.take();
        room.resize(ROOM_BYTES, 0);
        let mut filled = ReadBuf::new(&mut room);
        // Knows from a read that got less than it could that there is no more, and does not ask again.
        let polled = Pin::new(&mut self.stream).poll_read(cx, &mut filled);
        let turn = polled.map_ok(|()| {
            let got = filled.filled();
            let (step, done);
            if read.is_empty() {
                (step, done) = self.answer_all(got, answers);
                read.extend_from_slice(&got[done..]);
            } else {
                read.extend_from_slice(got);
                (step, done) = self.answer_all(read, answers);
                read.advance(done);
            }
            Turn { got: got.len(), done, step }
        });
        ROOM.set(room);
        turn
    }

    /// A client that takes nothing for too long is given up.
    async fn write(&mut self, answers: &mut Vec<u8>) -> io::Result<()> {
        let mut left = &answers[..];
        while !left.is_empty() {
            match self.stream.try_write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    timeout(self.limits.write_time, self.stream.writable()).await??;
                }
                Err(error) => return Err(error),
            }
        }
        // The next connection makes use of it before this one does.
        *answers = Vec::new();
        Ok(())
    }
}

/// The timer is set anew only when it has run out, and not with each request.
fn poll_until(mut timer: Pin<&mut Sleep>, due: Instant, cx: &mut Context<'_>) -> Poll<()> {
    while timer.as_mut().poll(cx).is_ready() {
        if Instant::now() >= due {
            return Poll::Ready(());
        }
        timer.as_mut().reset(due);
    }
    Poll::Pending
}

thread_local! {
    /// Where connections read to whose last request was whole.
    static ROOM: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };

    /// The answer to what was taken, and the second that it is of.
    static TAKEN: RefCell<(u64, Vec<u8>)> = const { RefCell::new((0, Vec::new())) };
}

fn push_taken(answers: &mut Vec<u8>) {
    let second = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    TAKEN.with_borrow_mut(|(of, answer)| {
        if *of != second || answer.is_empty() {
            *of = second;
            *answer = format!("HTTP/1.1 200 OK\r\ncontent-length: 0\r\ndate: {}\r\n\r\n", now()).into_bytes();
        }
        answers.extend_from_slice(answer);
    });
}

pub(super) fn now() -> String {
    httpdate::fmt_http_date(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(bytes: &[u8]) -> &'static str {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let limits =
            Limits { head_bytes: 200, body_bytes: 10, large_bodies: &[("/l", 20)], ..Limits::default() };
        match find(bytes, &mut headers, &limits) {
            Found::Whole(..) => "whole",
            Found::Part { .. } => "part",
            Found::Unusual => "unusual",
        }
    }

    #[test]
    fn only_the_plainest_requests_are_for_here() {
        let post = |headers: &str, body: &str| format!("POST /a HTTP/1.1\r\n{headers}\r\n{body}");
        for (request, expected) in [
            (String::new(), "part"),
            ("POS".to_owned(), "part"),
            (post("Content-Length: 3\r\n", "xyz"), "whole"),
            (post("Content-Length: 3\r\n", "xyzPOST"), "whole"),
            (post("Content-Length: 3\r\n", "xy"), "part"),
            (post("", ""), "whole"),
            (post("Connection: Keep-Alive\r\nContent-Length: 0\r\n", ""), "whole"),
            (post("Connection: close\r\n", ""), "unusual"),
            (post("Expect: 100-continue\r\nContent-Length: 3\r\n", ""), "unusual"),
            (post("Transfer-Encoding: chunked\r\n", ""), "unusual"),
            (post("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "xyz"), "unusual"),
            (post("Content-Length: 3\r\ncontent-length: 4\r\n", "xyz"), "unusual"),
            (post("Content-Length: 3\r\ncontent-length: 3\r\n", "xyz"), "unusual"),
            (post("Content-Length: +3\r\n", "xyz"), "unusual"),
            (post("Content-Length: 3, 3\r\n", "xyz"), "unusual"),
            (post("Content-Length:\r\n", ""), "unusual"),
            (post("Content-Length: 99999999999999999999\r\n", ""), "unusual"),
            (post("Content-Length: 11\r\n", ""), "unusual"),
            (post("Content-Length: 20\r\n", "").replace("/a", "/l"), "part"),
            (post("Content-Length: 20\r\n", "").replace("/a", "/l?x=/a"), "part"),
            (post("Content-Length: 21\r\n", "").replace("/a", "/l"), "unusual"),
            (post("", "").replace("1.1", "1.0"), "unusual"),
            (post(&format!("x: {}\r\n", "a".repeat(200)), ""), "unusual"),
            (format!("POST /{}", "a".repeat(200)), "unusual"),
            (post(&"x: 1\r\n".repeat(25), ""), "unusual"),
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), "unusual"),
            ("P\0".to_owned(), "unusual"),
        ] {
            assert_eq!(kind(request.as_bytes()), expected, "{request:?}");
        }
    }
}
