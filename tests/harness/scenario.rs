//! Generates one test per scenario and store, so that a failed test names both, and so that nextest
//! runs scenarios at the same time. Each test starts its own server: a ZooKeeper takes a quarter of
//! a second of CPU time to start, and most scenarios wait much longer than that. The checks of
//! scenarios do not belong here.

use std::net::SocketAddr;

use super::wire::{Client, Create};
use super::{Kind, Options, Store};

const OTHER: &str = "-other";

/// A server, and an empty node on it for one environment.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) kind: Kind,
    pub(crate) addr: SocketAddr,
    /// An existing, empty node such as `/ports_are_kept`, or nothing for the server's root.
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

/// Starts a server, runs a scenario on it, and prints the server's log if the scenario panics.
pub(crate) fn run(kind: Kind, options: Options, name: &str, scenario: fn(&Site)) {
    let server = Server(Store::start(kind, options));
    let addr = server.0.addr();
    let chroot = format!("/{name}");
    let mut client = Client::connect(addr);
    // Both nodes are created first: a scenario may restrict the server's root.
    client.create(&chroot, b"", Create::Persistent);
    client.create(&format!("{chroot}{OTHER}"), b"", Create::Persistent);
    client.close();
    scenario(&Site { kind, addr, chroot });
}

/// The server of one scenario.
struct Server(Store);

impl Drop for Server {
    #[allow(clippy::print_stderr)]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of {:?}:\n{}", self.0.kind(), self.0.log());
        }
    }
}

/// Turns functions of a [`Site`] into tests: `zookeeper::NAME` and `keeper::NAME` for each. A path
/// before a semicolon is the function that returns the [`Options`] of the servers.
macro_rules! on_both_stores {
    ($options:path; $($name:ident),+ $(,)?) => {
        $crate::harness::scenario::on_store![zookeeper, ZooKeeper, $options; $($name),+];
        $crate::harness::scenario::on_store![keeper, Keeper, $options; $($name),+];
    };
    ($($name:ident),+ $(,)?) => {
        $crate::harness::scenario::on_both_stores![$crate::harness::Options::default; $($name),+];
    };
}

/// Turns functions of a [`Site`] into tests on one kind of store, in a module.
macro_rules! on_store {
    ($module:ident, $kind:ident, $options:path; $($name:ident),+ $(,)?) => {
        mod $module {
            $(
                #[test]
                fn $name() {
                    let kind = $crate::harness::Kind::$kind;
                    $crate::harness::scenario::run(kind, $options(), stringify!($name), super::$name);
                }
            )+
        }
    };
}

/// Turns functions of a [`Kind`], which start their servers themselves, into tests:
/// `zookeeper::NAME` and `keeper::NAME` for each.
macro_rules! for_both_kinds {
    ($($name:ident),+ $(,)?) => {
        mod zookeeper {
            $(#[test] fn $name() { super::$name($crate::harness::Kind::ZooKeeper); })+
        }
        mod keeper {
            $(#[test] fn $name() { super::$name($crate::harness::Kind::Keeper); })+
        }
    };
}

pub(crate) use {for_both_kinds, on_both_stores, on_store};
