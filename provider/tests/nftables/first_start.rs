//! The first start of the firewall in a namespace that never tracked connections. Connections that
//! exist by then go on, whichever side sends first, and packets that begin no connection do not
//! make a closed port reachable.

use super::netns::{Attempt, CLIENT, Net, SERVER, SERVER_V6};
use super::{address, apply};
use portcullis_provider::nftables::Mode;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sockopt};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

/// Only a broken connection reaches this time limit.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq)]
enum First {
    Server,
    Peer,
}

fn say(mut from: &TcpStream, mut to: &TcpStream) {
    from.write_all(b"x").unwrap();
    let mut byte = [0];
    to.read_exact(&mut byte).unwrap();
}

/// Two ends of one connection: the server's, then the peer's.
fn accepted(net: &Net, listener: &TcpListener) -> [TcpStream; 2] {
    let peer = net.connect(address(listener)).unwrap();
    limited([listener.accept().unwrap().0, peer])
}

/// As [`accepted`], with a connection that the server's machine opened.
fn opened(net: &Net) -> [TcpStream; 2] {
    let listener = net.on_client(|| TcpListener::bind((CLIENT, 0)).unwrap());
    let to = address(&listener);
    let server = net.on_server(|| TcpStream::connect_timeout(&to, LIMIT).unwrap());
    limited([server, listener.accept().unwrap().0])
}

fn limited(ends: [TcpStream; 2]) -> [TcpStream; 2] {
    for end in &ends {
        end.set_read_timeout(Some(LIMIT)).unwrap();
    }
    ends
}

#[tokio::test]
async fn connections_survive_the_first_start() {
    let net = Net::new();
    let (v4, v6) = (net.listen(SERVER), net.listen(SERVER_V6));
    let mut connections = Vec::new();
    for first in [First::Server, First::Peer] {
        connections
            .extend([accepted(&net, &v4), accepted(&net, &v6), opened(&net)].map(|ends| (first, ends)));
    }
    let [closing_server, closing_peer] = accepted(&net, &v4);
    apply(&net.firewall(Mode::Enforce, &[]), &[], &[]).await;

    for (first, [server, peer]) in &connections {
        let (one, other) = if *first == First::Server { (server, peer) } else { (peer, server) };
        for _ in 0..2 {
            say(one, other);
            say(other, one);
        }
    }
    // The first packet after the start may be the one that ends the connection.
    closing_peer.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&closing_server).read(&mut [0]).unwrap(), 0);
    assert_eq!([&v4, &v6].map(|listener| net.attempt(address(listener))), [Attempt::Refused; 2]);
}

/// Two sockets that are connected to each other: the server's, then the peer's.
fn connected(net: &Net) -> [UdpSocket; 2] {
    let server = net.listen_udp();
    let peer = net.udp_to(server.local_addr().unwrap());
    server.connect(peer.local_addr().unwrap()).unwrap();
    for socket in [&server, &peer] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
    }
    [server, peer]
}

#[tokio::test]
async fn connected_udp_sockets_survive_the_first_start() {
    let net = Net::new();
    let [server, peer] = connected(&net);
    apply(&net.firewall(Mode::Enforce, &[]), &[], &[]).await;
    let mut message = [0; 8];
    peer.send(b"peer").unwrap();
    assert_eq!(server.recv(&mut message).unwrap(), 4);
    server.send(b"server").unwrap();
    assert_eq!(peer.recv(&mut message).unwrap(), 6);

    // A socket on the same machine that is not connected to that one.
    let stranger = net.udp_to(server.local_addr().unwrap());
    stranger.send(b"x").unwrap();
    assert_eq!(stranger.recv(&mut message).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

/// A multicast datagram can be for a socket without a peer, so it does not belong to an existing
/// connection.
#[tokio::test]
async fn multicast_does_not_reach_a_closed_udp_port() {
    let net = Net::new();
    let group = Ipv4Addr::new(239, 77, 0, 1);
    let server = net.on_server(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.join_multicast_v4(&group, &SERVER.parse().unwrap()).unwrap();
        socket
    });
    let to = SocketAddr::from((group, server.local_addr().unwrap().port()));
    let client = net.on_client(|| UdpSocket::bind((CLIENT, 0)).unwrap());
    server.set_read_timeout(Some(LIMIT)).unwrap();
    client.send_to(b"before", to).unwrap();
    assert_eq!(server.recv(&mut [0; 16]).unwrap(), 6, "the datagram arrives without the firewall");

    apply(&net.firewall(Mode::Enforce, &[]), &[], &[]).await;
    client.send_to(b"multicast", to).unwrap();
    // The server's own machine sends this one, so it is accepted. It follows the other one in the
    // socket's queue.
    net.on_server(|| {
        let local = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        local.send_to(b"local", (Ipv4Addr::LOCALHOST, to.port())).unwrap();
    });
    assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5, "only the local datagram arrives");
}

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// Sends one TCP packet without data, as a program with a raw socket can.
fn send_raw(net: &Net, from_port: u16, to: SocketAddr, flags: u8) {
    let (source, SocketAddr::V4(to)) = (CLIENT.parse::<Ipv4Addr>().unwrap(), to) else { panic!("{to}") };
    let mut packet = Vec::new();
    packet.extend(from_port.to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend(1_000_u32.to_be_bytes());
    packet.extend(2_000_u32.to_be_bytes());
    // Five words of header; flags; window; checksum and urgent pointer, zero for now.
    packet.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    let length = u16::try_from(packet.len()).unwrap();
    let pseudo_header = [&source.octets()[..], &to.ip().octets(), &[0, 6], &length.to_be_bytes()].concat();
    let words = pseudo_header.chunks(2).chain(packet.chunks(2));
    let mut sum: u32 = words.map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    packet[16..18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    net.on_client(|| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::TCP)).unwrap();
        let to = SocketAddr::from((*to.ip(), 0));
        rustix::net::sendto(&socket, &packet, SendFlags::empty(), &to).unwrap();
    });
}

/// Connects from a port that the caller chose.
fn attempt_from_port(net: &Net, from_port: u16, to: SocketAddr) -> std::io::Result<()> {
    net.on_client(|| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(LIMIT))?;
        rustix::net::bind(&socket, &SocketAddr::from((CLIENT.parse::<Ipv4Addr>().unwrap(), from_port)))?;
        Ok(rustix::net::connect(&socket, &to)?)
    })
}

/// A packet without SYN is accepted, and the kernel answers it with a reset. Connection tracking
/// has an entry for it by then, which must not let in a SYN with the same addresses and ports.
#[tokio::test]
async fn packets_without_syn_open_no_port() {
    let net = Net::new();
    apply(&net.firewall(Mode::Enforce, &[]), &[], &[]).await;
    let listener = net.listen(SERVER);
    let to = address(&listener);
    for (at, flags) in
        [ACK, SYN | ACK, FIN | ACK, FIN, RST, RST | ACK, 0, SYN, SYN | FIN].into_iter().enumerate()
    {
        let from_port = 40_000 + u16::try_from(at).unwrap();
        for _ in 0..3 {
            send_raw(&net, from_port, to, flags);
        }
        let refused = attempt_from_port(&net, from_port, to).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "flags {flags:#04x}");
    }
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "no connection was made");
}
