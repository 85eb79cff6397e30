//! Ambiguous requests, bodies with a too large `Content-Length`, and slow heads, on a real socket.

use super::*;

/// Whether `bytes`, sent after a valid request that the general path answers, get 400 and the end
/// of the connection. The second request must never reach the handler.
async fn is_refused(server: &TestServer, before: &str, bytes: &str) -> bool {
    let mut stream = server.connect().await;
    stream.write_all(format!("{before}{bytes}").as_bytes()).await.unwrap();
    let text = until_end(&mut stream).await;
    let after = if before.is_empty() { &text[..] } else { text.split_once("GET /ok None None 0").unwrap().1 };
    let head = after.split("\r\n\r\n").next().unwrap();
    status(after) == "400" && head.contains("connection: close") && !after.contains("/evil")
}

#[tokio::test]
async fn ambiguous_framing_is_refused_for_every_request_of_a_connection() {
    let server = TestServer::answered_by(Counting::default(), Limits::default()).await;
    let smuggled = "POST /evil HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let handed_over = "GET /ok HTTP/1.1\r\nHost: x\r\n\r\n";
    let post = |headers: &str, body: &str| format!("POST /evil HTTP/1.1\r\n{headers}\r\n{body}");
    let mut wrong = Vec::new();
    for request in [
        post("Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
        post("Host: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n", "xyz"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: identity\r\n", ""),
        post("Content-Length: 0\r\n", ""),
        post("Host: x\r\nHost: x\r\nContent-Length: 0\r\n", ""),
        post("Host: x\nContent-Length: 0\r\n", ""),
        "POST /evil HTTP/1.1\nHost: x\nContent-Length: 0\n\n".to_owned(),
        post("Host: x\r\nX-A: 1\r\n 2\r\nContent-Length: 0\r\n", ""),
        post("Host: x\r\nContent-Length : 0\r\n", ""),
        post("Host: x\r\nTransfer-Encoding: chunked\r\n", "5 \r\nabcde\r\n0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\n", "+5\r\nabcde\r\n0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\n", "5\nabcde\r\n0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\n", "5\r\nabcdef\r\n0\r\n\r\n"),
        post("Host: x\r\nTransfer-Encoding: chunked\r\n", "fffffffffffffffff\r\n"),
        "GET /evil HTTP/1.1\r\n\r\n".to_owned(),
        "GET /evil HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_owned(),
    ] {
        for before in ["", handed_over] {
            if !is_refused(&server, before, &format!("{request}{smuggled}")).await {
                wrong.push((before, request.clone()));
            }
        }
    }
    assert!(wrong.is_empty(), "accepted: {wrong:#?}");
}

#[tokio::test]
async fn a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent() {
    let server = TestServer::open(Limits::default()).await;
    for expect in ["", "Expect: 100-continue\r\n"] {
        let mut stream = server.connect().await;
        let head = format!("POST /a HTTP/1.1\r\nHost: x\r\n{expect}Content-Length: 1000000\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = until_end(&mut stream).await;
        assert_eq!(status(&answer), "413", "{expect:?}: {answer}");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
    }
}

#[tokio::test]
async fn unfinished_heads_share_a_bounded_buffer() {
    // Half of it for one address: enough for one head of this size, and not for two.
    let limits = Limits { pending_bytes: 16 * 1024, ..Limits::default() };
    let server = TestServer::open(limits).await;
    let slow = format!("GET /x HTTP/1.1\r\nHost: x\r\nX-Long: {}", "a".repeat(6000));
    let mut held = server.connect().await;
    held.write_all(slow.as_bytes()).await.unwrap();
    let refused = loop {
        let mut next = server.connect().await;
        next.write_all(slow.as_bytes()).await.unwrap();
        // The server may not have read the first head yet.
        let mut byte = [0; 1];
        if tokio::time::timeout(Duration::from_millis(50), next.peek(&mut byte)).await.is_ok() {
            break until_end(&mut next).await;
        }
    };
    check_unavailable(&refused, "Too much unfinished input; try again later");
    // Small requests do not use the shared buffer.
    let small = server.ask(b"GET /y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert_eq!(status(&small), "200", "{small}");
    held.write_all(b"\r\nConnection: close\r\n\r\n").await.unwrap();
    assert_eq!(status(&until_end(&mut held).await), "200");
}
