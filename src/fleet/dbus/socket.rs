//! The transport of a peer-to-peer connection: any stream of bytes, with a limit for the size of a
//! message, a bounded queue of outgoing messages with a task that writes them, and the time of the
//! last byte from the peer.
//!
//! zbus waits without limit for a peer that does not read, and a cancelled write would leave half a
//! message behind. Here a send only adds a whole message to the queue. If the queue is full, or the
//! peer reads nothing for too long, the connection ends, and with it all pending calls. A sender of
//! many messages waits for room in the queue first, with [`Activity::room`].

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, timeout};
use zbus::Message;
use zbus::connection::AuthMechanism;
use zbus::connection::socket::{self as zsocket, Split};
use zbus::export::async_trait::async_trait;

use super::names::MAX_MESSAGE_BYTES;

/// Messages that wait to be written.
const QUEUED_MESSAGES: usize = 4_096;
/// The total size of these messages in bytes.
const QUEUED_BYTES: usize = 4 * MAX_MESSAGE_BYTES;
/// The kernel accepts at least one byte in this time, or the peer does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The fixed part of a message's header.
const HEADER: usize = 16;

/// The state that both halves, the writing task and the owner of a connection share.
#[derive(Debug, Clone)]
pub struct Activity(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    opened: Instant,
    /// Milliseconds after `opened`.
    last_received: AtomicU64,
    queued_messages: AtomicUsize,
    queued_bytes: AtomicUsize,
    /// Notified when a message was written, and when the connection ends.
    progress: Notify,
    /// The reason why the connection ends, once it does.
    end: watch::Sender<Option<&'static str>>,
    /// Whether the writing task has ended.
    is_written: watch::Sender<bool>,
}

impl Activity {
    fn new() -> Self {
        Self(Arc::new(Shared {
            opened: Instant::now(),
            last_received: AtomicU64::new(0),
            queued_messages: AtomicUsize::new(0),
            queued_bytes: AtomicUsize::new(0),
            progress: Notify::new(),
            end: watch::Sender::new(None),
            is_written: watch::Sender::new(false),
        }))
    }

    /// Returns the time of the last byte from the peer.
    pub fn last_received(&self) -> Instant {
        self.0.opened + Duration::from_millis(self.0.last_received.load(Ordering::Relaxed))
    }

    /// Ends the connection: reading fails at once, and queued messages are still written.
    pub fn end(&self, reason: &'static str) {
        self.0.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(reason);
            first
        });
        self.0.progress.notify_waiters();
    }

    /// Returns whether less than half of the queue is used, so that replies to calls fit too. A
    /// connection that has ended has room, because sending fails at once.
    pub fn has_room(&self) -> bool {
        let messages = self.0.queued_messages.load(Ordering::Relaxed);
        let bytes = self.0.queued_bytes.load(Ordering::Relaxed);
        messages < QUEUED_MESSAGES / 2 && bytes < QUEUED_BYTES / 2 || self.end_reason().is_some()
    }

    /// Waits until there is room. The wait is bounded: a peer that reads nothing is disconnected.
    /// Cancel-safe.
    pub async fn room(&self) {
        loop {
            let mut progress = std::pin::pin!(self.0.progress.notified());
            progress.as_mut().enable();
            if self.has_room() {
                return;
            }
            progress.await;
        }
    }

    /// Returns why the connection was ended on this side, if it was.
    pub fn end_reason(&self) -> Option<&'static str> {
        *self.0.end.borrow()
    }

    /// Waits until all queued messages are written, or a write has failed. The caller must drop the
    /// connection first.
    pub async fn written(&self) {
        // The wait cannot fail: the sender is in `self`.
        let _ = self.0.is_written.subscribe().wait_for(|is_written| *is_written).await;
    }

    fn received(&self) {
        let now = u64::try_from(self.0.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last_received.store(now, Ordering::Relaxed);
    }
}

/// A stream of bytes as a socket for zbus.
#[derive(Debug)]
pub struct PeerSocket<S> {
    stream: S,
    activity: Activity,
}

impl<S> PeerSocket<S> {
    pub fn new(stream: S) -> (Self, Activity) {
        let activity = Activity::new();
        (Self { stream, activity: activity.clone() }, activity)
    }
}

impl<S> zsocket::Socket for PeerSocket<S>
where
    S: AsyncRead + AsyncWrite + Send + Sync + Unpin + std::fmt::Debug + 'static,
{
    type ReadHalf = Limited<S>;
    type WriteHalf = Queue;

    fn split(self) -> Split<Limited<S>, Queue> {
        let Self { stream, activity } = self;
        let (read, write) = tokio::io::split(stream);
        let (queue, queued) = mpsc::channel(QUEUED_MESSAGES);
        let writing = activity.clone();
        tokio::spawn(async move {
            write_queued(write, queued, &writing).await;
            writing.0.is_written.send_replace(true);
        });
        let reader = Reader { stream: read, end: activity.0.end.subscribe(), activity: activity.clone() };
        Split::new(Limited(reader), Queue { queue: Some(queue), activity })
    }
}

