//! TLS for every listener and every outgoing connection: certificates and keys in PEM files, server
//! and client configurations, and the names in a peer's certificate. Files that change are read
//! again without a restart. The decision what a peer with a name may do belongs to the parts.

mod accept;
pub mod authority;
pub mod certificate;
pub mod client;
mod files;
pub mod key;
pub mod peer;
pub mod pin;
pub mod probe;
pub mod refused_client;
pub mod server;

pub use self::accept::certificate_in;
pub use self::client::{ClientFiles, ClientTls, MachineFiles};
pub use self::files::{IdentityFiles, TlsError};
pub use self::server::{ClientAuth, ServerFiles, ServerTls};

#[cfg(test)]
mod tests;
