//! The keeper's limit on the connections of one remote address, with real sockets.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::harness::wire::{Client, Hello, Lost};
use crate::harness::{HANG, binary, wait_for};
use crate::net::{Net, store_address};

/// The default of `max_connections_per_address`.
const PER_ADDRESS: usize = 60;

/// Killed on drop.
struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Starts a keeper on all addresses of the hub, and returns its port.
fn start_keeper(net: &Net, directory: &Path) -> (Keeper, u16) {
    let mut command = Command::new(binary("portcullis"));
    command.arg("keeper").arg("--data-dir").arg(directory.join("data"));
    command.args(["--listen", "0.0.0.0:0", "--allow-plain-tcp"]);
    let output = directory.join("output");
    let mut command = net.on_hub(&command);
    command.stdin(Stdio::null()).stdout(File::create(&output).unwrap()).stderr(Stdio::null());
    let keeper = Keeper(command.spawn().unwrap());
    let port = wait_for("the keeper's address", HANG, || {
        let printed = fs::read_to_string(&output).unwrap();
        let (_, port) = printed.lines().next()?.rsplit_once(':')?;
        port.parse().ok()
    });
    (keeper, port)
}

#[test]
fn connections_of_one_address_are_limited_and_others_still_connect() {
    let net = Net::new();
    let directory = tempfile::tempdir().unwrap();
    let (_keeper, port) = start_keeper(&net, directory.path());
    let remote = SocketAddr::new(store_address(0).parse().unwrap(), port);
    let connect =
        |machine: usize| net.machine(machine).enter(|| Client::try_connect(remote, &Hello::default()));
    let mut held: Vec<Client> = (0..PER_ADDRESS)
        .map(|number| connect(0).unwrap_or_else(|lost| panic!("{number}: {lost:?}")))
        .collect();
    let refused = connect(0);
    assert!(matches!(refused, Err(Lost::Closed)), "{refused:?}");
    let _other = connect(1).expect("a session from another address");
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let _local =
        net.hub().enter(|| Client::try_connect(loopback, &Hello::default())).expect("a local session");
    assert!(held.iter_mut().all(|client| client.get("/").is_ok()), "an earlier connection was closed");
    held.pop().expect("a connection").close();
    wait_for("a session in place of the closed one", HANG, || connect(0).ok());
}
