//! Tests the nftables driver with packets between two network namespaces, not with listings.

#![allow(clippy::unwrap_used, reason = "only tests call this")]

mod changes;
mod first_start;
#[path = "../netns/mod.rs"]
mod netns;
mod opening;
mod program;
#[path = "../suite/mod.rs"]
mod suite;
mod table;

use netns::{MACHINE, Net};
use portcullis_provider::Nftables;
use portcullis_provider::nftables::Mode;
use portcullis_provider::provider::{Applied, Firewall, MachineNumber};
use portcullis_provider::rule::{Change, Protocol, Rule};
use std::net::{SocketAddr, TcpListener};
use suite::{Bench, holds, in_time, rule, seen};

const WORLD: &str = "0.0.0.0/0";

fn tcp(port: u16) -> Rule {
    rule(port, port, Protocol::Tcp, WORLD)
}

fn change(open: &[Rule], close: &[Rule]) -> Change {
    Change { open: open.iter().copied().collect(), close: close.iter().copied().collect() }
}

async fn apply(firewall: &Nftables, open: &[Rule], close: &[Rule]) {
    assert_eq!(firewall.apply(MACHINE, &change(open, close), in_time()).await, Applied::as_one(Ok(())));
}

fn address(listener: &TcpListener) -> SocketAddr {
    listener.local_addr().unwrap()
}

#[tokio::test]
async fn nftables_fulfils_the_contract() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[22]);
    holds(&Bench { firewall, machine: MACHINE, absent: MachineNumber::new(8), keeps: true }).await;
}

#[tokio::test]
async fn thousand_ports_open_and_close_in_one_change() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[22]);
    let rules: Vec<Rule> = (0..1000).map(|n| tcp(1001 + 2 * n)).collect();
    apply(&firewall, &rules, &[]).await;
    assert_eq!(seen(&firewall, MACHINE).await.owned.len(), 1000);
    apply(&firewall, &[], &rules).await;
    assert_eq!(seen(&firewall, MACHINE).await.owned.len(), 0);
}
