//! Tests which packets the rules accept: ports, ranges, sources, families, protocols.

use super::netns::{Attempt, CLIENT, CLIENT_V6, Net, OTHER_CLIENT, OTHER_CLIENT_V6, SERVER, SERVER_V6};
use super::suite::rule;
use super::{WORLD, address, apply, tcp};
use portcullis_provider::nftables::Mode;
use portcullis_provider::rule::Protocol;
use std::io::ErrorKind;
use std::net::TcpListener;

#[tokio::test]
async fn only_requested_ports_are_open() {
    let net = Net::new();
    let [open, shut, protected] = [SERVER; 3].map(|address| net.listen(address));
    let all = [&open, &shut, &protected].map(address);
    assert_eq!(all.map(|to| net.attempt(to)), [Attempt::Connected, Attempt::Connected, Attempt::Connected]);

    let firewall = net.firewall(Mode::Enforce, &[all[2].port()]);
    apply(&firewall, &[tcp(all[0].port())], &[]).await;
    assert_eq!(all.map(|to| net.attempt(to)), [Attempt::Connected, Attempt::Refused, Attempt::Connected]);
    assert_eq!(
        all.map(|to| net.attempt_from_server(to)),
        [Attempt::Connected, Attempt::Connected, Attempt::Connected]
    );

    let [first, second, third] = all.map(|to| tcp(to.port()));
    apply(&firewall, &[second], &[first, third]).await;
    assert_eq!(all.map(|to| net.attempt(to)), [Attempt::Refused, Attempt::Connected, Attempt::Connected]);
    apply(&firewall, &[], &[second]).await;
    assert_eq!(all.map(|to| net.attempt(to)), [Attempt::Refused, Attempt::Refused, Attempt::Connected]);
}

#[tokio::test]
async fn protected_port_with_a_source_is_open_to_that_source_only() {
    let net = Net::new();
    let (v4, v6, open) = (net.listen(SERVER), net.listen(SERVER_V6), net.listen(SERVER));
    let [to, to_v6, requested] = [&v4, &v6, &open].map(address);
    let limited = vec![
        rule(to.port(), to.port(), Protocol::Tcp, &format!("{OTHER_CLIENT}/32")),
        rule(to_v6.port(), to_v6.port(), Protocol::Tcp, &format!("{OTHER_CLIENT_V6}/128")),
    ];
    let firewall = net.firewall_from(Mode::Enforce, &[], limited);
    let is_limited = || {
        assert_eq!(
            [net.attempt(to), net.attempt_from(OTHER_CLIENT, to)],
            [Attempt::Refused, Attempt::Connected]
        );
        assert_eq!(
            [net.attempt_from(CLIENT_V6, to_v6), net.attempt_from(OTHER_CLIENT_V6, to_v6)],
            [Attempt::Refused, Attempt::Connected]
        );
    };
    apply(&firewall, &[tcp(requested.port())], &[]).await;
    is_limited();
    assert_eq!(net.attempt(requested), Attempt::Connected);
    // No change closes the protected port, and its chains stay when another port closes.
    apply(&firewall, &[], &[tcp(requested.port())]).await;
    is_limited();
    assert_eq!(net.attempt(requested), Attempt::Refused);
    // A firewall without the setting removes them.
    let unlimited = net.firewall(Mode::Enforce, &[]);
    apply(&unlimited, &[tcp(requested.port())], &[]).await;
    assert_eq!(net.attempt_from(OTHER_CLIENT, to), Attempt::Refused);
    assert!(!net.nft(&["list", "ruleset"]).contains("protected_tcp_from"));
}

#[tokio::test]
async fn range_opens_exactly_its_ports() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let mut listeners: Vec<TcpListener> = (0..3).map(|_| net.listen(SERVER)).collect();
    listeners.sort_by_key(|listener| address(listener).port());
    let [low, middle, high] = [0, 1, 2].map(|n| address(&listeners[n]));
    apply(&firewall, &[rule(low.port(), middle.port(), Protocol::Tcp, WORLD)], &[]).await;
    assert_eq!(
        [low, middle, high].map(|to| net.attempt(to)),
        [Attempt::Connected, Attempt::Connected, Attempt::Refused]
    );
}

#[tokio::test]
async fn rule_for_one_source_refuses_other_sources() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let (v4, v6) = (net.listen(SERVER), net.listen(SERVER_V6));
    let (to, to_v6) = (address(&v4), address(&v6));
    let limited = [
        rule(to.port(), to.port(), Protocol::Tcp, &format!("{OTHER_CLIENT}/32")),
        rule(to_v6.port(), to_v6.port(), Protocol::Tcp, &format!("{OTHER_CLIENT_V6}/128")),
    ];
    apply(&firewall, &limited, &[]).await;
    assert_eq!([net.attempt(to), net.attempt_from(OTHER_CLIENT, to)], [Attempt::Refused, Attempt::Connected]);
    assert_eq!(
        [net.attempt_from(CLIENT_V6, to_v6), net.attempt_from(OTHER_CLIENT_V6, to_v6)],
        [Attempt::Refused, Attempt::Connected]
    );
    let wider = rule(to.port(), to.port(), Protocol::Tcp, "10.77.0.0/24");
    apply(&firewall, &[wider], &[]).await;
    assert_eq!(
        [net.attempt_from(CLIENT, to), net.attempt_from(OTHER_CLIENT, to)],
        [Attempt::Connected, Attempt::Connected]
    );
    apply(&firewall, &[], &[wider]).await;
    assert_eq!([net.attempt(to), net.attempt_from(OTHER_CLIENT, to)], [Attempt::Refused, Attempt::Connected]);
}

#[tokio::test]
async fn ipv4_and_ipv6_are_opened_separately() {
    let net = Net::new();
    let firewall = net.firewall(Mode::Enforce, &[]);
    let (v4, v6) = (net.listen(SERVER), net.listen(SERVER_V6));
    let (to, to_v6) = (address(&v4), address(&v6));
    for source in [WORLD, "::/0"] {
        let open = [to.port(), to_v6.port()].map(|port| rule(port, port, Protocol::Tcp, source));
        apply(&firewall, &open, &[]).await;
        let expected = if source == WORLD {
            [Attempt::Connected, Attempt::Refused]
        } else {
            [Attempt::Refused, Attempt::Connected]
        };
        assert_eq!([net.attempt(to), net.attempt(to_v6)], expected, "{source}");
        apply(&firewall, &[], &open).await;
        assert_eq!([net.attempt(to), net.attempt(to_v6)], [Attempt::Refused, Attempt::Refused]);
    }
}

#[tokio::test]
async fn udp_is_opened_separately() {
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
        "the datagram 'shut' was dropped"
    );
}
