//! Requests and replies as handlers see them, without a type of the HTTP library.

use std::net::SocketAddr;

use bytes::Bytes;
use httparse::Header;
use hyper::StatusCode;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use tokio::sync::mpsc;

use super::buffer_limits::Reservation;
use super::fast_path::RawPost;

/// The reason why a request has no usable body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body is too large")]
    TooLarge,
    #[error("the body did not come in time")]
    TooSlow,
    #[error("the body was cut off")]
    Broken,
    /// The limit for the memory of bodies is reached.
    #[error("too many large bodies at the same time")]
    Busy,
}

impl BodyError {
    /// Returns the status of the reply.
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
    /// The client's verified certificate, in DER form.
    pub certificate: Option<Bytes>,
    /// The memory of a large body, reserved until the request ends.
    pub(super) _room: Option<Reservation>,
}

impl Request {
    /// Returns none if the HTTP library does not accept a part of the head.
    pub(super) fn head(method: &str, target: &str, headers: &[Header<'_>]) -> Option<Parts> {
        let mut request = hyper::Request::builder().method(method).uri(target);
        for header in headers {
            request = request.header(header.name, header.value);
        }
        Some(request.body(()).ok()?.into_parts().0)
    }

    /// Returns a POST without a certificate; none as above.
    pub(super) fn of(post: &RawPost<'_>, peer: SocketAddr) -> Option<Self> {
        let head = Self::head("POST", post.target, post.headers)?;
        let body = Ok(Bytes::copy_from_slice(post.body));
        Some(Self { head, body, peer, certificate: None, _room: None })
    }

    pub fn method(&self) -> &str {
        self.head.method.as_str()
    }

    /// The path as sent: percent escapes are not decoded.
    pub fn path(&self) -> &str {
        self.head.uri.path()
    }

    pub fn query(&self) -> Option<&str> {
        self.head.uri.query()
    }

    /// Returns the first header of that name, in any case; none if it is not text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }
}

/// A reply: a status, headers and a body.
#[derive(Debug)]
pub struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Whole(Bytes),
    /// Sent piece by piece until the sender is dropped. A slow client leaves the channel full, a
    /// closed connection closes it.
    Stream(mpsc::Receiver<Bytes>),
}

impl Reply {
    pub fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let headers = vec![(CONTENT_TYPE.as_str(), content_type.to_owned())];
        Self { status, headers, body: Content::Whole(body.into()) }
    }

    /// A refusal by the server itself; `detail` must not need JSON escapes.
    pub(super) fn unavailable(detail: &str) -> Self {
        Self::refused(503, detail).with("retry-after", "5")
    }

    /// The same with any status.
    pub(super) fn refused(status: u16, detail: &str) -> Self {
        let title = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
        let title = title.unwrap_or("Error");
        let body =
            format!(r#"{{"type":"about:blank","title":"{title}","detail":"{detail}","status":{status}}}"#);
        Self::new(status, "application/problem+json", body)
    }

    /// A reply with a status only.
    pub fn empty(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Content::Whole(Bytes::new()) }
    }

    pub fn stream(content_type: &'static str, body: mpsc::Receiver<Bytes>) -> Self {
        let headers = vec![(CONTENT_TYPE.as_str(), content_type.to_owned())];
        Self { status: 200, headers, body: Content::Stream(body) }
    }

    /// Adds a header, its name in lower case. A header that HTTP does not allow is left out.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Whether the connection ends with this reply.
    pub(super) fn closes(&self) -> bool {
        self.headers.iter().any(|(name, value)| *name == "connection" && value == "close")
    }

    /// Writes the reply in its wire form, except for a stream, which is returned.
    pub(super) fn write_to(
        self,
        bytes: &mut Vec<u8>,
        date: &str,
        wire: Wire,
    ) -> Option<mpsc::Receiver<Bytes>> {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let reason = status.canonical_reason().unwrap_or("-");
        let mut head = format!("HTTP/1.1 {} {reason}\r\n", status.as_str());
        let mut headers = HeaderMap::new();
        for (name, value) in self.headers {
            if let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value))
            {
                headers.insert(name, value);
            }
        }
        if wire.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        for (name, value) in &headers {
            // `HeaderValue::from_str` takes only visible ASCII.
            head.extend([name.as_str(), ": ", value.to_str().unwrap_or_default(), "\r\n"]);
        }
        match &self.body {
            Content::Whole(_) if status == StatusCode::NO_CONTENT => {}
            Content::Whole(body) => head.push_str(&format!("content-length: {}\r\n", body.len())),
            Content::Stream(_) if wire.chunks => head.push_str("transfer-encoding: chunked\r\n"),
            Content::Stream(_) => {}
        }
        head.push_str(&format!("date: {date}\r\n\r\n"));
        bytes.extend_from_slice(head.as_bytes());
        match self.body {
            _ if wire.without_body => None,
            Content::Whole(body) => {
                bytes.extend_from_slice(&body);
                None
            }
            Content::Stream(pieces) => Some(pieces),
        }
    }
}

/// The wire form of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wire {
    /// The request was HEAD.
    pub(super) without_body: bool,
    /// The client reads chunks; otherwise a stream ends with its connection.
    pub(super) chunks: bool,
    pub(super) close: bool,
}
