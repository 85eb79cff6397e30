//! Tests of the wire protocol, byte for byte. The same code runs against Apache ZooKeeper and
//! against the keeper; where the two differ, the keeper is wrong.

#[path = "../harness/authority.rs"]
mod authority;
#[path = "../harness/mod.rs"]
mod harness;

mod abuse;
mod acls;
mod files;
mod four_letter;
mod frames;
mod limits;
mod operations;
mod restarts;
mod sessions;
mod tls;
mod watches;

use harness::Options;

/// Options of a server with the superuser `super:secret`.
fn with_super_user() -> Options {
    Options { super_digest: Some("super:lK75jTNcA+U9vtVEw5vB51mj/w4=".to_owned()), ..Options::default() }
}
