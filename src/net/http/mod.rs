//! HTTP/1: the server for metrics, health and heartbeats, the strict framing of requests, and the
//! client. The server checks the framing of every request (`framing`) and passes whole requests to
//! a handler: `fast_path` serves small POST requests, `exchange` every other request. Paths and
//! replies belong to the handlers, which see no type of the HTTP library.

mod buffer_limits;
pub mod chunked;
pub mod client;
mod exchange;
mod fast_path;
pub mod framing;
mod message;
mod server;
mod tls_accept;
mod write_timeout;

pub use self::fast_path::RawPost;
pub use self::message::{BodyError, Reply, Request};
pub use self::server::{Handler, Limits, Server};
