//! `http://` and `https://` addresses, as far as clients here need them. Pure.

/// A parsed address. It has no user name and no password: addresses are shown in logs and replies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    pub is_tls: bool,
    /// `HOST[:PORT]` as given, for the `Host` header.
    pub authority: String,
    /// A DNS name or an address, without the brackets of IPv6.
    pub host: String,
    pub port: u16,
    /// Path and query; at least `/`.
    pub path: String,
}

/// The reason why a text is not an address that can be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("only http:// and https:// addresses can be called")]
    Scheme,
    #[error("not an address")]
    Characters,
    #[error("not HOST[:PORT] after ://")]
    Authority,
}

impl Url {
    /// # Errors
    /// If the text is not `http[s]://HOST[:PORT][/PATH]`.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let (is_tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => return Err(UrlError::Scheme),
        };
        if text.bytes().any(|byte| byte <= b' ' || byte >= 127) {
            return Err(UrlError::Characters);
        }
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let end_of_host = authority.find(']').map_or(0, |at| at + 1);
        let (host, port) = match authority[end_of_host..].find(':') {
            Some(at) => {
                let (host, port) = authority.split_at(end_of_host + at);
                (host, port[1..].parse().map_err(|_| UrlError::Authority)?)
            }
            None => (authority, if is_tls { 443 } else { 80 }),
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if bare.is_empty() || authority.contains(['@', '?', '#', ',']) || bare.contains(['[', ']']) {
            return Err(UrlError::Authority);
        }
        Ok(Self {
            is_tls,
            authority: authority.to_owned(),
            host: bare.to_owned(),
            port,
            path: path.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_into_their_parts() {
        for (text, is_tls, authority, host, port, path) in [
            ("http://a", false, "a", "a", 80, "/"),
            ("https://a.b:8443/x/y?z=1", true, "a.b:8443", "a.b", 8443, "/x/y?z=1"),
            ("http://10.0.0.1:1/", false, "10.0.0.1:1", "10.0.0.1", 1, "/"),
            ("https://[::1]", true, "[::1]", "::1", 443, "/"),
            ("http://[fd00::1]:7/x", false, "[fd00::1]:7", "fd00::1", 7, "/x"),
        ] {
            let url = Url::parse(text).unwrap();
            let found = (url.is_tls, &*url.authority, &*url.host, url.port, &*url.path);
            assert_eq!(found, (is_tls, authority, host, port, path), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "a", "ftp://a", "HTTP://a", "httpx://a", "//a"] {
            assert_eq!(Url::parse(text), Err(UrlError::Scheme), "{text}");
        }
        for text in ["http://a b/", "http://h/\u{e9}", "http://a\n"] {
            assert_eq!(Url::parse(text), Err(UrlError::Characters), "{text}");
        }
        for text in [
            "http://",
            "http:///x",
            "http://u:p@h/",
            "https://u@a",
            "http://:80",
            "http://a:",
            "http://a:99999",
            "http://a:b",
            "http://a?x",
            "http://[]",
            "http://[::1",
            "http://a,b",
            "http://::1",
        ] {
            assert_eq!(Url::parse(text), Err(UrlError::Authority), "{text}");
        }
    }
}
