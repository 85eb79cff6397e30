//! The driver for nftables between two network namespaces: packets decide, not listings.

#![allow(clippy::unwrap_used, reason = "only tests call this")]

mod netns;
mod suite;

use netns::{
    CLIENT, CLIENT_V6, Knock, MACHINE, Net, OTHER_CLIENT, OTHER_CLIENT_V6, SERVER, SERVER_V6, wait_for,
};
use portcullis_provider::nftables::Mode;
use portcullis_provider::provider::{Applied, Firewall, MachineNumber};
use portcullis_provider::rule::{Change, Protocol, Rule};
use portcullis_provider::{Error, Nftables};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use suite::{Bench, holds, rule, seen};

const WORLD: &str = "0.0.0.0/0";

fn tcp(port: u16) -> Rule {
    rule(port, port, Protocol::Tcp, WORLD)
}

fn change(open: &[Rule], close: &[Rule]) -> Change {
    Change { open: open.iter().copied().collect(), close: close.iter().copied().collect() }
}

async fn apply(firewall: &Nftables, open: &[Rule], close: &[Rule]) {
    assert_eq!(firewall.apply(MACHINE, &change(open, close)).await, Applied::as_one(Ok(())));
}

fn address(listener: &TcpListener) -> SocketAddr {
    listener.local_addr().unwrap()
}

#[tokio::test]
async fn holds_the_contract() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[22]);
    holds(&Bench { firewall, machine: MACHINE, absent: MachineNumber::new(8), keeps: true }).await;
}

#[tokio::test]
async fn opens_what_is_asked_for_and_nothing_else() {
    let net = Net::new();
    let [open, shut, protected] = [SERVER; 3].map(|address| net.listen(address));
    let all = [&open, &shut, &protected].map(address);
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Connected, Knock::Connected, Knock::Connected]);

    let firewall = net.firewall(Mode::Enforce, &[all[2].port()]);
    apply(&firewall, &[tcp(all[0].port())], &[]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Connected, Knock::Refused, Knock::Connected]);
    assert_eq!(all.map(|to| net.knock_at_home(to)), [Knock::Connected, Knock::Connected, Knock::Connected]);

    let [first, second, third] = all.map(|to| tcp(to.port()));
    apply(&firewall, &[second], &[first, third]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Refused, Knock::Connected, Knock::Connected]);
    apply(&firewall, &[], &[second]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Refused, Knock::Refused, Knock::Connected]);
}

#[tokio::test]
async fn a_range_ends_where_it_ends() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let mut listeners: Vec<TcpListener> = (0..3).map(|_| net.listen(SERVER)).collect();
    listeners.sort_by_key(|listener| address(listener).port());
    let [low, middle, high] = [0, 1, 2].map(|n| address(&listeners[n]));
    apply(&firewall, &[rule(low.port(), middle.port(), Protocol::Tcp, WORLD)], &[]).await;
    assert_eq!(
        [low, middle, high].map(|to| net.knock(to)),
        [Knock::Connected, Knock::Connected, Knock::Refused]
    );
}

#[tokio::test]
async fn a_source_may_be_all_that_comes_in() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let (v4, v6) = (net.listen(SERVER), net.listen(SERVER_V6));
    let (to, to_v6) = (address(&v4), address(&v6));
    let limited = [
        rule(to.port(), to.port(), Protocol::Tcp, &format!("{OTHER_CLIENT}/32")),
        rule(to_v6.port(), to_v6.port(), Protocol::Tcp, &format!("{OTHER_CLIENT_V6}/128")),
    ];
    apply(&firewall, &limited, &[]).await;
    assert_eq!([net.knock(to), net.knock_from(OTHER_CLIENT, to)], [Knock::Refused, Knock::Connected]);
    assert_eq!(
        [net.knock_from(CLIENT_V6, to_v6), net.knock_from(OTHER_CLIENT_V6, to_v6)],
        [Knock::Refused, Knock::Connected]
    );
    let wider = rule(to.port(), to.port(), Protocol::Tcp, "10.77.0.0/24");
    apply(&firewall, &[wider], &[]).await;
    assert_eq!(
        [net.knock_from(CLIENT, to), net.knock_from(OTHER_CLIENT, to)],
        [Knock::Connected, Knock::Connected]
    );
    apply(&firewall, &[], &[wider]).await;
    assert_eq!([net.knock(to), net.knock_from(OTHER_CLIENT, to)], [Knock::Refused, Knock::Connected]);
}

