//! Changes of rules do not affect other traffic: neither existing connections nor connections that
//! are made during the change.

use super::netns::{Attempt, Net, SERVER, wait_for};
use super::suite::rule;
use super::{WORLD, address, apply, tcp};
use portcullis_provider::nftables::Mode;
use portcullis_provider::rule::{Protocol, Rule};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Sends a byte and waits for its echo, until `done` is set.
fn chat(mut stream: &TcpStream, done: &AtomicBool, rounds: &AtomicU64) {
    while !done.load(Ordering::SeqCst) {
        let sent = [rounds.load(Ordering::SeqCst) as u8];
        stream.write_all(&sent).unwrap();
        let mut echo = [0];
        stream.read_exact(&mut echo).unwrap();
        assert_eq!(echo, sent);
        rounds.fetch_add(1, Ordering::SeqCst);
    }
}

/// Ends the threads of a test, even if it fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn echo(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        stream.write_all(&byte).unwrap();
    }
}

#[test]
fn established_connections_continue_while_rules_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let listener = net.listen(SERVER);
    let to = address(&listener);
    runtime.block_on(apply(&firewall, &[tcp(to.port())], &[]));
    let stream = net.connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stop = Stop(&done);
        scope.spawn(|| echo(&listener));
        let chatting = scope.spawn(|| {
            chat(&stream, &done, &rounds);
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
        for n in 0..60 {
            let before = rounds.load(Ordering::SeqCst);
            let other = tcp(1 + n / 2);
            let (open, close) = if n % 2 == 0 { (vec![other], vec![]) } else { (vec![], vec![other]) };
            runtime.block_on(apply(&firewall, &open, &close));
            wait_for("bytes after a change", || {
                rounds.load(Ordering::SeqCst) > before || chatting.is_finished()
            });
        }
        runtime.block_on(apply(&firewall, &[], &[tcp(to.port())]));
        assert_eq!(net.attempt(to), Attempt::Refused, "new connections are refused");
        let before = rounds.load(Ordering::SeqCst);
        wait_for("bytes after the close", || {
            rounds.load(Ordering::SeqCst) > before + 10 || chatting.is_finished()
        });
        drop(stop);
        chatting.join().unwrap();
    });
}

#[test]
fn no_new_connection_is_refused_while_rules_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let listener = net.listen(SERVER);
    let to = address(&listener);
    runtime.block_on(apply(&firewall, &[tcp(to.port()), tcp(1)], &[]));
    let (done, tries) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stop = Stop(&done);
        let connecting = scope.spawn(|| {
            net.on_client(|| {
                while !done.load(Ordering::SeqCst) {
                    TcpStream::connect_timeout(&to, Duration::from_secs(60)).unwrap();
                    listener.accept().unwrap();
                    tries.fetch_add(1, Ordering::SeqCst);
                }
            });
        });
        for n in 0..60 {
            let before = tries.load(Ordering::SeqCst);
            // Each turn uses another spelling: in a set, as a range, and for one source only.
            let spellings = [
                [tcp(to.port()), tcp(1)],
                [rule(to.port() - 1, to.port(), Protocol::Tcp, WORLD), tcp(2)],
                [rule(to.port(), to.port(), Protocol::Tcp, "10.77.0.0/24"), tcp(1)],
            ];
            let [close, open] = [n, n + 1].map(|turn| spellings[turn % spellings.len()]);
            runtime.block_on(apply(&firewall, &open, &close));
            wait_for("another connection", || {
                tries.load(Ordering::SeqCst) > before || connecting.is_finished()
            });
        }
        drop(stop);
        connecting.join().unwrap();
        println!("{} connections", tries.load(Ordering::SeqCst));
    });
}

/// Counts the packets to a port before and after they pass our table.
fn count(net: &Net, port: u16) {
    net.nft(&["add table inet count; add counter inet count came; add counter inet count passed"]);
    for (counter, priority) in [("came", -10), ("passed", 10)] {
        let hook = format!("{{ type filter hook input priority {priority}; }}");
        net.nft(&[&format!("add chain inet count {counter} {hook}")]);
        net.nft(&[&format!("add rule inet count {counter} udp dport {port} counter name {counter}")]);
    }
}

fn counted(net: &Net, counter: &str) -> u64 {
    let shown = net.nft(&["list counter inet count", counter]);
    let (_, packets) = shown.split_once("packets ").unwrap();
    packets.split(' ').next().unwrap().parse().unwrap()
}

/// Every packet is a new connection, because none is answered. So many packets would be lost if the
/// port were closed even briefly.
#[test]
fn no_packet_is_lost_while_rules_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let server = net.listen_udp();
    let to = server.local_addr().unwrap();
    let udp = |from, to, source| rule(from, to, Protocol::Udp, source);
    // The port in a set, as a range, and for one source; other rules are replaced at the same time.
    let spellings: [Vec<Rule>; 3] = std::array::from_fn(|turn| {
        let port = to.port();
        let same =
            [udp(port, port, WORLD), udp(port - 1, port, WORLD), udp(port, port, "10.77.0.0/24")][turn];
        let others = (0..200).map(|n| 1 + 5 * n + turn as u16).map(|port| udp(port, port, WORLD));
        let ranges = (0..20).map(|n| 2001 + 9 * n + turn as u16).map(|port| udp(port, port + 2, WORLD));
        others.chain(ranges).chain([same]).collect()
    });
    runtime.block_on(apply(&firewall, &spellings[0], &[]));
    count(&net, to.port());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = Stop(&done);
        let client = net.udp_to(to);
        let done = &done;
        scope.spawn(move || {
            while !done.load(Ordering::SeqCst) {
                // A send reports the refusal of an earlier packet. The counters are checked
                // instead.
                let _ = client.send(b"new");
            }
        });
        for n in 0..100 {
            let [close, open] = [n, n + 1].map(|turn| &spellings[turn % spellings.len()]);
            runtime.block_on(apply(&firewall, open, close));
        }
        drop(stop);
    });
    let (came, passed) = (counted(&net, "came"), counted(&net, "passed"));
    println!("{came} packets, {} of them lost", came - passed);
    assert!(came > 1000, "only {came}");
    assert_eq!(came, passed);
}
