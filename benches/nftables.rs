//! `cargo bench-nftables`: the time to open and close 1,000 ports through the driver, compared with
//! `nft` alone, which adds the same ports to an empty set. Needs root: it works in network
//! namespaces of its own.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints, and stops where it cannot go on"
)]

#[path = "../provider/tests/netns/mod.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod netns;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use netns::{MACHINE, Namespace, Net};
use portcullis_provider::nftables::Mode;
use portcullis_provider::provider::Firewall as _;
use portcullis_provider::rule::{Change, PortRange, Protocol, Rule};

const PORTS: u16 = 1_000;
const ROUNDS: usize = 10;
const GOAL: Duration = Duration::from_millis(50);

fn main() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{PORTS} ports, best of {ROUNDS} rounds; the load is {}", load.trim());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[22]);
    let rule = |n: u16| {
        Rule::new(
            PortRange::new(1_001 + 2 * n, 1_001 + 2 * n, Protocol::Tcp).unwrap(),
            WORLD.parse().unwrap(),
        )
    };
    let rules: std::collections::BTreeSet<Rule> = (0..PORTS).map(rule).collect();
    let open = Change { open: rules.clone(), ..Change::default() };
    let close = Change { close: rules, ..Change::default() };
    let apply = |change: &Change| {
        let until = tokio::time::Instant::now() + Duration::from_secs(60);
        let begun = Instant::now();
        let applied = runtime.block_on(firewall.apply(MACHINE, change, until));
        assert_eq!(applied, portcullis_provider::provider::Applied::as_one(Ok(())));
        begun.elapsed()
    };
    let (mut opened, mut closed) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        opened = opened.min(apply(&open));
        closed = closed.min(apply(&close));
    }
    let alone = (0..ROUNDS).map(|_| nft_alone()).min().unwrap();
    let ratio = |time: Duration| time.as_secs_f64() / alone.as_secs_f64();
    let met = if opened < GOAL { "met" } else { "MISSED" };
    println!(
        "  open, listing included    {opened:>10.1?}  {:.1}x nft alone; goal {GOAL:?}: {met}",
        ratio(opened)
    );
    println!("  close, listing included   {closed:>10.1?}  {:.1}x nft alone", ratio(closed));
    println!("  nft alone                 {alone:>10.1?}");
}

const WORLD: &str = "0.0.0.0/0";

/// Measures one run of `nft` that creates a set with the same ports in an empty namespace.
fn nft_alone() -> Duration {
    let namespace = Namespace::new("alone");
    let ports: Vec<String> = (0..PORTS).map(|n| format!("tcp . {}", 1_001 + 2 * n)).collect();
    let script = format!(
        "table inet t {{ set s {{ type inet_proto . inet_service; flags interval; elements = {{ {} \
         }} }} }}\n",
        ports.join(", ")
    );
    let begun = Instant::now();
    let mut nft = Command::new("ip")
        .args(["netns", "exec", &namespace.0, "nft", "-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    nft.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
    begun.elapsed()
}