#[tokio::test]
async fn the_two_families_are_opened_apart() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let (v4, v6) = (net.listen(SERVER), net.listen(SERVER_V6));
    let (to, to_v6) = (address(&v4), address(&v6));
    for source in [WORLD, "::/0"] {
        let open = [to.port(), to_v6.port()].map(|port| rule(port, port, Protocol::Tcp, source));
        apply(&firewall, &open, &[]).await;
        let expected = if source == WORLD {
            [Knock::Connected, Knock::Refused]
        } else {
            [Knock::Refused, Knock::Connected]
        };
        assert_eq!([net.knock(to), net.knock(to_v6)], expected, "{source}");
        apply(&firewall, &[], &open).await;
        assert_eq!([net.knock(to), net.knock(to_v6)], [Knock::Refused, Knock::Refused]);
    }
}

#[tokio::test]
async fn udp_is_opened_by_itself() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let server = net.listen_udp();
    let to = server.local_addr().unwrap();
    apply(&firewall, &[tcp(to.port())], &[]).await;
    let client = net.udp_to(to);
    client.send(b"shut").unwrap();
    assert_eq!(client.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionRefused);

    apply(&firewall, &[rule(to.port(), to.port(), Protocol::Udp, WORLD)], &[]).await;
    client.send(b"open").unwrap();
    let mut message = [0; 8];
    let (length, from) = server.recv_from(&mut message).unwrap();
    assert_eq!(
        (&message[..length], from),
        (&b"open"[..], client.local_addr().unwrap()),
        "and 'shut' never came"
    );
}

/// Sends a byte and waits for its echo, again and again. Returns the longest time that one took.
fn chat(mut stream: &TcpStream, done: &AtomicBool, rounds: &AtomicU64) -> Duration {
    let mut longest = Duration::ZERO;
    while !done.load(Ordering::SeqCst) {
        let sent = [rounds.load(Ordering::SeqCst) as u8];
        let started = Instant::now();
        stream.write_all(&sent).unwrap();
        let mut echo = [0];
        stream.read_exact(&mut echo).unwrap();
        assert_eq!(echo, sent);
        longest = longest.max(started.elapsed());
        rounds.fetch_add(1, Ordering::SeqCst);
    }
    longest
}

/// Ends the threads of a test also when it fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn echo(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        stream.write_all(&byte).unwrap();
    }
}

#[test]
fn established_connections_go_on_while_rules_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let listener = net.listen(SERVER);
    let to = address(&listener);
    runtime.block_on(apply(&firewall, &[tcp(to.port())], &[]));
    let stream = net.connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stop = Stop(&done);
        scope.spawn(|| echo(&listener));
        let chatting = scope.spawn(|| {
            let longest = chat(&stream, &done, &rounds);
            stream.shutdown(std::net::Shutdown::Both).unwrap();
            longest
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
        assert_eq!(net.knock(to), Knock::Refused, "nobody else comes in");
        let before = rounds.load(Ordering::SeqCst);
        wait_for("bytes after the close", || {
            rounds.load(Ordering::SeqCst) > before + 10 || chatting.is_finished()
        });
        drop(stop);
        let longest = chatting.join().unwrap();
        println!("{} rounds, the longest {longest:?}", rounds.load(Ordering::SeqCst));
        assert!(
            longest < Duration::from_secs(1),
            "a lost packet is sent again after 200 ms, and more: {longest:?}"
        );
    });
}

