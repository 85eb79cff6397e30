//! The strict reader of request heads, which the fast path of the HTTP server uses, against hyper:
//! if both accept a head, they read the same method, target and length of the body.

#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http_body_util::Empty;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use portcullis::net::http::framing::{self, BodyLength};
use tokio::io::AsyncWriteExt as _;

/// Method, target, and the length that hyper expects of the body; none for chunks.
type Seen = Option<(String, String, Option<u64>)>;

/// The first request in `bytes`, as hyper reads it.
fn hyper_reads(bytes: &[u8]) -> Seen {
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let noted = seen.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let length = request.body().size_hint().exact();
        let found = (request.method().to_string(), request.uri().to_string(), length);
        noted.lock().expect("one thread").get_or_insert(found);
        async { Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())) }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (mut client, server) = tokio::io::duplex(bytes.len() + 1024);
        client.write_all(bytes).await.expect("room for all");
        client.shutdown().await.expect("an open stream");
        // Its result does not matter: the connection ends in the middle of a body.
        let _ = http1::Builder::new().half_close(true).serve_connection(TokioIo::new(server), service).await;
    });
    seen.lock().expect("one thread").take()
}

fuzz_target!(|bytes: &[u8]| {
    let mut headers = [httparse::EMPTY_HEADER; 24];
    if let Ok(Some(head)) = framing::head(bytes, &mut headers)
        && let Some((method, target, length)) = hyper_reads(bytes)
    {
        assert_eq!(method, head.method);
        // hyper adds the path of an absolute target without one.
        assert_eq!(target.trim_end_matches('/'), head.target.trim_end_matches('/'));
        match head.body {
            BodyLength::Exactly(bytes) => assert_eq!(length, Some(bytes)),
            BodyLength::Chunked => assert_eq!(length, None),
        }
    }
});
