//! Tests which packets the rules accept: ports, ranges, sources, families, protocols.

use super::netns::{CLIENT, CLIENT_V6, Knock, Net, OTHER_CLIENT, OTHER_CLIENT_V6, SERVER, SERVER_V6};
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
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Connected, Knock::Connected, Knock::Connected]);

    let firewall = net.firewall(Mode::Enforce, &[all[2].port()]);
    apply(&firewall, &[tcp(all[0].port())], &[]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Connected, Knock::Refused, Knock::Connected]);
    assert_eq!(
        all.map(|to| net.knock_from_server(to)),
        [Knock::Connected, Knock::Connected, Knock::Connected]
    );

    let [first, second, third] = all.map(|to| tcp(to.port()));
    apply(&firewall, &[second], &[first, third]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Refused, Knock::Connected, Knock::Connected]);
    apply(&firewall, &[], &[second]).await;
    assert_eq!(all.map(|to| net.knock(to)), [Knock::Refused, Knock::Refused, Knock::Connected]);
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
        [low, middle, high].map(|to| net.knock(to)),
        [Knock::Connected, Knock::Connected, Knock::Refused]
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
async fn ipv4_and_ipv6_are_opened_separately() {
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
