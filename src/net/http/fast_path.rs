//! The fast path: small, whole POST requests, answered directly from the buffer that they were read
//! into, as many as one read returned. Every other request (another method or version, chunks,
//! expectations, a large body, a slow sender, an invalid head) is left with all of its bytes to
//! `exchange`.

use std::cell::RefCell;
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{Buf as _, BytesMut};
use httparse::{EMPTY_HEADER, Header};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, timeout};

use super::buffer_limits::FREE_BYTES;
use super::exchange::poll_received;
use super::framing::{self, BodyLength};
use super::message::{Reply, Request, Wire};
use super::server::{Handler, Limits, TOO_SLOW};
use crate::runtime::service::stopped;

/// Header fields of a request on the fast path.
const MAX_HEADERS: usize = 24;

/// A request in the read buffer, not copied.
#[derive(Debug)]
pub struct RawPost<'a> {
    /// Path and query, as sent.
    pub target: &'a str,
    pub(super) headers: &'a [Header<'a>],
    pub body: &'a [u8],
}

/// The beginning of the buffer.
#[derive(Debug)]
enum Buffered<'a> {
    /// A request, and its length.
    Whole(RawPost<'a>, usize),
    /// Part of a small request.
    Part,
    /// For `exchange`.
    Other,
}

fn find<'a>(bytes: &'a [u8], headers: &'a mut [Header<'a>], limits: &Limits) -> Buffered<'a> {
    let head = match framing::head(bytes, headers) {
        Ok(Some(head)) if head.bytes <= limits.head_bytes && head.plain && head.method == "POST" => head,
        // Of any method: a slow head costs least here.
        Ok(None) if bytes.len() < FREE_BYTES.min(limits.head_bytes) => return Buffered::Part,
        _ => return Buffered::Other,
    };
    let BodyLength::Exactly(length) = head.body else { return Buffered::Other };
    let path = head.target.split('?').next().unwrap_or(head.target);
    let Some(length) = usize::try_from(length).ok().filter(|length| *length <= limits.body_limit(path))
    else {
        return Buffered::Other;
    };
    let end = head.bytes + length;
    match bytes.get(head.bytes..end) {
        Some(body) => Buffered::Whole(RawPost { target: head.target, headers: head.headers, body }, end),
        None if end <= FREE_BYTES => Buffered::Part,
        None => Buffered::Other,
    }
}

/// The next step, after every request that could be answered at once was.
enum Step {
    /// Pass it to the handler.
    Ask(Box<Request>),
    /// Read more.
    Read,
    /// Leave it to `exchange`.
    HandOver,
}

/// The state of a connection that leaves the fast path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// A request that is not for the fast path, or part of one; and when it began.
    Request(Instant),
}

/// The result of one read: the bytes read, the buffered bytes that were answered, and the next
/// step.
struct Turn {
    got: usize,
    done: usize,
    step: Step,
}

/// The parts that are needed to answer buffered requests.
struct Answering<'a, H> {
    peer: SocketAddr,
    limits: &'a Limits,
    handler: &'a H,
}

impl<H: Handler> Answering<'_, H> {
    /// Answers every request that can be answered at once. Returns how much of the bytes is used.
    fn all(&self, bytes: &[u8], answers: &mut Vec<u8>) -> (Step, usize) {
        let mut done = 0;
        loop {
            let mut headers = [EMPTY_HEADER; MAX_HEADERS];
            match find(&bytes[done..], &mut headers, self.limits) {
                Buffered::Other => return (Step::HandOver, done),
                Buffered::Part => return (Step::Read, done),
                Buffered::Whole(post, length) => {
                    if self.handler.handle_fast(&post) {
                        done += length;
                        push_accepted(answers);
                        continue;
                    }
                    let Some(request) = Request::of(&post, self.peer) else {
                        return (Step::HandOver, done);
                    };
                    return (Step::Ask(Box::new(request)), done + length);
                }
            }
        }
    }
}

/// A connection on the fast path.
pub(super) struct FastConnection<'a, H> {
    pub(super) stream: &'a mut TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) limits: &'a Limits,
    pub(super) handler: &'a H,
    pub(super) stop: watch::Receiver<bool>,
}

