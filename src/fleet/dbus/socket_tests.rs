//! Tests of the transport, over streams in memory.

use futures_util::StreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use zbus::{Guid, MessageStream};

use super::*;
use crate::fleet::dbus::connect::{Peer, authenticated_peer, plain_peer};

/// A call that no object answers.
async fn call(peer: &Peer, body: &str) -> zbus::Result<Message> {
    peer.connection.call_method(None::<()>, "/a", Some("a.b"), "C", &body).await
}

/// Answers every call with its own body.
fn answer_all(peer: &Peer) {
    let (connection, mut messages) = (peer.connection.clone(), MessageStream::from(&peer.connection));
    tokio::spawn(async move {
        while let Some(Ok(message)) = messages.next().await {
            if message.message_type() == zbus::message::Type::MethodCall {
                let body: String = message.body().deserialize().unwrap();
                connection.reply(&message.header(), &body).await.unwrap();
            }
        }
    });
}

async fn pair() -> (Peer, Peer) {
    let (a, b) = duplex(64 << 10);
    (authenticated_peer(a).await.unwrap(), authenticated_peer(b).await.unwrap())
}

#[tokio::test]
async fn calls_are_answered_with_and_without_sasl() {
    let (a, b) = pair().await;
    answer_all(&b);
    let reply = call(&a, "x").await.unwrap();
    assert_eq!(reply.body().deserialize::<String>().unwrap(), "x");
    let (client, server) = duplex(64 << 10);
    let (client, server) = tokio::join!(plain_peer(client, None), plain_peer(server, Some(Guid::generate())));
    let (client, server) = (client.unwrap(), server.unwrap());
    answer_all(&server);
    assert_eq!(call(&client, "y").await.unwrap().body().deserialize::<String>().unwrap(), "y");
}

/// The header of a message with a body of this many bytes.
fn header(body: u32) -> [u8; 16] {
    let mut header = [b'l', 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    header[4..8].copy_from_slice(&body.to_le_bytes());
    header
}

#[test]
fn the_length_of_a_message_is_limited() {
    let most = u32::try_from(MAX_MESSAGE_BYTES - HEADER).unwrap();
    assert_eq!(message_length(&header(most)), Some(MAX_MESSAGE_BYTES));
    for body in [most + 1, 100 << 20, u32::MAX] {
        assert_eq!(message_length(&header(body)), None, "{body}");
    }
    let mut fields = header(0);
    fields[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(message_length(&fields), None);
    let mut garbage = header(0);
    garbage[0] = b'G';
    assert_eq!(message_length(&garbage), None);
    let mut big = header(0);
    big[0] = b'B';
    big[4..8].copy_from_slice(&most.to_be_bytes());
    assert_eq!(message_length(&big), Some(MAX_MESSAGE_BYTES));
}

#[tokio::test]
async fn a_message_above_the_limit_ends_the_connection_before_it_is_read() {
    let (a, mut raw) = duplex(64 << 10);
    let peer = authenticated_peer(a).await.unwrap();
    raw.write_all(&header(100 << 20)).await.unwrap();
    peer.connection.closed().await;
    let (a, b) = pair().await;
    answer_all(&b);
    let refused = call(&a, &"x".repeat(MAX_MESSAGE_BYTES)).await;
    assert!(refused.is_err());
    call(&a, "the connection is still usable").await.unwrap();
}

/// Reads until the stream ends.
async fn drain(mut stream: DuplexStream) {
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).await.unwrap_or(0) > 0 {}
}

#[tokio::test(start_paused = true)]
async fn pending_calls_fail_when_the_peer_does_not_read() {
    let (a, stopped) = duplex(64);
    let peer = authenticated_peer(a).await.unwrap();
    let began = Instant::now();
    assert!(call(&peer, &"x".repeat(1_000)).await.is_err());
    assert_eq!(began.elapsed(), WRITE_TIMEOUT);
    assert_eq!(peer.activity.end_reason(), Some("the peer does not read its messages"));
    drop(stopped);
    // The queue is limited, too.
    let (a, stopped) = duplex(64);
    let peer = authenticated_peer(a).await.unwrap();
    let message = Message::signal("/a", "a.b", "C").build(&"x").unwrap();
    let mut sent = 0;
    while peer.connection.send(&message).await.is_ok() {
        sent += 1;
        assert!(sent <= QUEUED_MESSAGES + 2, "the queue has no limit");
    }
    peer.connection.closed().await;
    drop(stopped);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_reads_slowly_keeps_the_connection() {
    let (a, mut slow) = duplex(64);
    let peer = authenticated_peer(a).await.unwrap();
    // One message takes longer than the peer may be silent, and many wait for room.
    let reading = tokio::spawn(async move {
        let (mut read, mut buffer) = (0, [0; 4096]);
        loop {
            match slow.read(&mut buffer).await.unwrap() {
                0 => return read,
                part => read += part,
            }
            // The last messages are written fast, for a short test.
            let pause = if read < 4_000 { WRITE_TIMEOUT / 2 } else { Duration::ZERO };
            tokio::time::sleep(pause).await;
        }
    });
    let mut sent = 0;
    let message = Message::signal("/a", "a.b", "C").build(&"x".repeat(1_000)).unwrap();
    for _ in 0..2 * QUEUED_MESSAGES {
        peer.activity.room().await;
        assert!(peer.activity.has_room());
        peer.connection.send(&message).await.unwrap();
        sent += message.data().len();
    }
    assert_eq!(peer.activity.end_reason(), None);
    let Peer { connection, messages, activity } = peer;
    drop((connection, messages));
    activity.written().await;
    assert_eq!(reading.await.unwrap(), sent);
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_room_ends_when_the_peer_does_not_read() {
    let (a, stopped) = duplex(64);
    let peer = authenticated_peer(a).await.unwrap();
    let message = Message::signal("/a", "a.b", "C").build(&"x").unwrap();
    while peer.activity.has_room() {
        peer.connection.send(&message).await.unwrap();
    }
    peer.activity.room().await;
    assert_eq!(peer.activity.end_reason(), Some("the peer does not read its messages"));
    drop(stopped);
}

#[tokio::test(start_paused = true)]
async fn pending_calls_fail_when_the_connection_is_ended() {
    let (a, b) = duplex(64 << 10);
    let peer = authenticated_peer(a).await.unwrap();
    tokio::spawn(drain(b));
    let activity = peer.activity.clone();
    let ends = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        activity.end("silent");
    };
    let (failed, ()) = tokio::join!(call(&peer, "x"), ends);
    assert!(failed.is_err());
    assert_eq!(peer.activity.last_received(), peer.activity.0.opened);
}

#[tokio::test(start_paused = true)]
async fn the_time_of_the_last_byte_is_kept() {
    let (a, b) = pair().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let message = Message::signal("/a", "a.b", "C").build(&"x").unwrap();
    let mut messages = MessageStream::from(&b.connection);
    a.connection.send(&message).await.unwrap();
    messages.next().await.unwrap().unwrap();
    assert_eq!(b.activity.last_received(), b.activity.0.opened + Duration::from_secs(3));
}
