//! Calls to those who want to know: the state manager and a webhook. A shell: it carries a round of calls out and says what
//! came of them; what to call whom about, and when to try again, is decided in `pending` and `tracker`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::audit::Change;
use super::ears::Ears;
use super::pending::{Answer, Delivery, Outcome, body};
use super::token;

/// More of an answer than this is not read.
const MAX_ANSWER: usize = 64 * 1024;

/// One call to somebody else's server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    pub method: &'static str,
    /// `http://HOST[:PORT]/PATH`
    pub url: String,
    pub authorization: Option<String>,
    pub signature: Option<String>,
    pub body: Vec<u8>,
    pub limit: Duration,
}

/// How calls leave the process; tests have one of their own.
pub trait Post: Send + Sync + 'static {
    /// The status of the answer; none if there was no whole answer in time.
    fn post(&self, call: Outgoing) -> impl Future<Output = Option<u16>> + Send;
}

/// Over HTTP/1, a connection a call: calls are few, since each carries thousands of names.
#[derive(Debug, Clone, Copy, Default)]
pub struct Http;

impl Post for Http {
    async fn post(&self, call: Outgoing) -> Option<u16> {
        let limit = call.limit;
        match timeout(limit, exchange(&call)).await {
            Ok(Ok(status)) => Some(status),
            Ok(Err(problem)) => {
                debug!(url = %call.url, %problem, "call failed");
                None
            }
            Err(_) => {
                debug!(url = %call.url, "no answer in time");
                None
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error("not an address")]
    Address,
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    #[error("no whole answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("not a request: {0}")]
    Request(#[from] hyper::http::Error),
}

async fn exchange(call: &Outgoing) -> Result<u16, CallError> {
    let rest = call.url.strip_prefix("http://").ok_or(CallError::Address)?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let address = if has_port { host.to_owned() } else { format!("{host}:80") };
    let stream = TcpStream::connect(&address).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut request = Request::builder()
        .method(call.method)
        .uri(path)
        .header("host", host)
        .header("content-type", "application/json")
        .header("user-agent", "portcullis");
    if let Some(authorization) = &call.authorization {
        request = request.header("authorization", authorization);
    }
    if let Some(signature) = &call.signature {
        request = request.header("x-portcullis-signature", format!("sha256={signature}"));
    }
    let request = request.body(Full::new(Bytes::from(call.body.clone())))?;
    let talk = async {
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let mut answer = response.into_body();
        let mut read = 0;
        while let Some(frame) = answer.frame().await {
            read += frame?.data_ref().map_or(0, Bytes::len);
            if read > MAX_ANSWER {
                break;
            }
        }
        Ok::<u16, CallError>(status)
    };
    // The connection ends with the answer; one that ends sooner has ended the exchange, too.
    let mut talk = std::pin::pin!(talk);
    tokio::select! {
        biased;
        status = &mut talk => status,
        ended = connection => { ended?; talk.await }
    }
}

/// Carries out a round of calls to the state manager at `base`.
pub async fn deliver<P: Post>(
    post: Arc<P>,
    ears: Arc<Ears>,
    mut delivery: Delivery,
    base: String,
    limit: Duration,
) -> Outcome {
    let url = format!("{base}/State/Components/BulkStateData");
    while let Some(call) = delivery.next_call() {
        // Who is no longer the judge tells nobody anything.
        let status = if ears.may_call() {
            ears.lock().condition.calls += 1;
            let out = Outgoing {
                method: "PATCH",
                url: url.clone(),
                authorization: None,
                signature: None,
                body: body(&call),
                limit,
            };
            post.post(out).await
        } else {
            None
        };
        let answer = match status {
            Some(200 | 202 | 204) => Answer::Accepted,
            Some(400 | 404 | 409 | 422) => Answer::Refused,
            Some(_) | None => Answer::Failed,
        };
        if answer != Answer::Accepted {
            warn!(?status, word = call.word.as_str(), names = call.entries.len(), "state manager not told");
        }
        delivery.answered(call, answer);
    }
    delivery.finish()
}

/// How far a webhook got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hooked {
    /// So many of the changes are done with, from the first on.
    pub done: usize,
    pub refused: usize,
    pub failed: bool,
}

/// Sends one signed document for each change, in order.
pub async fn hook<P: Post>(
    post: Arc<P>,
    ears: Arc<Ears>,
    changes: Vec<Change>,
    url: String,
    secret: Arc<[u8]>,
    limit: Duration,
) -> Hooked {
    let mut hooked = Hooked::default();
    for change in changes {
        let body = change_body(&change);
        let signature = Some(token::signature(&secret, &body));
        let status = if ears.may_call() {
            post.post(Outgoing {
                method: "POST",
                url: url.clone(),
                authorization: None,
                signature,
                body,
                limit,
            })
            .await
        } else {
            None
        };
        match status {
            Some(200..=299) => {}
            Some(400..=499) if !matches!(status, Some(401 | 403 | 408 | 429)) => hooked.refused += 1,
            Some(_) | None => {
                warn!(?status, "webhook not told");
                hooked.failed = true;
                return hooked;
            }
        }
        hooked.done += 1;
    }
    hooked
}

/// A change as a document, for webhooks and readers of events.
pub fn change_body(change: &Change) -> Vec<u8> {
    let told = change.word.map(|word| (word.state_and_flag(), word.message()));
    let ((state, flag), message) = told.unwrap_or((("", ""), ""));
    serde_json::json!({
        "sequence": change.sequence,
        "component": change.name.as_str(),
        "health": change.state.as_str(),
        "state": state,
        "flag": flag,
        "message": message,
        "at": change.at,
    })
    .to_string()
    .into_bytes()
}
