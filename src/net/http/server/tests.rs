//! The server on a real socket, with clients that write their own bytes.

mod framing;

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;

/// Longer than any exchange here takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

struct TestServer {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

/// Replies with the parts of the request; streams on `/stream`, never answers on `/never`.
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

/// Counts the requests of the fast path, and echoes the others.
#[derive(Debug, Default)]
struct Counting(Arc<AtomicUsize>);

impl Handler for Counting {
    async fn answer(&self, request: Request) -> Reply {
        echo(request).await
    }

    fn handle_fast(&self, request: &RawPost<'_>) -> bool {
        let mine = request.target == "/take" && request.body == b"one";
        self.0.fetch_add(usize::from(mine), Ordering::Relaxed);
        mine
    }
}

impl TestServer {
    async fn open(limits: Limits) -> Self {
        Self::answered_by(echo, limits).await
    }

    async fn answered_by(handler: impl Handler, limits: Limits) -> Self {
        let listening = Server::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), limits).await.unwrap();
        let addr = listening.local_addr().unwrap();
        let (stop, stopped) = watch::channel(false);
        Self { addr, stop, serving: tokio::spawn(listening.serve(handler, stopped)) }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    /// Returns all bytes until the server closes the connection.
    async fn ask(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        until_end(&mut stream).await
    }
}

