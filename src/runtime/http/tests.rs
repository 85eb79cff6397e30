//! The door on a real socket, with clients that write their own bytes.

mod framing;

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

struct Door {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

/// Says what it got; streams on `/stream`, never answers on `/never`.
async fn echo(request: Request) -> Reply {
    match request.path() {
        "/never" => std::future::pending().await,
        "/stream" => {
            let (sender, receiver) = mpsc::channel(2);
            for word in ["one ", "two"] {
                sender.send(Bytes::from(word)).await.unwrap();
            }
            Reply::stream("text/plain", receiver)
        }
        path => match &request.body {
            Ok(body) => {
                let text = format!(
                    "{} {path} {:?} {:?} {}",
                    request.method(),
                    request.query(),
                    request.header("X-A"),
                    body.len()
                );
                Reply::new(200, "text/plain", text).with("x-b", "c").with("x-bad", "a\nb")
            }
            Err(error) => Reply::new(error.status(), "text/plain", error.to_string()),
        },
    }
}

/// Counts what it takes at once, and echoes the rest.
#[derive(Debug, Default)]
struct Counting(Arc<AtomicUsize>);

impl Handler for Counting {
    async fn answer(&self, request: Request) -> Reply {
        echo(request).await
    }

    fn taken_at_once(&self, request: &Glance<'_>) -> bool {
        let mine = request.target == "/take" && request.body == b"one";
        self.0.fetch_add(usize::from(mine), Ordering::Relaxed);
        mine
    }
}

impl Door {
    async fn open(limits: Limits) -> Self {
        Self::answered_by(echo, limits).await
    }

    async fn answered_by(handler: impl Handler, limits: Limits) -> Self {
        let server = Server::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), limits).await.unwrap();
        let addr = server.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        Self { addr, stop, serving: tokio::spawn(server.serve(handler, stopped)) }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    /// All that comes back until the other side ends.
    async fn ask(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        until_end(&mut stream).await
    }
}

