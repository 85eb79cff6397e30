"""Watches as kazoo shows them: one-shot, after a lost connection, and the recipes built on them.

kazoo knows no persistent watches; those are in tests/wire.
"""

import threading

from conftest import DEADLINE_S, wait_for
from kazoo.protocol.connection import _CONNECTION_DROP
from kazoo.protocol.states import EventType, KazooState
from kazoo.recipe.cache import TreeCache


def recorder():
    seen = []
    return seen, lambda event: seen.append((event.type, event.path))


def test_one_shot_watches(place, zk):
    other = place.client()
    seen, record = recorder()
    assert zk.exists("/a", watch=record) is None
    zk.get_children("/", watch=record)
    other.create("/a")
    wait_for(lambda: len(seen) == 2, "two events")
    assert seen == [(EventType.CREATED, "/a"), (EventType.CHILD, "/")]
    zk.get("/a", watch=record)
    other.set("/a", b"1")
    other.set("/a", b"2")
    other.create("/b")
    wait_for(lambda: len(seen) == 3, "a third event")
    zk.sync("/")
    assert seen[2:] == [(EventType.CHANGED, "/a")]


def test_a_lost_connection_costs_nothing_but_watches(place, zk):
    other = place.client()
    zk.create("/e", ephemeral=True)
    zk.create("/a", b"0")
    values = []
    zk.DataWatch("/a", lambda data, stat: values.append(data))
    session = zk.client_id[0]
    suspended, back = threading.Event(), threading.Event()

    def listen(state):
        if state == KazooState.SUSPENDED:
            suspended.set()
        elif state == KazooState.CONNECTED and suspended.is_set():
            back.set()

    zk.add_listener(listen)
    zk._call(_CONNECTION_DROP, None)
    other.set("/a", b"while away")
    assert suspended.wait(DEADLINE_S) and back.wait(DEADLINE_S)
    wait_for(lambda: values[-1] == b"while away", "the new value")
    assert zk.client_id[0] == session
    assert other.exists("/e").ephemeralOwner == session


def test_data_and_children_watches(place, zk):
    other = place.client()
    zk.create("/a", b"0")
    values, children = [], []
    zk.DataWatch("/a", lambda data, stat: values.append(data))
    zk.ChildrenWatch("/a", lambda names: children.append(sorted(names)))
    other.set("/a", b"1")
    other.create("/a/x")
    wait_for(lambda: values == [b"0", b"1"] and children == [[], ["x"]], "both views")


def test_tree_cache(place, zk):
    other = place.client()
    cache = TreeCache(zk, "/tree")
    cache.start()
    other.create("/tree/deep/leaf", b"value", makepath=True)
    leaf = wait_for(lambda: cache.get_data("/tree/deep/leaf"), "the leaf in the cache")
    assert leaf.data == b"value"
    other.delete("/tree/deep", recursive=True)
    wait_for(lambda: cache.get_children("/tree") in ({}, frozenset()), "an empty cache")
    cache.close()


def test_locks_exclude_each_other(place, zk):
    counts = {"inside": 0, "most": 0, "done": 0}

    def work(client):
        for _ in range(5):
            with client.Lock("/lock"):
                counts["inside"] += 1
                counts["most"] = max(counts["most"], counts["inside"])
                client.sync("/")
                counts["inside"] -= 1
                counts["done"] += 1

    threads = [threading.Thread(target=work, args=(place.client(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert (counts["most"], counts["done"]) == (1, 20)


def test_a_lock_passes_on_when_its_holder_goes(place, zk):
    holder, waiter = place.client(), place.client()
    assert holder.Lock("/lock").acquire(timeout=DEADLINE_S)
    assert not waiter.Lock("/lock").acquire(blocking=False)
    holder.stop()
    assert waiter.Lock("/lock").acquire(timeout=DEADLINE_S)


def test_election_counter_queue_barrier_party(place, zk):
    leader = threading.Event()
    zk.Election("/election", "me").run(leader.set)
    assert leader.is_set()

    counter = zk.Counter("/counter")
    counter += 3
    counter -= 1
    assert zk.Counter("/counter").value == 2

    queue = zk.LockingQueue("/queue")
    queue.put(b"later", priority=200)
    queue.put(b"first", priority=1)
    assert queue.get(timeout=DEADLINE_S) == b"first" and queue.consume()
    assert len(queue) == 1

    barrier = zk.Barrier("/barrier")
    barrier.create()
    assert barrier.wait(timeout=0) is False
    barrier.remove()
    assert barrier.wait(timeout=DEADLINE_S) is True

    party = zk.Party("/party", "ann")
    party.join()
    assert list(place.client().Party("/party")) == ["ann"]
    party.leave()
    assert len(party) == 0
