"""A client of the server named in $STORE, below a chroot of its own for each test."""

import os
import threading
import time

import pytest
from kazoo.client import KazooClient

DEADLINE_S = 15


def wait_for(fact, what):
    """Asks again and again, at most until the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (found := fact()):
        assert time.monotonic() < end, f"no {what} within {DEADLINE_S} s"
        threading.Event().wait(0.01)
    return found


class Place:
    """Makes clients and stops them all."""

    def __init__(self, chroot):
        self.hosts = os.environ["STORE"]
        self.chroot = chroot
        self.clients = []

    def client(self, **options):
        client = KazooClient(self.hosts + self.chroot, timeout=10, **options)
        self.clients.append(client)
        client.start(timeout=DEADLINE_S)
        return client

    def stop(self):
        for client in self.clients:
            client.stop()
            client.close()


@pytest.fixture
def place(request):
    root = KazooClient(os.environ["STORE"])
    root.start(timeout=DEADLINE_S)
    chroot = "/" + request.node.name
    root.create(chroot)
    root.stop()
    place = Place(chroot)
    yield place
    place.stop()


@pytest.fixture
def zk(place):
    return place.client()
