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
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::warn;

use super::audit::Change;
use super::ears::Ears;
use super::name::Name;
use super::pending::{Answer, Delivery, Outcome, body};
use super::tls::Trust;
use super::token;

/// More of an answer than this is not read.
const MAX_ANSWER: usize = 64 * 1024;

/// A call that is not answered in time is waited for this many times as long, since it may be applied late.
const LATE_LIMITS: u32 = 10;

/// One call to somebody else's server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    pub method: &'static str,
    /// `http://HOST[:PORT]/PATH`, or the same with `https`.
    pub url: String,
    pub authorization: Option<String>,
    pub signature: Option<String>,
    /// The numbers of the changes that it is about. The same number is the same change, whoever tells it and how often.
    pub sequences: String,
    pub body: Vec<u8>,
    pub limit: Duration,
}

/// How calls leave the process; tests have one of their own.
pub trait Post: Send + Sync + 'static {
    /// The status of the answer, if there was a whole one in time.
    fn post(&self, call: Outgoing) -> impl Future<Output = Result<u16, CallError>> + Send;
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("not an address")]
    Address,
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("cannot connect securely: {0}")]
    Secure(std::io::Error),
    #[error("no whole answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("not a request: {0}")]
    Request(#[from] hyper::http::Error),
    #[error("no answer in time")]
    TooSlow,
    /// Nothing goes out any more: another judges.
    #[error("no longer ours to tell")]
    Replaced,
}

/// Over HTTP/1, with TLS or without, a connection a call: calls are few, since each carries thousands of names.
#[derive(Debug, Clone, Default)]
pub struct Http {
    trust: Trust,
}

impl Http {
    pub fn trusting(trust: Trust) -> Self {
        Self { trust }
    }

    async fn exchange(&self, call: &Outgoing) -> Result<u16, CallError> {
        let (secure, rest) = match call.url.strip_prefix("https://") {
            Some(rest) => (true, rest),
            None => (false, call.url.strip_prefix("http://").ok_or(CallError::Address)?),
        };
        let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let (name, port) = match host.rsplit_once(':').map(|(name, port)| (name, port.parse::<u16>())) {
            Some((name, Ok(port))) => (name, port),
            _ => (host, if secure { 443 } else { 80 }),
        };
        let stream = TcpStream::connect(format!("{name}:{port}")).await.map_err(CallError::Connect)?;
        stream.set_nodelay(true).map_err(CallError::Connect)?;
        let request = request(call, host, path)?;
        if secure {
            let stream = self.trust.connect(name, stream).await.map_err(CallError::Secure)?;
            talk(TokioIo::new(stream), request).await
        } else {
            talk(TokioIo::new(stream), request).await
        }
    }
}

impl Post for Http {
    async fn post(&self, call: Outgoing) -> Result<u16, CallError> {
        timeout(call.limit, self.exchange(&call)).await.unwrap_or(Err(CallError::TooSlow))
    }
}

fn request(call: &Outgoing, host: &str, path: &str) -> Result<Request<Full<Bytes>>, CallError> {
    let mut request = Request::builder()
        .method(call.method)
        .uri(path)
        .header("host", host)
        .header("content-type", "application/json")
        .header("user-agent", "portcullis");
    if !call.sequences.is_empty() {
        request = request.header("x-portcullis-sequences", &call.sequences);
    }
    if let Some(authorization) = &call.authorization {
        request = request.header("authorization", authorization);
    }
    if let Some(signature) = &call.signature {
        request = request.header("x-portcullis-signature", format!("sha256={signature}"));
    }
    Ok(request.body(Full::new(Bytes::from(call.body.clone())))?)
}

