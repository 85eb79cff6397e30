//! A loopback HTTP proxy before LocalStack. It counts requests by action and adds behaviour that
//! LocalStack lacks: throttling, errors, lost replies, stale reads, pages and idempotency tokens.
//! Each connection serves one request.

use super::xml;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// How the proxy handles a request.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    Pass,
    /// Replies with an error, without forwarding.
    Refuse(u16, &'static str),
    /// Replies with this body, without forwarding.
    Answer(String),
    /// Forwards the request, and closes the connection without a reply.
    LoseAnswer,
    /// Forwards the request, and never replies.
    Silence,
    /// Repeats the last reply to the same request.
    Late,
    /// As `Late`, but forwards the first request: a cache for slow requests of LocalStack.
    Remember,
}

#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
    server: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The actions since the counters were last read.
    requests: Vec<String>,
    actions: BTreeSet<String>,
    script: BTreeMap<String, VecDeque<Act>>,
    /// How all requests of an action are handled.
    always: BTreeMap<String, Act>,
    /// The last reply to each request, by its whole body.
    answers: BTreeMap<String, Vec<u8>>,
    page_size: Option<usize>,
    spans: Vec<Span>,
}

/// The times of a request and its reply.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) action: String,
    pub(crate) received: Instant,
    pub(crate) replied: Instant,
}

impl Front {
    pub(crate) async fn start(behind: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let server = tokio::spawn(serve(listener, behind, Arc::clone(&shared)));
        Self { address, shared, server }
    }

    /// Sets how the next requests of this action are handled; later ones pass.
    pub(crate) fn script(&self, action: &str, acts: impl IntoIterator<Item = Act>) {
        self.lock().script.entry(action.to_owned()).or_default().extend(acts);
    }

    pub(crate) fn always(&self, action: &str, act: Act) {
        self.lock().always.insert(action.to_owned(), act);
    }

    pub(crate) fn reset(&self) {
        let mut shared = self.lock();
        shared.script.clear();
        shared.always.clear();
        shared.page_size = None;
    }

    pub(crate) fn page_size(&self, size: usize) {
        self.lock().page_size = Some(size);
    }