#[test]
fn no_new_connection_is_refused_while_rules_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let listener = net.listen(SERVER);
    let to = address(&listener);
    runtime.block_on(apply(&firewall, &[tcp(to.port())], &[]));
    let (done, tries) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stop = Stop(&done);
        let knocking = scope.spawn(|| {
            net.on_client(|| {
                while !done.load(Ordering::SeqCst) {
                    TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap();
                    listener.accept().unwrap();
                    tries.fetch_add(1, Ordering::SeqCst);
                }
            });
        });
        for n in 0..60 {
            let before = tries.load(Ordering::SeqCst);
            // Spelled anew each time around: as a port, and as the end of a range.
            let range = rule(to.port() - 1, to.port(), Protocol::Tcp, WORLD);
            let (open, close) = if n % 2 == 0 { (range, tcp(to.port())) } else { (tcp(to.port()), range) };
            runtime.block_on(apply(&firewall, &[open], &[close]));
            wait_for("another connection", || {
                tries.load(Ordering::SeqCst) > before || knocking.is_finished()
            });
        }
        drop(stop);
        knocking.join().unwrap();
        println!("{} connections", tries.load(Ordering::SeqCst));
    });
}

#[tokio::test]
async fn other_tables_are_left_alone_and_have_their_say() {
    let net = Net::new();
    let [ours, dropped, elsewhere] = [SERVER; 3].map(|address| net.listen(address));
    let [ours, dropped, elsewhere] = [&ours, &dropped, &elsewhere].map(address);
    net.nft(&["add table inet other"]);
    net.nft(&["add chain inet other input { type filter hook input priority -5; policy accept; }"]);
    net.nft(&[&format!("add rule inet other input tcp dport {} drop", dropped.port())]);
    net.nft(&[&format!("add rule inet other input tcp dport {} accept", elsewhere.port())]);
    net.nft(&["add table ip portcullis-test"]);
    let before = ["inet other", "ip portcullis-test"].map(|table| net.nft(&["-a", "list table", table]));

    let firewall = net.firewall(Mode::Enforce, &[]);
    apply(&firewall, &[tcp(ours.port()), tcp(dropped.port())], &[]).await;
    assert_eq!(net.knock(ours), Knock::Connected);
    assert_eq!(net.knock(dropped), Knock::Silence, "another table's drop wins over our accept");
    assert_eq!(net.knock(elsewhere), Knock::Refused, "another table's accept does not open what we reject");
    apply(&firewall, &[], &[tcp(ours.port())]).await;
    let after = ["inet other", "ip portcullis-test"].map(|table| net.nft(&["-a", "list table", table]));
    assert_eq!(after, before);
}

#[tokio::test]
async fn accepting_only_shuts_nothing_until_it_is_enforced() {
    let net = Net::new();
    let [open, shut] = [SERVER; 2].map(|address| net.listen(address));
    let [open, shut] = [&open, &shut].map(address);
    let looking = net.firewall(Mode::AcceptOnly, &[]);
    apply(&looking, &[tcp(open.port())], &[]).await;
    assert_eq!([net.knock(open), net.knock(shut)], [Knock::Connected, Knock::Connected]);

    let enforcing = net.firewall(Mode::Enforce, &[]);
    let found = seen(&enforcing, MACHINE).await;
    assert_eq!(found.owned, [tcp(open.port())].into());
    assert_eq!(found.amiss, ["its rules are not as we made them", "its policy is not to drop what comes in"]);
    apply(&enforcing, &[], &[]).await;
    assert_eq!(seen(&enforcing, MACHINE).await.amiss, Vec::<String>::new());
    assert_eq!([net.knock(open), net.knock(shut)], [Knock::Connected, Knock::Refused]);
}

