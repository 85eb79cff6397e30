//! The strict check of an HTTP/1 request head: the end of the request must be unambiguous. A head
//! that other software might frame in another way (request smuggling) is refused, even where RFC
//! 9112 would let a server guess. Used for every request before any handler sees it. Pure.

use httparse::{Header, Status};

/// How the body of a request is delimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLength {
    /// By `Content-Length`, or 0 without it.
    Exactly(u64),
    Chunked,
}

/// A valid request head.
#[derive(Debug)]
pub struct Head<'h, 'b> {
    pub method: &'b str,
    /// Path and query, or an absolute URI, as sent.
    pub target: &'b str,
    pub headers: &'h [Header<'b>],
    /// The length of the head, with the empty line.
    pub bytes: usize,
    pub body: BodyLength,
    /// Whether another request may follow. HTTP/1.0 connections end after one request.
    pub keep_alive: bool,
    pub expect: Expect,
    pub http_11: bool,
    /// The head needs no special treatment: HTTP/1.1 without `Connection: close`, `Expect` or
    /// `Upgrade`.
    pub plain: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Expect {
    #[default]
    Nothing,
    Continue,
    /// An expectation that no server here can meet: 417.
    Unknown,
}

/// Why a request is refused before it reaches a handler. The text is sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("Invalid request head")]
    Syntax,
    #[error("Lines of a request head must end with CRLF")]
    BareLineFeed,
    #[error("Too many header fields")]
    TooManyHeaders,
    #[error("The request head is too large")]
    HeadTooLarge,
    #[error("A request needs exactly one valid Host header field")]
    Host,
    #[error("Host and the authority of the request target differ")]
    HostMismatch,
    #[error("Invalid or repeated Content-Length")]
    ContentLength,
    #[error("Transfer-Encoding must be `chunked`, once, in HTTP/1.1")]
    TransferEncoding,
    #[error("Content-Length and Transfer-Encoding exclude each other")]
    BothLengths,
    #[error("Unknown expectation")]
    Expectation,
    #[error("Invalid chunked body")]
    Chunk,
}

impl Invalid {
    pub fn status(self) -> u16 {
        match self {
            Self::TooManyHeaders | Self::HeadTooLarge => 431,
            Self::Expectation => 417,
            _ => 400,
        }
    }
}

/// Reads the head at the beginning of `bytes`; none while it is incomplete.
///
/// # Errors
/// If the head is invalid or ambiguous, as soon as that is known.
pub fn head<'h, 'b>(bytes: &'b [u8], headers: &'h mut [Header<'b>]) -> Result<Option<Head<'h, 'b>>, Invalid> {
    let mut request = httparse::Request::new(headers);
    let length = match request.parse(bytes) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) if has_bare_line_feed(bytes) => return Err(Invalid::BareLineFeed),
        Ok(Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Invalid::TooManyHeaders),
        Err(_) => return Err(Invalid::Syntax),
    };
    if has_bare_line_feed(&bytes[..length]) {
        return Err(Invalid::BareLineFeed);
    }
    let httparse::Request { method: Some(method), path: Some(target), version: Some(minor), headers } =
        request
    else {
        return Err(Invalid::Syntax);
    };
    let headers: &'h [Header<'b>] = headers;
    let fields = Fields::of(headers)?;
    let body = match (fields.length, fields.chunked) {
        (Some(_), true) => return Err(Invalid::BothLengths),
        // HTTP/1.0 has no chunked encoding: an HTTP/1.0 proxy would forward the chunks unchanged.
        (None, true) if minor == 0 => return Err(Invalid::TransferEncoding),
        (None, true) => BodyLength::Chunked,
        (length, false) => BodyLength::Exactly(length.unwrap_or(0)),
    };
    if minor > 0 && fields.host.is_none() {
        return Err(Invalid::Host);
    }
    check_target(target, fields.host)?;
    Ok(Some(Head {
        method,
        target,
        headers,
        bytes: length,
        body,
        keep_alive: minor > 0 && !fields.close,
        expect: fields.expect,
        http_11: minor > 0,
        plain: minor > 0 && !fields.close && fields.expect == Expect::Nothing && !fields.upgrade,
    }))
}