async fn talk<S>(stream: S, request: Request<Full<Bytes>>) -> Result<u16, CallError>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin,
{
    let (mut sender, connection) = http1::handshake(stream).await?;
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

/// A call in a task of its own, so that its end can be awaited after its timeout. Dropping it
/// aborts the call.
#[derive(Debug)]
pub struct Running(JoinHandle<Result<u16, CallError>>);

impl Running {
    fn start<P: Post>(post: &Arc<P>, call: Outgoing) -> Self {
        let post = Arc::clone(post);
        Self(tokio::spawn(async move { post.post(call).await }))
    }

    /// The answer, if there is one in time.
    async fn answer(&mut self, limit: Duration) -> Result<u16, CallError> {
        match timeout(limit, &mut self.0).await {
            Ok(Ok(said)) => said,
            // It panicked, or the process is ending.
            Ok(Err(_)) => Err(CallError::Replaced),
            Err(_) => Err(CallError::TooSlow),
        }
    }

    /// Waits until the call succeeds or fails.
    pub async fn ended(&mut self) {
        // A late answer is ignored.
        let _ = (&mut self.0).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A call that was not answered in time, and may be applied later.
#[derive(Debug)]
pub struct LateCall {
    pub names: Vec<Name>,
    pub call: Running,
}

/// Who was told by a call, and how to say that it is written down.
pub type Receipt = (Vec<(Name, u64)>, oneshot::Sender<()>);

/// Carries out a round of calls to the state manager at `base`, and says after each who was told by
/// it. The next is made when that is recorded: for the next judge the result of one call at most is
/// unknown. A call that is not answered in time ends the round and is returned, since it may still
/// be applied.
pub async fn deliver<P: Post>(
    post: Arc<P>,
    ears: Arc<Ears>,
    mut delivery: Delivery,
    base: String,
    limit: Duration,
    told: mpsc::Sender<Receipt>,
) -> (Outcome, Option<LateCall>) {
    let url = format!("{base}/State/Components/BulkStateData");
    let mut late = None;
    while let Some(call) = delivery.next_call() {
        // Who is no longer the judge tells nobody anything.
        let said = if ears.may_call() {
            ears.lock().condition.calls += 1;
            let out = Outgoing {
                method: "PATCH",
                url: url.clone(),
                authorization: None,
                signature: None,
                sequences: call.sequences(),
                body: body(&call),
                limit: limit * LATE_LIMITS,
            };
            let mut running = Running::start(&post, out);
            let said = running.answer(limit).await;
            if matches!(said, Err(CallError::TooSlow)) {
                let names = call.entries.iter().map(|(name, _)| *name).collect();
                late = Some(LateCall { names, call: running });
            }
            said
        } else {
            Err(CallError::Replaced)
        };
        let answer = match said {
            Ok(status) => Answer::of(status),
            Err(_) => Answer::Failed,
        };
        if answer != Answer::Accepted {
            let (problem, names) = (problem(&said), call.entries.len());
            warn!(problem, word = call.word.as_str(), names, "state manager not told");
        }
        delivery.answered(call, answer);
        if answer == Answer::Accepted {
            let (written, is_written) = oneshot::channel();
            // Nobody is there to write it down if either fails.
            if told.send((delivery.take_told(), written)).await.is_err() || is_written.await.is_err() {
                break;
            }
        }
    }
    (delivery.finish(), late)
}

fn problem(said: &Result<u16, CallError>) -> String {
    said.as_ref().map_or_else(ToString::to_string, |status| format!("it answers {status}"))
}

/// Sends one signed document for a change. Whether it was taken; whatever else is said, the change waits.
pub async fn hook<P: Post>(
    post: Arc<P>,
    ears: Arc<Ears>,
    change: Change,
    url: String,
    secret: Arc<[u8]>,
    limit: Duration,
) -> bool {
    let body = change_body(&change);
    let signature = Some(token::signature(&secret, &body));
    let sequences = change.sequence.to_string();
    let said = if ears.may_call() {
        post.post(Outgoing { method: "POST", url, authorization: None, signature, sequences, body, limit })
            .await
    } else {
        Err(CallError::Replaced)
    };
    let taken = matches!(said, Ok(200..=299));
    if !taken {
        warn!(problem = problem(&said), component = %change.name, "webhook not told");
    }
    taken
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
        "flaps": change.flaps,
        "timestamp": change.stamp.text(),
    })
    .to_string()
    .into_bytes()
}
