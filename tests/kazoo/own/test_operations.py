"""Every operation that kazoo offers, once, with what it must give back."""

import pytest
from kazoo import exceptions, security
from kazoo.protocol.states import ZnodeStat


def test_create_get_set_delete(zk):
    assert zk.create("/a", b"one") == "/a"
    data, stat = zk.get("/a")
    assert (data, stat.version, stat.data_length, stat.numChildren) == (b"one", 0, 3, 0)
    assert stat.czxid == stat.mzxid == stat.pzxid
    changed = zk.set("/a", b"two", version=0)
    assert isinstance(changed, ZnodeStat) and changed.version == 1 and changed.mzxid > stat.czxid
    with pytest.raises(exceptions.BadVersionError):
        zk.set("/a", b"three", version=0)
    with pytest.raises(exceptions.NodeExistsError):
        zk.create("/a")
    with pytest.raises(exceptions.BadVersionError):
        zk.delete("/a", version=0)
    zk.delete("/a", version=1)
    assert zk.exists("/a") is None
    for missing in (zk.get, zk.get_children, zk.delete, zk.get_acls):
        with pytest.raises(exceptions.NoNodeError):
            missing("/a")


def test_create2_gives_the_stat(zk):
    path, stat = zk.create("/a", b"12345", include_data=True)
    assert (path, stat.data_length, stat.version) == ("/a", 5, 0)
    assert zk.exists("/a") == stat


def test_empty_and_binary_and_large_data(zk):
    for data in (b"", bytes(range(256)), b"x" * 1_000_000):
        zk.create("/data", data)
        assert zk.get("/data")[0] == data
        zk.delete("/data")


def test_unicode_names(zk):
    name = "/grüße-日本-😀"[:8]
    assert zk.create(name) == name
    assert zk.get_children("/") == [name[1:]]


def test_children_with_and_without_stat(zk):
    zk.ensure_path("/p/q/r")
    zk.create("/p/s")
    assert sorted(zk.get_children("/p")) == ["q", "s"]
    children, stat = zk.get_children("/p", include_data=True)
    assert sorted(children) == ["q", "s"] and stat.cversion == 2 and stat.numChildren == 2
    with pytest.raises(exceptions.NotEmptyError):
        zk.delete("/p")
    zk.delete("/p", recursive=True)
    assert zk.get_children("/") == []


def test_sequences_rise_and_never_return(zk):
    names = [zk.create("/s/n-", makepath=True, sequence=True) for _ in range(3)]
    assert names == [f"/s/n-{number:010d}" for number in range(3)]
    for name in names:
        zk.delete(name)
    assert zk.create("/s/n-", sequence=True) == "/s/n-0000000003"


def test_ephemerals(place, zk):
    other = place.client()
    other.create("/e", ephemeral=True)
    assert zk.exists("/e").ephemeralOwner == other.client_id[0]
    with pytest.raises(exceptions.NoChildrenForEphemeralsError):
        zk.create("/e/child")
    other.stop()
    assert zk.exists("/e") is None


def test_transactions_are_all_or_nothing(zk):
    zk.create("/a", b"0")
    good = zk.transaction()
    good.check("/a", 0)
    good.set_data("/a", b"1")
    good.create("/b", b"x", ephemeral=True)
    good.delete("/b")
    created = good.commit()
    assert created[0] is True and created[1].version == 1 and created[2:] == ["/b", True]

    bad = zk.transaction()
    bad.create("/c")
    bad.check("/a", 0)
    bad.set_data("/a", b"2")
    results = bad.commit()
    kinds = [type(result) for result in results]
    assert kinds == [exceptions.RolledBackError, exceptions.BadVersionError, exceptions.RuntimeInconsistency]
    assert zk.exists("/c") is None and zk.get("/a")[0] == b"1"


def test_rights(place, zk):
    acl = security.make_digest_acl("ann", "pw", all=True)
    zk.create("/private", b"secret", acl=[acl])
    with pytest.raises(exceptions.NoAuthError):
        zk.get("/private")
    ann = place.client(auth_data=[("digest", "ann:pw")])
    assert ann.get("/private")[0] == b"secret"
    acls, stat = ann.get_acls("/private")
    assert acls == [acl] and stat.aversion == 0
    ann.set_acls("/private", security.OPEN_ACL_UNSAFE, version=0)
    assert zk.get("/private")[1].aversion == 1
    with pytest.raises(exceptions.BadVersionError):
        ann.set_acls("/private", security.OPEN_ACL_UNSAFE, version=0)
    with pytest.raises(exceptions.InvalidACLError):
        zk.create("/wrong", acl=[security.make_acl("nobody", "knows", all=True)])


def test_the_super_user(place, zk):
    zk.create("/shut", acl=[security.make_digest_acl("ann", "pw", read=True)])
    boss = place.client(auth_data=[("digest", "super:test")])
    boss.set("/shut", b"opened")
    assert boss.get("/shut")[0] == b"opened"


def test_bad_credentials_end_the_client(place, zk):
    with pytest.raises(exceptions.AuthFailedError):
        zk.add_auth("unknown-scheme", "ann:pw")


def test_sync_and_pipelining(zk):
    zk.create("/a")
    writes = [zk.set_async("/a", str(number).encode()) for number in range(100)]
    read = zk.get_async("/a")
    assert read.get()[0] == b"99"
    assert [write.get().version for write in writes] == list(range(1, 101))
    assert zk.sync("/a") == "/a"


def test_words(zk):
    assert zk.command(b"ruok") == "imok"
    assert zk.command(b"isro") == "rw"
    assert zk.server_version()[:2] == (3, 8)
    assert "Mode: standalone" in zk.command(b"srvr")
    assert "zk_znode_count" in zk.command(b"mntr")
