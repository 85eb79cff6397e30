//! Free ports for servers that cannot bind port 0 or must restart on the same port. Starting
//! servers does not belong here.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below Linux's range of ephemeral ports. Within that range, a client that connects to a stopped
/// server can get the server's port as its source port: it then connects to itself, and the server
/// cannot bind the port again.
const FIRST: u16 = 10_000;
const COUNT: u16 = 22_000;

static TRIED: AtomicU16 = AtomicU16::new(0);

/// Returns a loopback port without a listener. Each process starts its search at another port, so
/// that concurrent tests rarely collide.
pub(crate) fn free() -> u16 {
    let start = std::process::id().wrapping_mul(7_919);
    for _ in 0..COUNT {
        let step = u32::from(TRIED.fetch_add(1, Ordering::Relaxed));
        let offset = (start.wrapping_add(step)) % u32::from(COUNT);
        let port = FIRST + u16::try_from(offset).expect("below COUNT");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port on loopback");
}
