//! Free ports for servers that cannot bind port 0 or must come back on the same one. Which server gets it is no
//! matter here.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below Linux's range for outgoing connections. Inside that range a client that dials a server which is just away can
/// be given the server's own port as its source: it then talks to itself, and the server cannot come back.
const FIRST: u16 = 10_000;
const COUNT: u16 = 22_000;

static TRIED: AtomicU16 = AtomicU16::new(0);

/// A port on loopback that nobody listens on. Processes start their search in different places, so that tests that run
/// side by side rarely want the same one.
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