/// Written without an early end, so that the compiler vectorises it.
fn has_bare_line_feed(bytes: &[u8]) -> bool {
    let pairs = bytes.iter().zip(bytes.get(1..).unwrap_or_default());
    bytes.first() == Some(&b'\n')
        || pairs.fold(false, |bare, (before, byte)| bare | ((*byte == b'\n') & (*before != b'\r')))
}

/// The header fields that frame a request.
#[derive(Default)]
struct Fields<'b> {
    host: Option<&'b [u8]>,
    length: Option<u64>,
    chunked: bool,
    close: bool,
    upgrade: bool,
    expect: Expect,
}

impl<'b> Fields<'b> {
    fn of(headers: &[Header<'b>]) -> Result<Self, Invalid> {
        let mut fields = Self::default();
        for Header { name, value } in headers {
            let is = |known: &str| name.eq_ignore_ascii_case(known);
            // Comparing lengths first excludes nearly all fields.
            match name.len() {
                4 if is("host") => {
                    if fields.host.is_some() || !is_host(value) {
                        return Err(Invalid::Host);
                    }
                    fields.host = Some(*value);
                }
                14 if is("content-length") => {
                    if fields.length.is_some() {
                        return Err(Invalid::ContentLength);
                    }
                    fields.length = Some(decimal(value).ok_or(Invalid::ContentLength)?);
                }
                17 if is("transfer-encoding") => {
                    if fields.chunked || !value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Invalid::TransferEncoding);
                    }
                    fields.chunked = true;
                }
                10 if is("connection") => fields.close |= has_token(value, b"close"),
                7 if is("upgrade") => fields.upgrade = true,
                6 if is("expect") => {
                    let known = value.eq_ignore_ascii_case(b"100-continue");
                    fields.expect = if known { Expect::Continue } else { Expect::Unknown };
                }
                _ => {}
            }
        }
        Ok(fields)
    }
}

