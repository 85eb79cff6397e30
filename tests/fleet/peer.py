"""peer.py CASE ADDRESS DIRECTORY: a peer of the manager that behaves badly. Prints what came of it."""

import socket
import ssl
import struct
import sys

case, address, directory = sys.argv[1:]
PORT = 842


def connect():
    return socket.create_connection((address, PORT), timeout=60)


def secure(with_certificate):
    context = ssl.create_default_context(cafile=f"{directory}/ca.pem")
    if with_certificate:
        context.load_cert_chain(f"{directory}/good.pem", f"{directory}/good.key")
    return context.wrap_socket(connect(), server_hostname="manager")


def read(peer):
    try:
        return peer.recv(1 << 16)
    except (ConnectionError, ssl.SSLError) as error:
        return b"" if "timed out" not in str(error) else b"?"


def padded(data, boundary):
    return data + b"\0" * (-len(data) % boundary)


def message(name):
    """A call of Register."""
    body = struct.pack("<I", len(name)) + name + b"\0"
    fields = b""
    for code, kind, text in [
        (1, b"o", b"/org/containers/hirte/internal"),
        (2, b"s", b"org.containers.hirte.internal.Manager"),
        (3, b"s", b"Register"),
    ]:
        fields = padded(fields, 8) + bytes([code, 1]) + kind + b"\0" + struct.pack("<I", len(text)) + text + b"\0"
    fields = padded(fields, 8) + bytes([8, 1]) + b"g\0" + b"\1s\0"
    head = struct.pack("<cBBBIII", b"l", 1, 0, 1, len(body), 1, len(fields))
    return padded(head + fields, 8) + body


if case == "silent":
    # Half of the peers send the beginning of a TLS record.
    peers = [connect() for _ in range(200)]
    for peer in peers[::2]:
        peer.sendall(b"\x16\x03\x01")
    print("open", flush=True)
    print("closed", sum(read(peer) == b"" for peer in peers), flush=True)
elif case == "plain":
    peer = connect()
    peer.sendall(b"\0AUTH ANONYMOUS\r\n")
    print("replied" if b"OK" in read(peer) else "closed")
elif case == "no-certificate":
    try:
        peer = secure(False)
        peer.sendall(message(b"n2"))
        print("replied" if read(peer) else "closed")
    except (ConnectionError, ssl.SSLError):
        print("closed")
elif case in ("large", "huge"):
    peer = secure(True)
    data = message(b"x" * (1 << 20))
    if case == "huge":
        data = data[:4] + struct.pack("<I", 100 << 20) + data[8:]
    try:
        peer.sendall(data)
        reply = read(peer)
    except (ConnectionError, ssl.SSLError):
        reply = b""
    # Byte 1 is the type of a message, and 3 is an error.
    print("refused" if reply[1:2] == b"\3" else "closed" if not reply else "replied")