#[tokio::test]
async fn the_table_outlives_the_driver_and_is_left_alone_when_it_is_right() {
    let net = Net::new();
    let rules = [
        rule(80, 80, Protocol::Tcp, WORLD),
        rule(8000, 8080, Protocol::Udp, "::/0"),
        rule(5432, 5432, Protocol::Tcp, "10.0.0.0/8"),
        rule(5400, 5500, Protocol::Tcp, "10.1.0.0/16"),
        rule(443, 443, Protocol::Tcp, "2001:db8::/32"),
    ];
    apply(&net.firewall(Mode::Enforce, &[22]), &rules, &[]).await;
    let second = net.firewall(Mode::Enforce, &[22]);
    let found = seen(&second, MACHINE).await;
    assert_eq!((found.owned, found.amiss), (BTreeSet::from(rules), vec![]));
    assert_eq!(found.group.as_str(), "inet portcullis-test");

    // Every replacement gives the rules new handles.
    let before = net.nft(&["-a", "list table inet portcullis-test"]);
    apply(&second, &rules, &[tcp(9999)]).await;
    apply(&second, &[], &[]).await;
    assert_eq!(net.nft(&["-a", "list table inet portcullis-test"]), before);
    apply(&second, &[tcp(9999)], &[]).await;
    assert_ne!(net.nft(&["-a", "list table inet portcullis-test"]), before);
}

#[tokio::test]
async fn meddling_with_the_table_is_seen_and_put_right() {
    let net = Net::new();
    let listener = net.listen(SERVER);
    let to = address(&listener);
    let firewall = net.firewall(Mode::Enforce, &[22]);
    let table = "inet portcullis-test";
    let wanted = tcp(to.port());
    for meddling in [
        format!("delete table {table}"),
        format!("flush chain {table} input"),
        format!("insert rule {table} input drop"),
        format!("add chain {table} more {{ type filter hook input priority -1; policy drop; }}"),
        format!("add rule {table} protected_tcp th dport 23 accept"),
        format!("flush chain {table} protected_tcp"),
        format!("add chain {table} more"),
        format!("add map {table} more {{ type inet_service : verdict; }}"),
        format!("add chain {table} input {{ policy accept; }}"),
    ] {
        apply(&firewall, &[wanted], &[]).await;
        assert_eq!(net.knock(to), Knock::Connected);
        let whole = seen(&firewall, MACHINE).await;
        assert_eq!(whole.amiss, Vec::<String>::new());
        net.nft(&[&meddling]);
        let found = seen(&firewall, MACHINE).await;
        assert_ne!(found.amiss, Vec::<String>::new(), "{meddling}");
        apply(&firewall, &[wanted], &[]).await;
        assert_eq!(seen(&firewall, MACHINE).await, whole, "{meddling}");
        assert_eq!(net.knock(to), Knock::Connected, "{meddling}");
    }
    net.nft(&[&format!("flush chain {table} tcp_from_0.0.0.0/0")]);
    assert_eq!(
        seen(&firewall, MACHINE).await.owned,
        BTreeSet::new(),
        "a port that somebody shut is not taken for open"
    );
    assert_eq!(net.knock(to), Knock::Refused);
}

#[tokio::test]
async fn a_table_of_our_name_that_is_not_ours_is_not_touched() {
    let net = Net::new();
    net.nft(&["add table inet portcullis-test"]);
    net.nft(&["add chain inet portcullis-test mine { type filter hook input priority 0; }"]);
    net.nft(&["add rule inet portcullis-test mine accept"]);
    let before = net.nft(&["-a", "list ruleset"]);
    let firewall = net.firewall(Mode::Enforce, &[]);
    let refused = firewall.observe(&BTreeSet::from([MACHINE])).await.unwrap_err();
    let words = "group inet portcullis-test was not made by us: none of the rules in it has our mark; it is left alone";
    assert_eq!(refused.to_string(), words);
    assert_eq!(firewall.apply(MACHINE, &change(&[tcp(80)], &[])).await, Applied::as_one(Err(refused)));
    assert_eq!(net.nft(&["-a", "list ruleset"]), before);
}