fn decimal(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn has_token(value: &[u8], token: &[u8]) -> bool {
    value.split(|byte| *byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
}

/// Checks `HOST[:PORT]` far enough that all software sees the same host: no list, no user, no path.
fn is_host(value: &[u8]) -> bool {
    value.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+;=:[]".contains(byte))
}

/// In a request for an absolute URI two fields name the host, and software differs in which one
/// counts.
fn check_target(target: &str, host: Option<&[u8]>) -> Result<(), Invalid> {
    if target.starts_with('/') {
        return Ok(());
    }
    let Some((_, rest)) = target.split_once("://") else { return Ok(()) };
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    match host {
        Some(host) if !host.eq_ignore_ascii_case(authority.as_bytes()) => Err(Invalid::HostMismatch),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use httparse::EMPTY_HEADER;
    use proptest::prelude::*;

    use super::*;

    /// Length, body, keep-alive, expectation, and whether the fast path may serve it.
    type Read = (usize, BodyLength, bool, Expect, bool);

    fn read(bytes: &[u8]) -> Result<Option<Read>, Invalid> {
        let mut headers = [EMPTY_HEADER; 8];
        let found = head(bytes, &mut headers)?;
        Ok(found.map(|head| (head.bytes, head.body, head.keep_alive, head.expect, head.plain)))
    }

    fn post(headers: &str) -> String {
        format!("POST /a HTTP/1.1\r\n{headers}\r\n")
    }

    #[test]
    fn unambiguous_heads_are_accepted() {
        use BodyLength::{Chunked, Exactly};
        for (request, body, keep_alive, plain) in [
            (post("Host: x\r\n"), Exactly(0), true, true),
            (post("Host:\r\nContent-Length: 3\r\n"), Exactly(3), true, true),
            (post("host: [::1]:80\r\ncontent-length: 007\r\n"), Exactly(7), true, true),
            (post("Host: x\r\nTransfer-Encoding: Chunked\r\n"), Chunked, true, true),
            (post("Host: x\r\nConnection: keep-alive\r\n"), Exactly(0), true, true),
            (post("Host: x\r\nConnection: x, Close\r\n"), Exactly(0), false, false),
            (post("Host: x\r\nUpgrade: h2c\r\n"), Exactly(0), true, false),
            ("GET / HTTP/1.0\r\n\r\n".to_owned(), Exactly(0), false, false),
            ("GET http://X:8/a HTTP/1.1\r\nHost: x:8\r\n\r\n".to_owned(), Exactly(0), true, true),
            ("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), Exactly(0), true, true),
            ("GET /?a=http://b HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), Exactly(0), true, true),
        ] {
            let expected = (request.len(), body, keep_alive, Expect::Nothing, plain);
            assert_eq!(read(format!("{request}xyz").as_bytes()), Ok(Some(expected)), "{request:?}");
        }
        let expecting = read(post("Host: x\r\nExpect: 100-Continue\r\n").as_bytes());
        assert!(matches!(expecting, Ok(Some((_, _, true, Expect::Continue, false)))), "{expecting:?}");
        let unknown = read(post("Host: x\r\nExpect: wonders\r\n").as_bytes());
        assert!(matches!(unknown, Ok(Some((_, _, _, Expect::Unknown, false)))), "{unknown:?}");
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        use Invalid as I;
        let many = "x: 1\r\n".repeat(9);
        for (request, why) in [
            (post("Host: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n"), I::BothLengths),
            (post("Host: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length: 3, 3\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length: +3\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length: 0x3\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length: 3 3\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length:\r\n"), I::ContentLength),
            (post("Host: x\r\nContent-Length: 99999999999999999999\r\n"), I::ContentLength),
            (
                post("Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
                I::TransferEncoding,
            ),
            (post("Host: x\r\nTransfer-Encoding: chunked, chunked\r\n"), I::TransferEncoding),
            (post("Host: x\r\nTransfer-Encoding: xchunked\r\n"), I::TransferEncoding),
            (post("Host: x\r\nTransfer-Encoding: identity\r\n"), I::TransferEncoding),
            (post("Host: x\r\nTransfer-Encoding:\r\n"), I::TransferEncoding),
            ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(), I::TransferEncoding),
            (post(""), I::Host),
            (post("Host: a\r\nHost: a\r\n"), I::Host),
            (post("Host: a, b\r\n"), I::Host),
            (post("Host: a/b\r\n"), I::Host),
            (post("Host: u@a\r\n"), I::Host),
            ("GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n".to_owned(), I::Host),
            ("GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n".to_owned(), I::HostMismatch),
            ("GET http://a HTTP/1.1\r\nHost: a:80\r\n\r\n".to_owned(), I::HostMismatch),
            (post("Host: x\nX: 1\r\n"), I::BareLineFeed),
            ("POST / HTTP/1.1\nHost: x\r\n\r\n".to_owned(), I::BareLineFeed),
            ("POST / HTTP/1.1\r\nHost: x\r\n\n".to_owned(), I::BareLineFeed),
            ("\nPOST / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), I::BareLineFeed),
            ("POST / HTTP/1.1\r\nHost: x\n".to_owned(), I::BareLineFeed),
            (post("Host: x\rX: 1\r\n"), I::Syntax),
            (post("Host: x\r\nX: 1\r\n 2\r\n"), I::Syntax),
            (post(" Host: x\r\n"), I::Syntax),
            (post("Host : x\r\n"), I::Syntax),
            (post("Host: x\r\nContent-Length\t: 1\r\n"), I::Syntax),
            (post("Host: x\r\nno colon\r\n"), I::Syntax),
            (post("Host: x\r\nX: a\0b\r\n"), I::Syntax),
            ("POST  / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(), I::Syntax),
            ("POST / HTTP/1.1 \r\nHost: x\r\n\r\n".to_owned(), I::Syntax),
            ("GET / HTTP/2.0\r\nHost: x\r\n\r\n".to_owned(), I::Syntax),
            ("GET /\r\n\r\n".to_owned(), I::Syntax),
            (post(&many), I::TooManyHeaders),
        ] {
            assert_eq!(read(request.as_bytes()), Err(why), "{request:?}");
        }
    }

    proptest! {
        /// A prefix of a valid head is never taken for a whole one.
        #[test]
        fn head_is_complete_only_at_its_end(cut in 0_usize..70) {
            let request = post("Host: x\r\nContent-Length: 3\r\nX-Y: some text here\r\n");
            prop_assume!(cut < request.len());
            prop_assert_eq!(read(&request.as_bytes()[..cut]), Ok(None));
        }

        #[test]
        fn arbitrary_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some((length, ..))) = read(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }
    }
}
