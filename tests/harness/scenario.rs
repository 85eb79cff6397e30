//! Runs several scenarios on one server, each below its own chroot: a JVM takes most of a second to
//! start, which a test binary with twenty scenarios then needs only once. The checks of scenarios
//! do not belong here.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::wire::{Client, Create};
use super::{Kind, Store};

const OTHER: &str = "-other";

/// A server, and a node on it that belongs to one scenario alone.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) kind: Kind,
    pub(crate) addr: SocketAddr,
    /// An existing, empty node such as `/ports_are_kept`.
    pub(crate) chroot: String,
}

impl Site {
    /// Returns address and chroot in the form that clients accept: `127.0.0.1:2181/name`.
    pub(crate) fn connect_string(&self) -> String {
        format!("{}{}", self.addr, self.chroot)
    }

    /// Returns the site of a second environment on the same server.
    pub(crate) fn other(&self) -> Self {
        Self { chroot: format!("{}{OTHER}", self.chroot), ..self.clone() }
    }

    /// Returns a path below the chroot, for clients without chroot support.
    pub(crate) fn path(&self, below: &str) -> String {
        format!("{}{below}", self.chroot)
    }
}

pub(crate) type Scenario = (&'static str, fn(&Site));

/// Runs all scenarios on one server, even after one has failed, and then fails with the names of
/// the failed ones. `SCENARIO=name` runs that one alone. `scenarios![a, b]` creates the list from
/// functions.
pub(crate) fn run(store: &Store, scenarios: &[Scenario]) {
    let mut failed = Vec::new();
    let only = std::env::var("SCENARIO").ok();
    let wanted: Vec<&Scenario> =
        scenarios.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)).collect();
    // The nodes of all scenarios are created first: a scenario may restrict the server's root.
    for (name, _) in &wanted {
        let mut client = Client::connect(store.addr());
        client.create(&format!("/{name}"), b"", Create::Persistent);
        client.create(&format!("/{name}{OTHER}"), b"", Create::Persistent);
    }
    for (name, scenario) in wanted {
        let site = Site { kind: store.kind(), addr: store.addr(), chroot: format!("/{name}") };
        if catch_unwind(AssertUnwindSafe(|| scenario(&site))).is_err() {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "{:?} failed {failed:?}; it said:\n{}", store.kind(), store.log());
}

/// Creates a list of functions of a [`Site`] with their names.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn(&$crate::harness::scenario::Site))),*] };
}
pub(crate) use scenarios;