#[tokio::test]
async fn alone_a_thousand_ports_are_one_quick_transaction() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[22]);
    let rules: Vec<Rule> = (0..1000).map(|n| tcp(1001 + 2 * n)).collect();
    let mut best = Duration::MAX;
    let mut worked = Duration::ZERO;
    for _ in 0..TIMES {
        let (started, before) = (Instant::now(), work_of_children());
        apply(&firewall, &rules, &[]).await;
        best = best.min(started.elapsed());
        worked += work_of_children() - before;
        assert_eq!(seen(&firewall, MACHINE).await.owned.len(), 1000);
        apply(&firewall, &[], &rules).await;
    }
    let worked = worked / TIMES;
    println!("1,000 ports in {best:?}, reading the table and starting the programs included;");
    println!("{worked:?} of processor time in the programs");
    assert!(best < Duration::from_millis(500), "{best:?}");
    assert!(worked < Duration::from_millis(150), "{worked:?}");
}

const TIMES: u32 = 10;

/// Processor time of programs that were started and have ended, in the kernel's ticks of 10 ms.
fn work_of_children() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let ticks = after_name.split_whitespace().skip(13).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// What comes of a program that is not quite nft.
async fn with_program(command: &[&str], time_limit: Duration) -> [Error; 2] {
    let net = Net::new();
    let command = command.iter().map(|&word| word.to_owned()).collect();
    let firewall = net.firewall(Mode::Enforce, &[]).with_command(command, time_limit);
    let read = firewall.observe(&BTreeSet::from([MACHINE])).await.unwrap_err();
    let applied = firewall.apply(MACHINE, &change(&[tcp(80)], &[])).await;
    assert_eq!(applied.opened, applied.closed);
    [read, applied.opened.unwrap_err()]
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    for error in with_program(&["no-such-nft"], Duration::from_secs(5)).await {
        let words =
            "machine 7 cannot be used: the program 'no-such-nft' was not found; is nftables installed?";
        assert_eq!(error.to_string(), words);
    }
}

#[tokio::test]
async fn missing_rights_are_told_from_other_trouble() {
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "nft"];
    for error in with_program(&nobody, Duration::from_secs(5)).await {
        assert_eq!(error.kind(), "denied");
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    }
}

/// Lists no tables, and does with a ruleset what the words say.
fn empty_but(words: &str) -> String {
    format!(
        "case \"$*\" in *'list tables'*) echo '{{\"nftables\": []}}';; *list*) exit 1;; *) {words};; esac"
    )
}

#[tokio::test]
async fn a_refused_ruleset_is_our_mistake() {
    let script = empty_but("echo 'Error: syntax error' >&2; exit 1");
    let firewall = Net::new().firewall(Mode::Enforce, &[]);
    let command = ["sh", "-c", &script, "nft"].map(str::to_owned).to_vec();
    let firewall = firewall.with_command(command, Duration::from_secs(5));
    let error = firewall.apply(MACHINE, &change(&[tcp(80)], &[])).await.opened.unwrap_err();
    let words = "machine 7 refused as invalid: nft ended with exit status: 1: Error: syntax error";
    assert_eq!(error.to_string(), words);
}

#[tokio::test]
async fn a_program_that_hangs_is_ended() {
    let [read, applied] = with_program(&["sh", "-c", "exec sleep 60"], Duration::from_millis(50)).await;
    assert_eq!((read.kind(), applied.kind()), ("unavailable", "unavailable"), "nothing was sent yet");

    let script = empty_but("exec sleep 60");
    let command = ["sh", "-c", &script, "nft"].map(str::to_owned).to_vec();
    let firewall = Net::new().firewall(Mode::Enforce, &[]).with_command(command, Duration::from_millis(500));
    let error = firewall.apply(MACHINE, &change(&[tcp(80)], &[])).await.opened.unwrap_err();
    assert!(error.may_have_been_applied(), "{error}");
}

#[tokio::test]
async fn output_that_makes_no_sense_shuts_nothing() {
    for (script, words) in [
        ("echo hello", "nft's listing is not JSON"),
        ("exec yes", "nft says more than"),
        ("echo '{}'", "has no 'nftables'"),
        ("printf '\\377'", "not UTF-8"),
        ("exit 1", "nft ended with exit status: 1"),
    ] {
        for error in with_program(&["sh", "-c", script], Duration::from_secs(20)).await {
            assert_eq!(error.kind(), "unusable", "{script}");
            assert!(error.to_string().contains(words), "{script}: {error}");
        }
    }
}
