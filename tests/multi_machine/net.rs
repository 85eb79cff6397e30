//! A network of a hub, which has the store and the operator, and machines on links that tests can
//! set down. All of it is in network namespaces of its own, so addresses and ports cannot conflict
//! with others.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::harness::wait_for;
use crate::netns::{Namespace, sweep};

pub(crate) const MACHINES: usize = 3;

/// Long enough for a busy machine, and short enough for tests that expect a timeout.
const KNOCK_LIMIT: Duration = Duration::from_secs(1);

/// The result of a connection attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    Connected,
    Refused,
    /// No reply at all.
    TimedOut,
}

pub(crate) struct Net {
    hub: Namespace,
    machines: Vec<Namespace>,
}

pub(crate) fn address(machine: usize) -> String {
    format!("10.78.0.{}", machine + 1)
}

/// Returns the address of a member of the ensemble.
pub(crate) fn store_address(member: usize) -> String {
    format!("10.78.0.{}", member + 11)
}

impl Net {
    pub(crate) fn new() -> Self {
        sweep();
        let hub = Namespace::new("hub");
        hub.ip("link set lo up");
        hub.ip("link add br0 type bridge");
        for member in 0..3 {
            hub.ip(&format!("addr add {}/24 dev br0", store_address(member)));
        }
        hub.ip("link set br0 up");
        let machines: Vec<Namespace> = (0..MACHINES).map(|n| Namespace::new(&format!("m{n}"))).collect();
        for (n, machine) in machines.iter().enumerate() {
            hub.ip(&format!("link add m{n} type veth peer name eth0 netns {}", machine.0));
            hub.ip(&format!("link set m{n} master br0"));
            hub.ip(&format!("link set m{n} up"));
            machine.ip("link set lo up");
            machine.ip(&format!("addr add {}/24 dev eth0", address(n)));
            machine.ip("link set eth0 up");
        }
        let net = Self { hub, machines };
        for n in 0..MACHINES {
            // The port has no listener, so the machine's kernel refuses: packets pass in both
            // directions.
            let to = SocketAddr::new(address(n).parse().unwrap(), 1);
            wait_for("the cable", Duration::from_secs(20), || {
                (net.attempt(to) == Attempt::Refused).then_some(())
            });
        }
        net
    }

    pub(crate) fn hub(&self) -> &Namespace {
        &self.hub
    }

    pub(crate) fn machine(&self, machine: usize) -> &Namespace {
        &self.machines[machine]
    }

    /// Tries to connect from the hub.
    pub(crate) fn attempt(&self, to: SocketAddr) -> Attempt {
        outcome(self.hub.enter(|| TcpStream::connect_timeout(&to, KNOCK_LIMIT)))
    }

    /// Tries to connect from one machine to another, or to itself.
    pub(crate) fn attempt_from(&self, machine: usize, to: SocketAddr) -> Attempt {
        outcome(self.machines[machine].enter(|| TcpStream::connect_timeout(&to, KNOCK_LIMIT)))
    }

    pub(crate) fn pull(&self, machine: usize) {
        self.hub.ip(&format!("link set m{machine} down"));
    }

    pub(crate) fn plug(&self, machine: usize) {
        self.hub.ip(&format!("link set m{machine} up"));
    }

    /// Returns the same command for the hub's namespace.
    pub(crate) fn on_hub(&self, command: &Command) -> Command {
        inside(&self.hub, command)
    }

    /// Returns the same command for a machine's namespace.
    pub(crate) fn on_machine(&self, machine: usize, command: &Command) -> Command {
        inside(&self.machines[machine], command)
    }
}

fn inside(namespace: &Namespace, command: &Command) -> Command {
    let mut wrapped = Command::new("nsenter");
    wrapped.arg(format!("--net=/run/netns/{}", namespace.0)).arg(command.get_program());
    wrapped.args(command.get_args()).env_clear();
    for (name, value) in command.get_envs() {
        wrapped.env(name, value.expect("a value"));
    }
    if let Some(directory) = command.get_current_dir() {
        wrapped.current_dir(directory);
    }
    wrapped
}

fn outcome(connected: io::Result<TcpStream>) -> Attempt {
    match connected.map_err(|error| error.kind()) {
        Ok(_) => Attempt::Connected,
        Err(io::ErrorKind::ConnectionRefused) => Attempt::Refused,
        Err(_) => Attempt::TimedOut,
    }
}