impl<H: Handler> FastConnection<'_, H> {
    /// Serves the connection for as long as its requests are for the fast path. `read` holds the
    /// bytes that were received and not yet used, before and after.
    pub(super) async fn serve(mut self, read: &mut BytesMut) -> io::Result<Left> {
        let mut stop = self.stop.clone();
        let mut stopping = pin!(stopped(&mut stop));
        let mut timer = pin!(tokio::time::sleep(self.limits.head_time));
        let mut answers = Vec::new();
        let mut since = Instant::now();
        let (mut step, done) = self.answer_all(read, &mut answers);
        read.advance(done);
        loop {
            if !answers.is_empty() {
                self.write(&mut answers).await?;
            }
            match step {
                Step::HandOver => return Ok(Left::Request(since)),
                Step::Ask(request) => {
                    let reply = timeout(self.limits.request_time, self.handler.answer(*request)).await;
                    let reply = reply.unwrap_or_else(|_| Reply::unavailable(TOO_SLOW));
                    let wire = Wire { close: reply.closes(), chunks: true, without_body: false };
                    if reply.write_to(&mut answers, &now(), wire).is_some() {
                        return Err(io::Error::other("a POST was answered with a stream"));
                    }
                    if wire.close {
                        self.write(&mut answers).await?;
                        return Ok(Left::Nothing);
                    }
                    let done;
                    (step, done) = self.answer_all(read, &mut answers);
                    read.advance(done);
                    since = Instant::now();
                    continue;
                }
                Step::Read => {}
            }
            // Also stops a client that always has another request.
            if read.is_empty() && *self.stop.borrow() {
                return Ok(Left::Nothing);
            }
            let due = since + if read.is_empty() { self.limits.head_time } else { self.limits.request_time };
            if timer.deadline() > due {
                timer.as_mut().reset(due);
            }
            let begun = read.is_empty();
            if begun {
                // An idle connection keeps no buffer.
                *read = BytesMut::new();
            }
            let waiting = poll_fn(|cx| match self.poll_turn(read, &mut answers, cx) {
                Poll::Ready(turn) => Poll::Ready(Some(turn)),
                Poll::Pending if stopping.as_mut().poll(cx).is_ready() => Poll::Ready(None),
                Poll::Pending => poll_until(timer.as_mut(), due, cx).map(|()| None),
            });
            match waiting.await.transpose()? {
                // Timeout, stop, or the end of the connection.
                None | Some(Turn { got: 0, .. }) => {
                    return Ok(if read.is_empty() { Left::Nothing } else { Left::Request(since) });
                }
                Some(turn) => {
                    if begun || turn.done > 0 {
                        since = Instant::now();
                    }
                    step = turn.step;
                }
            }
        }
    }

    fn answer_all(&self, bytes: &[u8], answers: &mut Vec<u8>) -> (Step, usize) {
        Answering { peer: self.peer, limits: self.limits, handler: self.handler }.all(bytes, answers)
    }

    /// Reads into the buffer of this thread and answers from there. Only the rest is copied and
    /// kept with the connection.
    fn poll_turn(
        &mut self,
        read: &mut BytesMut,
        answers: &mut Vec<u8>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Turn>> {
        let Self { stream, peer, limits, handler, .. } = self;
        let answering = Answering { peer: *peer, limits, handler: *handler };
        poll_received(*stream, cx, |got| {
            let (step, done);
            if read.is_empty() {
                (step, done) = answering.all(got, answers);
                read.extend_from_slice(&got[done..]);
            } else {
                read.extend_from_slice(got);
                (step, done) = answering.all(read, answers);
                read.advance(done);
            }
            Turn { got: got.len(), done, step }
        })
    }

    /// Fails if the client reads nothing for too long.
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
        // Freed for the next connection, which needs it sooner than this one.
        *answers = Vec::new();
        Ok(())
    }
}

/// Resets the timer only when it has fired, not with every request.
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
    /// The answer of the fast path, and the second of its date.
    static ACCEPTED: RefCell<(u64, Vec<u8>)> = const { RefCell::new((0, Vec::new())) };
}

fn push_accepted(answers: &mut Vec<u8>) {
    let second = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    ACCEPTED.with_borrow_mut(|(of, answer)| {
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
            Buffered::Whole(..) => "whole",
            Buffered::Part => "part",
            Buffered::Other => "other",
        }
    }

    #[test]
    fn only_small_valid_posts_are_for_the_fast_path() {
        let post = |headers: &str, body: &str| format!("POST /a HTTP/1.1\r\nHost: x\r\n{headers}\r\n{body}");
        for (request, expected) in [
            (String::new(), "part"),
            ("POS".to_owned(), "part"),
            (post("Content-Length: 3\r\n", "xyz"), "whole"),
            (post("Content-Length: 3\r\n", "xyzPOST"), "whole"),
            (post("Content-Length: 3\r\n", "xy"), "part"),
            (post("", ""), "whole"),
            (post("Connection: Keep-Alive\r\nContent-Length: 0\r\n", ""), "whole"),
            (post("Connection: close\r\n", ""), "other"),
            (post("Expect: 100-continue\r\nContent-Length: 3\r\n", ""), "other"),
            (post("Transfer-Encoding: chunked\r\n", ""), "other"),
            (post("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "xyz"), "other"),
            (post("Content-Length: 3\r\ncontent-length: 4\r\n", "xyz"), "other"),
            (post("Content-Length: 3\r\ncontent-length: 3\r\n", "xyz"), "other"),
            (post("Content-Length: +3\r\n", "xyz"), "other"),
            (post("Content-Length: 3, 3\r\n", "xyz"), "other"),
            (post("Content-Length:\r\n", ""), "other"),
            (post("Content-Length: 99999999999999999999\r\n", ""), "other"),
            (post("Content-Length: 11\r\n", ""), "other"),
            (post("Content-Length: 20\r\n", "").replace("/a", "/l"), "part"),
            (post("Content-Length: 20\r\n", "").replace("/a", "/l?x=/a"), "part"),
            (post("Content-Length: 21\r\n", "").replace("/a", "/l"), "other"),
            (post("", "").replace("1.1", "1.0"), "other"),
            (post(&format!("x: {}\r\n", "a".repeat(200)), ""), "other"),
            (format!("POST /{}", "a".repeat(200)), "other"),
            (post(&"x: 1\r\n".repeat(25), ""), "other"),
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), "other"),
            ("P\0".to_owned(), "other"),
        ] {
            assert_eq!(kind(request.as_bytes()), expected, "{request:?}");
        }
    }
}