async fn until_end(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    read.expect("an end").expect("a clean end");
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> &str {
    answer.get(9..12).unwrap_or(answer)
}

/// Small limits, for bodies that exceed them; nothing here runs out of time on a busy machine.
fn small() -> Limits {
    Limits { head_bytes: 8 * 1024, body_bytes: 100, spill_bytes: 1_000_000, ..Limits::default() }
}

/// For those that do run out of time.
fn quick() -> Limits {
    Limits { head_time: Duration::from_millis(300), request_time: Duration::from_millis(300), ..small() }
}

#[tokio::test]
async fn requests_come_whole_and_one_after_the_other() {
    let door = Door::open(Limits::default()).await;
    let two = "POST /a?b=c HTTP/1.1\r\nHost: x\r\nx-a: 1\r\nContent-Length: 3\r\n\r\nxyz\
               GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answer = door.ask(two.as_bytes()).await;
    assert!(answer.contains("POST /a Some(\"b=c\") Some(\"1\") 3"), "{answer}");
    assert!(answer.contains("x-b: c\r\n") && !answer.contains("x-bad"), "{answer}");
    assert!(answer.ends_with("4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn what_is_too_large_is_said_to_be() {
    let door = Door::open(small()).await;
    let head = |length: usize| format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    let fits = format!("{}{}", head(100).replace("Host", "Connection: close\r\nHost"), "b".repeat(100));
    assert_eq!(status(&door.ask(fits.as_bytes()).await), "200");
    for length in [101, 500_000] {
        let answer = door.ask(format!("{}{}", head(length), "b".repeat(length)).as_bytes()).await;
        assert_eq!(status(&answer), "413", "{answer}");
        assert!(answer.ends_with("the body is too large"), "{answer}");
    }
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n",
        "a\r\n0123456789\r\n".repeat(11)
    );
    assert_eq!(status(&door.ask(chunked.as_bytes()).await), "413");
    let long = format!("GET / HTTP/1.1\r\nX-A: {}\r\n\r\n", "a".repeat(9000));
    assert_eq!(status(&door.ask(long.as_bytes()).await), "431");
}

/// As any other refusal: what is wrong in a form that clients know, and when to come back.
fn check_unavailable(answer: &str, detail: &str) {
    assert_eq!(status(answer), "503", "{answer}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    for header in ["content-type: application/problem+json", "retry-after: 5"] {
        assert!(head.lines().any(|line| line == header), "{answer}");
    }
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!((body["status"].as_u64(), body["detail"].as_str()), (Some(503), Some(detail)));
}

#[tokio::test]
async fn nobody_is_waited_for_without_end() {
    let door = Door::open(quick()).await;
    assert_eq!(status(&door.ask(b"GET / HT").await), "408", "a head that does not end");
    assert_eq!(door.ask(b"").await, "", "nothing at all");
    let slow = door.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nx").await;
    assert_eq!(status(&slow), "408", "{slow}");
    let never = door.ask(b"GET /never HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    check_unavailable(&never, "No answer in time");
    let never = door.ask(b"POST /never HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    check_unavailable(&never, "No answer in time");
}

#[tokio::test]
async fn garbage_is_refused_and_hurts_nobody_else() {
    let door = Door::open(small()).await;
    let mut good = door.connect().await;
    for bytes in
        [&b"\x16\x03\x01\x00\xa5"[..], b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET /\r\n\r\n"]
    {
        assert_eq!(status(&door.ask(bytes).await), "400", "{bytes:?}");
    }
    good.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    assert_eq!(status(&until_end(&mut good).await), "200");
}

#[tokio::test]
async fn one_more_than_there_is_room_for_waits() {
    let door = Door::open(Limits { connections: 1, ..Limits::default() }).await;
    let mut first = door.connect().await;
    first.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut byte = [0; 1];
    first.read_exact(&mut byte).await.unwrap();
    let mut second = door.connect().await;
    second.write_all(b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(100), second.read_exact(&mut byte)).await;
    assert!(early.is_err(), "two at once");
    drop(first);
    assert!(until_end(&mut second).await.contains("GET /y"));
}

#[tokio::test]
async fn stopping_ends_idle_connections_and_closes_the_door() {
    let door = Door::open(Limits::default()).await;
    let mut idle = door.connect().await;
    idle.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut byte = [0; 1];
    idle.read_exact(&mut byte).await.unwrap();
    door.stop.send_replace(true);
    tokio::time::timeout(PATIENCE, door.serving).await.expect("an end").unwrap();
    assert!(until_end(&mut idle).await.contains("GET /x"));
    assert!(TcpStream::connect(door.addr).await.is_err());
}

#[tokio::test]
async fn requests_that_are_half_there_are_answered_before_the_end() {
    let door = Door::answered_by(Counting::default(), Limits::default()).await;
    let (whole, asked) = (post("/take", "one"), post("/asked", "two"));
    // One cut in the head, one in the body, and often enough that chance does not hide a loss.
    let mut begun = Vec::new();
    for cut in [20, asked.len() - 1].repeat(8) {
        let mut stream = door.connect().await;
        stream.write_all(format!("{whole}{}", &asked[..cut]).as_bytes()).await.unwrap();
        // The first half came together with what is answered here.
        assert_eq!(status(&answers(&mut stream, 1).await[0]), "200");
        begun.push((stream, cut));
    }
    door.stop.send_replace(true);
    for (stream, cut) in &mut begun {
        stream.write_all(&asked.as_bytes()[*cut..]).await.unwrap();
        let answer = until_end(stream).await;
        assert!(status(&answer) == "200" && answer.ends_with("POST /asked None None 3"), "{cut}: {answer:?}");
    }
    tokio::time::timeout(PATIENCE, door.serving).await.expect("an end").unwrap();
}

/// So many whole answers.
async fn answers(stream: &mut TcpStream, count: usize) -> Vec<String> {
    let mut text = String::new();
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let whole = whole_answers(&text);
        if whole.len() >= count {
            assert_eq!(whole.iter().map(String::len).sum::<usize>(), text.len(), "{text}");
            return whole;
        }
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut bytes)).await.expect("an answer").unwrap();
        assert!(read > 0, "ended after {text:?}");
        text.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
    }
}

fn whole_answers(mut text: &str) -> Vec<String> {
    let mut found = Vec::new();
    while let Some(head) = text.find("\r\n\r\n").map(|at| at + 4) {
        let length = text[..head].lines().find_map(|line| line.strip_prefix("content-length: "));
        let end = head + length.map_or(0, |length| length.parse().unwrap());
        let Some(answer) = text.get(..end) else { break };
        found.push(answer.to_owned());
        text = &text[end..];
    }
    found
}

fn post(target: &str, body: &str) -> String {
    format!("POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn plain_requests_are_answered_in_order_however_they_are_cut() {
    let handler = Counting::default();
    let taken = Arc::clone(&handler.0);
    let door = Door::answered_by(handler, Limits::default()).await;
    let requests: Vec<String> = (0..40)
        .map(
            |number| {
                if number % 3 == 2 { post(&format!("/{number}?q"), "abc") } else { post("/take", "one") }
            },
        )
        .collect();
    let bytes = requests.concat();
    for piece in [bytes.len(), 7, 100, 1000] {
        taken.store(0, Ordering::Relaxed);
        let mut stream = door.connect().await;
        stream.set_nodelay(true).unwrap();
        let (mut near, mut far) = stream.split();
        let send = async {
            for piece in bytes.as_bytes().chunks(piece) {
                far.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let receive = async {
            let mut text = String::new();
            let mut buffer = vec![0; 4096];
            while whole_answers(&text).len() < 40 {
                let read = tokio::time::timeout(PATIENCE, near.read(&mut buffer)).await.unwrap().unwrap();
                assert!(read > 0, "{text}");
                text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
            }
            whole_answers(&text)
        };
        let ((), got) = tokio::join!(send, receive);
        for (number, answer) in got.iter().enumerate() {
            assert_eq!(status(answer), "200", "{answer}");
            assert!(answer.contains("\r\ndate: "), "{answer}");
            let expected =
                if number % 3 == 2 { format!("POST /{number} Some(\"q\") None 3") } else { String::new() };
            assert!(answer.ends_with(&format!("\r\n\r\n{expected}")), "{number}: {answer}");
        }
        assert_eq!(taken.load(Ordering::Relaxed), 27);
    }
}

#[tokio::test]
async fn unusual_requests_are_right_after_plain_ones() {
    // The ends of idle connections are waited for, all at once, and one body that does not come.
    let limits =
        Limits { head_time: Duration::from_secs(2), request_time: Duration::from_secs(2), ..small() };
    let door = Door::answered_by(Counting::default(), limits).await;
    let plain = post("/take", "one");
    let mut asked = Vec::new();
    for (request, says, ends) in [
        ("HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n", "200 OK", "\r\n\r\n"),
        (
            "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n",
            "200 OK",
            "POST /c None None 3",
        ),
        ("POST /o HTTP/1.0\r\nContent-Length: 1\r\n\r\nx", "200 OK", "POST /o None None 1"),
        (
            "POST /k HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
            "200 OK",
            "POST /k None None 1",
        ),
        (
            "POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nxyz",
            "400 Bad Request",
            "\"detail\":\"Invalid or repeated Content-Length\",\"status\":400}",
        ),
        (
            "POST http://x/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
            "200 OK",
            "POST /a None None 1",
        ),
        (
            "POST /z HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx",
            "408 Request Timeout",
            "did not come in time",
        ),
    ] {
        let mut stream = door.connect().await;
        stream.write_all(format!("{plain}{request}").as_bytes()).await.unwrap();
        asked.push((stream, request, says, ends));
    }
    for (mut stream, request, says, ends) in asked {
        let text = until_end(&mut stream).await;
        let (first, second) = text.split_once("\r\n\r\n").expect("two answers");
        assert_eq!(status(first), "200", "{request:?}: {text}");
        assert!(second.contains(says) && second.ends_with(ends), "{request:?}: {text}");
    }
    let mut stream = door.connect().await;
    let expecting = "POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    stream.write_all(format!("{plain}{expecting}").as_bytes()).await.unwrap();
    let first = answers(&mut stream, 2).await;
    assert!(first[1].starts_with("HTTP/1.1 100 Continue"), "{first:?}");
    stream.write_all(format!("abc{plain}").as_bytes()).await.unwrap();
    let then = answers(&mut stream, 2).await;
    assert!(then[0].ends_with("POST /e None None 3") && status(&then[1]) == "200", "{then:?}");
}

#[tokio::test]
async fn what_needs_a_thought_gets_as_much_as_it_may() {
    let door = Door::answered_by(Counting::default(), quick()).await;
    let mut stream = door.connect().await;
    stream.write_all([post("/never", ""), post("/take", "one")].concat().as_bytes()).await.unwrap();
    let got = answers(&mut stream, 2).await;
    assert_eq!((status(&got[0]), status(&got[1])), ("503", "200"));
    assert_eq!(until_end(&mut stream).await, "", "idle for too long");
}

/// Room for one large body at a time from one address: half of it all, each twice its size.
fn little_room() -> Limits {
    Limits { large_bodies: &[("/large", 1000)], large_bytes: 4000, ..small() }
}

#[tokio::test]
async fn large_bodies_have_so_much_room_together() {
    let door = Door::open(little_room()).await;
    let large = post("/large", &"b".repeat(1000));
    // One is on its way, and has not come to its end.
    let mut first = door.connect().await;
    first.write_all(&large.as_bytes()[..large.len() - 1]).await.unwrap();
    let begun = std::time::Instant::now();
    let refused = loop {
        assert!(begun.elapsed() < PATIENCE, "never refused");
        let answer = door.ask(large.replace("Host", "Connection: close\r\nHost").as_bytes()).await;
        if status(&answer) == "503" {
            break answer;
        }
        assert_eq!(status(&answer), "200", "the first was not seen yet");
    };
    assert!(refused.contains("retry-after: 1\r\n") && refused.contains("connection: close\r\n"), "{refused}");
    assert!(refused.ends_with("no room for a body as large now"), "{refused}");
    let mut chunked = "POST /large HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    chunked.push_str(&"a\r\n0123456789\r\n".repeat(50));
    chunked.push_str("0\r\n\r\n");
    assert_eq!(status(&door.ask(chunked.as_bytes()).await), "503", "of a length that nobody announced");
    // Small ones need no such room.
    let mut other = door.connect().await;
    other.write_all(post("/small", &"b".repeat(100)).as_bytes()).await.unwrap();
    assert_eq!(status(&answers(&mut other, 1).await[0]), "200");
    // The first gets what it began, and leaves the room to others; also those who wait for the library.
    first.write_all(b"b").await.unwrap();
    assert!(answers(&mut first, 1).await[0].ends_with("POST /large None None 1000"));
    for large in [
        large.replace("Host", "Connection: close\r\nHost"),
        chunked.replace("Host", "Connection: close\r\nHost"),
    ] {
        assert_eq!(status(&door.ask(large.as_bytes()).await), "200");
    }
}

#[tokio::test]
async fn one_address_has_half_of_the_connections() {
    let door = Door::open(Limits { connections: 4, ..Limits::default() }).await;
    let ask = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = door.connect().await;
        stream.write_all(ask).await.unwrap();
        let mut byte = [0; 1];
        stream.read_exact(&mut byte).await.unwrap();
        held.push(stream);
    }
    let sent_away = until_end(&mut door.connect().await).await;
    check_unavailable(&sent_away, "Too many connections from this address");
    // From another address of loopback.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((std::net::Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    let mut other = socket.connect(door.addr).await.unwrap();
    other.write_all(b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    assert_eq!(status(&until_end(&mut other).await), "200");
    // Who leaves makes room.
    held.pop();
    let taken = async {
        loop {
            let mut stream = door.connect().await;
            // It may be sent away before it has said a word.
            let _ = stream.write_all(b"GET /z HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            if answer.starts_with(b"HTTP/1.1 200 ") {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, taken).await.expect("room");
}