async fn until_end(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await;
    read.expect("an end").expect("a clean end");
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> &str {
    answer.get(9..12).unwrap_or(answer)
}

/// Small limits for sizes, with the default timeouts.
fn small() -> Limits {
    Limits { head_bytes: 8 * 1024, body_bytes: 100, spill_bytes: 1_000_000, ..Limits::default() }
}

/// Short timeouts.
fn quick() -> Limits {
    Limits { head_time: Duration::from_millis(300), request_time: Duration::from_millis(300), ..small() }
}

#[tokio::test]
async fn handlers_get_whole_requests_in_order() {
    let server = TestServer::open(Limits::default()).await;
    let two = "POST /a?b=c HTTP/1.1\r\nHost: x\r\nx-a: 1\r\nContent-Length: 3\r\n\r\nxyz\
               GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answer = server.ask(two.as_bytes()).await;
    assert!(answer.contains("POST /a Some(\"b=c\") Some(\"1\") 3"), "{answer}");
    assert!(answer.contains("x-b: c\r\n") && !answer.contains("x-bad"), "{answer}");
    assert!(answer.ends_with("4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn large_heads_and_bodies_are_refused() {
    let server = TestServer::open(small()).await;
    let head = |length: usize| format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    let fits = format!("{}{}", head(100).replace("Host", "Connection: close\r\nHost"), "b".repeat(100));
    assert_eq!(status(&server.ask(fits.as_bytes()).await), "200");
    for length in [101, 500_000] {
        let answer = server.ask(format!("{}{}", head(length), "b".repeat(length)).as_bytes()).await;
        assert_eq!(status(&answer), "413", "{answer}");
        assert!(answer.ends_with("the body is too large"), "{answer}");
    }
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n",
        "a\r\n0123456789\r\n".repeat(11)
    );
    assert_eq!(status(&server.ask(chunked.as_bytes()).await), "413");
    let long = format!("GET / HTTP/1.1\r\nX-A: {}\r\n\r\n", "a".repeat(9000));
    assert_eq!(status(&server.ask(long.as_bytes()).await), "431");
}

/// Checks a 503 reply: a problem document and a `Retry-After` header.
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
async fn slow_clients_and_handlers_time_out() {
    let server = TestServer::open(quick()).await;
    assert_eq!(status(&server.ask(b"GET / HT").await), "408", "a head that does not end");
    assert_eq!(server.ask(b"").await, "", "nothing at all");
    let slow = server.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nx").await;
    assert_eq!(status(&slow), "408", "{slow}");
    let never = server.ask(b"GET /never HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    check_unavailable(&never, "No answer in time");
    let never = server.ask(b"POST /never HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    check_unavailable(&never, "No answer in time");
}

#[tokio::test]
async fn invalid_requests_do_not_affect_other_connections() {
    let server = TestServer::open(small()).await;
    let mut good = server.connect().await;
    for bytes in
        [&b"\x16\x03\x01\x00\xa5"[..], b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET /\r\n\r\n"]
    {
        assert_eq!(status(&server.ask(bytes).await), "400", "{bytes:?}");
    }
    good.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    assert_eq!(status(&until_end(&mut good).await), "200");
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let server = TestServer::open(Limits { connections: 1, ..Limits::default() }).await;
    let mut first = server.connect().await;
    first.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut byte = [0; 1];
    first.read_exact(&mut byte).await.unwrap();
    let mut second = server.connect().await;
    second.write_all(b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(100), second.read_exact(&mut byte)).await;
    assert!(early.is_err(), "two at once");
    drop(first);
    assert!(until_end(&mut second).await.contains("GET /y"));
}

#[tokio::test]
async fn stop_closes_idle_connections_and_the_listener() {
    let server = TestServer::open(Limits::default()).await;
    let mut idle = server.connect().await;
    idle.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut byte = [0; 1];
    idle.read_exact(&mut byte).await.unwrap();
    server.stop.send_replace(true);
    tokio::time::timeout(TIMEOUT, server.serving).await.expect("an end").unwrap();
    assert!(until_end(&mut idle).await.contains("GET /x"));
    assert!(TcpStream::connect(server.addr).await.is_err());
}

#[tokio::test]
async fn begun_requests_are_answered_after_stop() {
    let server = TestServer::answered_by(Counting::default(), Limits::default()).await;
    let (whole, asked) = (post("/take", "one"), post("/asked", "two"));
    // One cut in the head, one in the body, repeated because a loss would depend on timing.
    let mut begun = Vec::new();
    for cut in [20, asked.len() - 1].repeat(8) {
        let mut stream = server.connect().await;
        stream.write_all(format!("{whole}{}", &asked[..cut]).as_bytes()).await.unwrap();
        // The first half was sent together with the request that is answered here.
        assert_eq!(status(&answers(&mut stream, 1).await[0]), "200");
        begun.push((stream, cut));
    }
    server.stop.send_replace(true);
    for (stream, cut) in &mut begun {
        stream.write_all(&asked.as_bytes()[*cut..]).await.unwrap();
        let answer = until_end(stream).await;
        assert!(status(&answer) == "200" && answer.ends_with("POST /asked None None 3"), "{cut}: {answer:?}");
    }
    tokio::time::timeout(TIMEOUT, server.serving).await.expect("an end").unwrap();
}

/// Reads `count` whole answers.
async fn answers(stream: &mut TcpStream, count: usize) -> Vec<String> {
    let mut text = String::new();
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let whole = whole_answers(&text);
        if whole.len() >= count {
            assert_eq!(whole.iter().map(String::len).sum::<usize>(), text.len(), "{text}");
            return whole;
        }
        let read = tokio::time::timeout(TIMEOUT, stream.read(&mut bytes)).await.expect("an answer").unwrap();
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
async fn fast_path_answers_in_order_for_every_segmentation() {
    let handler = Counting::default();
    let taken = Arc::clone(&handler.0);
    let server = TestServer::answered_by(handler, Limits::default()).await;
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
        let mut stream = server.connect().await;
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
                let read = tokio::time::timeout(TIMEOUT, near.read(&mut buffer)).await.unwrap().unwrap();
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
async fn other_requests_are_served_after_fast_ones() {
    // The test waits for the timeouts of idle connections and of one body, all at once.
    let limits =
        Limits { head_time: Duration::from_secs(2), request_time: Duration::from_secs(2), ..small() };
    let server = TestServer::answered_by(Counting::default(), limits).await;
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
        let mut stream = server.connect().await;
        stream.write_all(format!("{plain}{request}").as_bytes()).await.unwrap();
        asked.push((stream, request, says, ends));
    }
    for (mut stream, request, says, ends) in asked {
        let text = until_end(&mut stream).await;
        let (first, second) = text.split_once("\r\n\r\n").expect("two answers");
        assert_eq!(status(first), "200", "{request:?}: {text}");
        assert!(second.contains(says) && second.ends_with(ends), "{request:?}: {text}");
    }
    let mut stream = server.connect().await;
    let expecting = "POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    stream.write_all(format!("{plain}{expecting}").as_bytes()).await.unwrap();
    let first = answers(&mut stream, 2).await;
    assert!(first[1].starts_with("HTTP/1.1 100 Continue"), "{first:?}");
    stream.write_all(format!("abc{plain}").as_bytes()).await.unwrap();
    let then = answers(&mut stream, 2).await;
    assert!(then[0].ends_with("POST /e None None 3") && status(&then[1]) == "200", "{then:?}");
}

#[tokio::test]
async fn slow_handlers_time_out_on_the_fast_path() {
    let server = TestServer::answered_by(Counting::default(), quick()).await;
    let mut stream = server.connect().await;
    stream.write_all([post("/never", ""), post("/take", "one")].concat().as_bytes()).await.unwrap();
    let got = answers(&mut stream, 2).await;
    assert_eq!((status(&got[0]), status(&got[1])), ("503", "200"));
    assert_eq!(until_end(&mut stream).await, "", "idle for too long");
}

/// One address may have one large body at a time: it gets half of the limit, and a body counts
/// twice.
fn one_large_body() -> Limits {
    Limits { large_bodies: &[("/large", 1000)], large_bytes: 4000, ..small() }
}

#[tokio::test]
async fn large_bodies_share_a_memory_limit() {
    let server = TestServer::open(one_large_body()).await;
    let large = post("/large", &"b".repeat(1000));
    // The first body is incomplete.
    let mut first = server.connect().await;
    first.write_all(&large.as_bytes()[..large.len() - 1]).await.unwrap();
    let begun = std::time::Instant::now();
    let refused = loop {
        assert!(begun.elapsed() < TIMEOUT, "never refused");
        let answer = server.ask(large.replace("Host", "Connection: close\r\nHost").as_bytes()).await;
        if status(&answer) == "503" {
            break answer;
        }
        assert_eq!(status(&answer), "200", "the first was not seen yet");
    };
    assert!(refused.contains("retry-after: 1\r\n") && refused.contains("connection: close\r\n"), "{refused}");
    assert!(refused.ends_with("too many large bodies at the same time"), "{refused}");
    let mut chunked = "POST /large HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    chunked.push_str(&"a\r\n0123456789\r\n".repeat(50));
    chunked.push_str("0\r\n\r\n");
    assert_eq!(status(&server.ask(chunked.as_bytes()).await), "503", "the length is not announced");
    // Small bodies do not count.
    let mut other = server.connect().await;
    other.write_all(post("/small", &"b".repeat(100)).as_bytes()).await.unwrap();
    assert_eq!(status(&answers(&mut other, 1).await[0]), "200");
    // The first request is served, and frees its memory for others.
    first.write_all(b"b").await.unwrap();
    assert!(answers(&mut first, 1).await[0].ends_with("POST /large None None 1000"));
    for large in [
        large.replace("Host", "Connection: close\r\nHost"),
        chunked.replace("Host", "Connection: close\r\nHost"),
    ] {
        assert_eq!(status(&server.ask(large.as_bytes()).await), "200");
    }
}

#[tokio::test]
async fn one_address_gets_half_of_the_connections() {
    let server = TestServer::open(Limits { connections: 4, ..Limits::default() }).await;
    let ask = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = server.connect().await;
        stream.write_all(ask).await.unwrap();
        let mut byte = [0; 1];
        stream.read_exact(&mut byte).await.unwrap();
        held.push(stream);
    }
    let refused_early = until_end(&mut server.connect().await).await;
    check_unavailable(&refused_early, "Too many connections from this address");
    // Another loopback address.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((std::net::Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    let mut other = socket.connect(server.addr).await.unwrap();
    other.write_all(b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    assert_eq!(status(&until_end(&mut other).await), "200");
    // A closed connection frees its slot.
    held.pop();
    let taken = async {
        loop {
            let mut stream = server.connect().await;
            // The server may refuse the connection before the request is written.
            let _ = stream.write_all(b"GET /z HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            if answer.starts_with(b"HTTP/1.1 200 ") {
                return;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, taken).await.expect("room");
}
