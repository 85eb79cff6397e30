//! The network code that every part shares: listeners, TLS identities and verification, the HTTP
//! server and the HTTP client. Paths, request bodies and the meaning of replies belong to the
//! parts.

pub mod client_limits;
pub mod http;
pub mod listener;
pub mod log_limit;
pub mod tls;
pub mod url;