    /// Returns the number of requests by action since the last call.
    pub(crate) fn take_counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for action in std::mem::take(&mut self.lock().requests) {
            *counts.entry(action).or_default() += 1;
        }
        counts
    }

    /// Returns the requests since the last call, in the order of their replies.
    pub(crate) fn take_spans(&self) -> Vec<Span> {
        std::mem::take(&mut self.lock().spans)
    }

    /// Returns the number of requests of an action that were answered since the last call of
    /// `take_spans`, and the time of the last reply.
    pub(crate) fn answered(&self, action: &str) -> (usize, Option<Instant>) {
        let shared = self.lock();
        let spans = shared.spans.iter().filter(|span| span.action.starts_with(action));
        (spans.clone().count(), spans.map(|span| span.replied).max())
    }

    pub(crate) fn all_actions(&self) -> BTreeSet<String> {
        self.lock().actions.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, behind: SocketAddr, shared: Arc<Mutex<Shared>>) {
    while let Ok((client, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        // A client that disconnects is not an error: the tests check the client's side.
        tokio::spawn(async move { drop(handle(client, behind, &shared).await) });
    }
}

async fn handle(mut client: TcpStream, behind: SocketAddr, shared: &Mutex<Shared>) -> io::Result<()> {
    let request = Request::read(&mut client).await?;
    let received = Instant::now();
    let action = request.parameter("Action").unwrap_or_else(|| "unknown".to_owned());
    let act = next_act(&mut shared.lock().unwrap(), &request, &action);
    let answer = match act {
        Act::Pass => forward(&request, &action, behind, shared).await?,
        Act::Refuse(status, code) => response(status, &xml::error(code)),
        Act::Answer(body) => response(200, &body),
        Act::LoseAnswer => {
            forward(&request, &action, behind, shared).await?;
            return Ok(());
        }
        Act::Silence => {
            forward(&request, &action, behind, shared).await?;
            // Waits until the client disconnects.
            client.read_to_end(&mut Vec::new()).await?;
            return Ok(());
        }
        Act::Remember => {
            let known = shared.lock().unwrap().answers.get(&request.body).cloned();
            match known {
                Some(answer) => answer,
                None => forward(&request, &action, behind, shared).await?,
            }
        }
        Act::Late => shared.lock().unwrap().answers.get(&request.body).cloned().expect("a first answer"),
    };
    client.write_all(&answer).await?;
    shared.lock().unwrap().spans.push(Span { action, received, replied: Instant::now() });
    client.shutdown().await
}

fn next_act(shared: &mut Shared, request: &Request, action: &str) -> Act {
    shared.requests.push(action.to_owned());
    shared.actions.insert(action.to_owned());
    if let Some(act) = shared.script.get_mut(action).and_then(VecDeque::pop_front) {
        return act;
    }
    if let Some(act) = shared.always.get(action) {
        return act.clone();
    }
    // EC2 recognises a repeated launch by its token; LocalStack does not.
    if action == "RunInstances" && shared.answers.contains_key(&request.body) {
        return Act::Late;
    }
    Act::Pass
}

async fn forward(
    request: &Request,
    action: &str,
    behind: SocketAddr,
    shared: &Mutex<Shared>,
) -> io::Result<Vec<u8>> {
    let page_size = shared.lock().unwrap().page_size;
    let paged = page_size.zip(match action {
        "DescribeSecurityGroups" => Some("securityGroupInfo"),
        "DescribeInstances" => Some("reservationSet"),
        "DescribeVpcs" => Some("vpcSet"),
        _ => None,
    });
    // LocalStack returns everything in one page, and its tokens differ from the proxy's.
    let body = if paged.is_some() { request.without("NextToken") } else { request.body.clone() };
    let length = format!("ontent-length: {}", body.len());
    let head = request.head.replace(&format!("ontent-length: {}", request.body.len()), &length);
    let mut server = TcpStream::connect(behind).await?;
    server.write_all(head.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").as_bytes()).await?;
    server.write_all(body.as_bytes()).await?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await?;
    if let Some((size, list)) = paged {
        let text = String::from_utf8(answer).expect("XML");
        let body = text.split_once("\r\n\r\n").expect("a head").1;
        let start = request.parameter("NextToken").map_or(0, |token| token.parse().expect("our token"));
        answer = response(200, &xml::page(body, list, start, size));
    }
    shared.lock().unwrap().answers.insert(request.body.clone(), answer.clone());
    Ok(answer)
}

fn response(status: u16, body: &str) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} Scripted\r\nContent-Type: text/xml\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

#[derive(Debug)]
struct Request {
    /// Including the empty line at its end.
    head: String,
    body: String,
}

impl Request {
    async fn read(client: &mut TcpStream) -> io::Result<Self> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 16 * 1024];
        loop {
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4) {
                let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
                let length = content_length(&head);
                if bytes.len() >= end + length {
                    let body = String::from_utf8_lossy(&bytes[end..end + length]).into_owned();
                    return Ok(Self { head, body });
                }
            }
            let read = client.read(&mut buffer).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            bytes.extend_from_slice(&buffer[..read]);
        }
    }

    fn without(&self, name: &str) -> String {
        let others =
            self.body.split('&').filter(|pair| pair.split_once('=').is_none_or(|(key, _)| key != name));
        others.collect::<Vec<_>>().join("&")
    }

    fn parameter(&self, name: &str) -> Option<String> {
        let pairs = self.body.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    }
}

fn content_length(head: &str) -> usize {
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    let mut lengths = lines.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    lengths.next().map_or(0, |(_, value)| value.trim().parse().expect("a length"))
}
