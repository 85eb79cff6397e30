//! What comes in at a door and what goes out, as whoever answers sees it: without a type of the HTTP library.

use std::convert::Infallible;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use tokio::sync::mpsc;

use super::express::Glance;

/// Why a request has no body that could be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body is too large")]
    TooLarge,
    #[error("the body did not come in time")]
    TooSlow,
    #[error("the body was cut off")]
    Broken,
    /// Too many others have large ones at the same time.
    #[error("no room for a body as large now")]
    Busy,
}

impl BodyError {
    /// The status that says so.
    pub fn status(self) -> u16 {
        match self {
            Self::TooLarge => 413,
            Self::TooSlow => 408,
            Self::Broken => 400,
            Self::Busy => 503,
        }
    }
}

/// A whole request.
#[derive(Debug)]
pub struct Request {
    pub(super) head: Parts,
    pub body: Result<Bytes, BodyError>,
    pub peer: SocketAddr,
    /// What the client proved to have, in DER. Somebody that the door believes has vouched for it.
    pub certificate: Option<Bytes>,
}

impl Request {
    /// None if the HTTP library would not have it.
    pub(super) fn of(glance: &Glance<'_>, peer: SocketAddr) -> Option<Self> {
        let mut request = hyper::Request::post(glance.target);
        for header in glance.headers {
            request = request.header(header.name, header.value);
        }
        let (head, ()) = request.body(()).ok()?.into_parts();
        let body = Ok(Bytes::copy_from_slice(glance.body));
        Some(Self { head, body, peer, certificate: None })
    }

    pub fn method(&self) -> &str {
        self.head.method.as_str()
    }

    /// As it was sent: percent signs are not resolved.
    pub fn path(&self) -> &str {
        self.head.uri.path()
    }

    pub fn query(&self) -> Option<&str> {
        self.head.uri.query()
    }

    /// The first header of that name, in any case; none if it is not text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }
}

/// What is answered.
#[derive(Debug)]
pub struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Whole(Bytes),
    /// Sent as it comes, until the sender is dropped. It sees by its own full or closed channel how the client keeps up.
    Stream(mpsc::Receiver<Bytes>),
}

impl Reply {
    pub fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let headers = vec![(CONTENT_TYPE.as_str(), content_type.to_owned())];
        Self { status, headers, body: Content::Whole(body.into()) }
    }

    /// Of the door itself, which cannot ask who answers behind it; `detail` has nothing in it to escape.
    pub(super) fn unavailable(detail: &'static str) -> Self {
        let body = format!(
            r#"{{"type":"about:blank","title":"Service Unavailable","detail":"{detail}","status":503}}"#
        );
        Self::new(503, "application/problem+json", body).with("retry-after", "5")
    }

    /// Only a status.
    pub fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Content::Whole(Bytes::new()) }
    }

    pub fn stream(content_type: &'static str, body: mpsc::Receiver<Bytes>) -> Self {
        let headers = vec![(CONTENT_TYPE.as_str(), content_type.to_owned())];
        Self { status: 200, headers, body: Content::Stream(body) }
    }

    /// A header, its name in lower case. One that HTTP does not allow is left out.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Writes the answer as it goes over the wire.
    ///
    /// # Errors
    /// If its end is not known.
    pub(super) fn push_onto(self, bytes: &mut Vec<u8>, date: &str) -> io::Result<()> {
        let response = self.into_response();
        let Content::Whole(body) = response.body() else {
            return Err(io::Error::other("an answer without an end to a request that allows none"));
        };
        let status = response.status();
        write!(bytes, "HTTP/1.1 {} {}\r\n", status.as_str(), status.canonical_reason().unwrap_or("-"))?;
        for (name, value) in response.headers() {
            bytes.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
        }
        if status != StatusCode::NO_CONTENT {
            write!(bytes, "content-length: {}\r\n", body.len())?;
        }
        write!(bytes, "date: {date}\r\n\r\n")?;
        bytes.extend_from_slice(body);
        Ok(())
    }

    pub(super) fn into_response(self) -> Response<Content> {
        let mut response = Response::new(self.body);
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        for (name, value) in self.headers {
            if let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value))
            {
                response.headers_mut().insert(name, value);
            }
        }
        response
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Stream(stream) => stream.poll_recv(cx).map(|bytes| bytes.map(|b| Ok(Frame::data(b)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Stream(_) => SizeHint::default(),
        }
    }
}