/// Returns the length of the message that begins with `header`; `None` if the header is invalid or
/// the message is larger than allowed.
fn message_length(header: &[u8; HEADER]) -> Option<usize> {
    let number = |at: usize| {
        let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
        match header[0] {
            b'l' => Some(u32::from_le_bytes(bytes)),
            b'B' => Some(u32::from_be_bytes(bytes)),
            _ => None,
        }
    };
    let (body, fields) = (number(4)?, number(12)?);
    let fields = usize::try_from(fields).ok()?.checked_next_multiple_of(8)?;
    let length = usize::try_from(body).ok()?.checked_add(fields)?.checked_add(HEADER)?;
    (length <= MAX_MESSAGE_BYTES).then_some(length)
}

/// Receives bytes.
#[derive(Debug)]
pub struct Reader<S> {
    stream: tokio::io::ReadHalf<S>,
    end: watch::Receiver<Option<&'static str>>,
    activity: Activity,
}

#[async_trait]
impl<S> zsocket::ReadHalf for Reader<S>
where
    S: AsyncRead + Send + Sync + std::fmt::Debug + 'static,
{
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        tokio::select! {
            biased;
            ended = self.end.wait_for(Option::is_some) => {
                let reason = ended.ok().and_then(|reason| *reason).unwrap_or("closed");
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason))
            }
            read = self.stream.read(buffer) => {
                let read = read?;
                if read > 0 {
                    self.activity.received();
                }
                Ok((read, Vec::new()))
            }
        }
    }

    fn auth_mechanism(&self) -> AuthMechanism {
        AuthMechanism::Anonymous
    }
}

/// Receives messages up to the limit. A larger one ends the connection before it is read.
#[derive(Debug)]
pub struct Limited<S>(Reader<S>);

#[async_trait]
impl<S> zsocket::ReadHalf for Limited<S>
where
    S: AsyncRead + Send + Sync + std::fmt::Debug + 'static,
{
    async fn receive_message(
        &mut self,
        seq: u64,
        received: &mut Vec<u8>,
        fds: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        while received.len() < HEADER {
            let mut part = [0; HEADER];
            let wanted = HEADER - received.len();
            match self.0.recvmsg(&mut part[..wanted]).await?.0 {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                read => received.extend_from_slice(&part[..read]),
            }
        }
        let mut header = [0; HEADER];
        header.copy_from_slice(&received[..HEADER]);
        if message_length(&header).is_none() {
            return Err(zbus::Error::ExcessData);
        }
        self.0.receive_message(seq, received, fds).await
    }

    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.0.recvmsg(buffer).await
    }

    fn auth_mechanism(&self) -> AuthMechanism {
        self.0.auth_mechanism()
    }
}

/// A message, or bytes of the SASL handshake, which precedes the messages.
#[derive(Debug)]
enum Outgoing {
    Message(Message),
    Bytes(Vec<u8>),
}

impl Outgoing {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Message(message) => message.data(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// Adds messages to the queue.
#[derive(Debug)]
pub struct Queue {
    /// `None` once the connection is closed.
    queue: Option<mpsc::Sender<Outgoing>>,
    activity: Activity,
}

impl Queue {
    fn push(&self, outgoing: Outgoing) -> io::Result<()> {
        let length = outgoing.bytes().len();
        if length > MAX_MESSAGE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too large"));
        }
        let queue = self.queue.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let before = self.activity.0.queued_bytes.fetch_add(length, Ordering::Relaxed);
        self.activity.0.queued_messages.fetch_add(1, Ordering::Relaxed);
        if before + length > QUEUED_BYTES || queue.try_send(outgoing).is_err() {
            self.activity.end("the peer does not read its messages");
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }
}

#[async_trait]
impl zsocket::WriteHalf for Queue {
    async fn send_message(&mut self, message: &Message) -> zbus::Result<()> {
        Ok(self.push(Outgoing::Message(message.clone()))?)
    }

    async fn sendmsg(&mut self, buffer: &[u8], _fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.push(Outgoing::Bytes(buffer.to_vec()))?;
        Ok(buffer.len())
    }

    async fn close(&mut self) -> io::Result<()> {
        self.queue = None;
        self.activity.end("closed");
        Ok(())
    }
}

/// Writes queued messages until the queue is closed and empty, or a write fails.
async fn write_queued<S: AsyncWrite>(
    mut stream: tokio::io::WriteHalf<S>,
    mut queued: mpsc::Receiver<Outgoing>,
    activity: &Activity,
) {
    while let Some(first) = queued.recv().await {
        let mut next = Some(first);
        while let Some(outgoing) = next {
            let bytes = outgoing.bytes();
            let written = write_all(&mut stream, bytes).await;
            activity.0.queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
            activity.0.queued_messages.fetch_sub(1, Ordering::Relaxed);
            activity.0.progress.notify_waiters();
            if written.is_err() {
                activity.end("the peer does not read its messages");
                return;
            }
            next = queued.try_recv().ok();
        }
        if !matches!(timeout(WRITE_TIMEOUT, stream.flush()).await, Ok(Ok(()))) {
            activity.end("the peer does not read its messages");
            return;
        }
    }
    // The peer may be gone already.
    let _ = timeout(WRITE_TIMEOUT, stream.shutdown()).await;
    activity.end("closed");
}

/// Writes all bytes, as long as the peer reads some of them.
async fn write_all<S: AsyncWrite>(stream: &mut tokio::io::WriteHalf<S>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match timeout(WRITE_TIMEOUT, stream.write(bytes)).await?? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "socket_tests.rs"]
mod tests;
