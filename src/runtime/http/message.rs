//! What comes in at a door and what goes out, as whoever answers sees it: without a type of the HTTP library.

use std::net::SocketAddr;

use bytes::Bytes;
use httparse::Header;
use hyper::StatusCode;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use tokio::sync::mpsc;

use super::express::Glance;
use super::share::Share;

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
    /// The large body's share of the limit for all large bodies, held until the request ends.
    pub(super) _room: Option<Share>,
}

impl Request {
    /// None if the HTTP library's types do not allow it.
    pub(super) fn head(method: &str, target: &str, headers: &[Header<'_>]) -> Option<Parts> {
        let mut request = hyper::Request::builder().method(method).uri(target);
        for header in headers {
            request = request.header(header.name, header.value);
        }
        Some(request.body(()).ok()?.into_parts().0)
    }

    /// A POST without a certificate. None as above.
    pub(super) fn of(glance: &Glance<'_>, peer: SocketAddr) -> Option<Self> {
        let head = Self::head("POST", glance.target, glance.headers)?;
        let body = Ok(Bytes::copy_from_slice(glance.body));
        Some(Self { head, body, peer, certificate: None, _room: None })
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

    /// From the server itself, without its handler; `detail` has nothing in it to escape.
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

    /// Whether the connection ends with this reply.
    pub(super) fn closes(&self) -> bool {
        self.headers.iter().any(|(name, value)| *name == "connection" && value == "close")
    }

    /// Writes the reply as it goes over the wire, except for a stream, which is returned.
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

/// How a reply goes over the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wire {
    /// The request was HEAD.
    pub(super) without_body: bool,
    /// The client reads chunks; otherwise the end of a stream is that of the connection.
    pub(super) chunks: bool,
    pub(super) close: bool,
}
