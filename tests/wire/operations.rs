//! Reads and writes: results, versions, zxids, sequences, transactions.

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, Put, Reply, Take, create_body, op, set_body};

on_both_stores![
    crate::with_super_user;
    failed_write_consumes_a_zxid,
    missing_node_is_reported_with_the_last_zxid,
    sequence_numbers_count_creations_and_are_never_reused,
    writes_with_a_wrong_version_are_refused,
    invalid_paths_and_acls_are_refused,
    failed_multi_changes_nothing_and_names_the_failed_operation,
    multi_applies_in_order_under_one_zxid,
    kind_of_node_decides_the_reply_inside_a_multi,
    reads_of_a_multi_read_fail_independently,
    pipelined_reads_see_earlier_writes,
    children_are_listed_with_and_without_the_stat,
    stats_report_versions_and_zxids,
    ephemerals_have_an_owner_and_no_children,
    ephemerals_and_descendants_are_listed_and_counted,
    reserved_nodes_exist,
    reconfiguration_and_sasl_are_refused,
];

fn absent(client: &mut Client, path: &str) -> Reply {
    client.call(op::EXISTS, &Put::new().bytes(path).bool(false))
}

fn failed_write_consumes_a_zxid(site: &Site) {
    let mut client = Client::connect(site.addr);
    let before = absent(&mut client, "/nothing").zxid;
    let failed = client.call(op::SET_DATA, &set_body("/nothing", b"", -1));
    assert_eq!((failed.err, failed.zxid), (-101, before + 1));
    let failed = client.call(op::CREATE, &create_body(&site.chroot, b"", Create::Persistent));
    assert_eq!((failed.err, failed.zxid, failed.body.len()), (-110, before + 2, 0));
    client.create(&site.path("/x"), b"", Create::Persistent);
    assert_eq!(client.get(&site.path("/x")).expect("the node").1.czxid, before + 3);
}

fn missing_node_is_reported_with_the_last_zxid(site: &Site) {
    let mut client = Client::connect(site.addr);
    client.create(&site.path("/x"), b"", Create::Persistent);
    let last = client.get(&site.path("/x")).expect("the node").1.czxid;
    let reply = absent(&mut client, &site.path("/y"));
    assert_eq!((reply.err, reply.zxid, reply.body.len()), (-101, last, 0));
}

fn sequence_numbers_count_creations_and_are_never_reused(site: &Site) {
    let mut client = Client::connect(site.addr);
    let prefix = site.path("/n-");
    assert_eq!(client.create(&prefix, b"", Create::Sequential), format!("{prefix}0000000000"));
    client.create(&site.path("/plain"), b"", Create::Persistent);
    assert_eq!(client.create(&prefix, b"", Create::Sequential), format!("{prefix}0000000002"));
    for name in ["/n-0000000000", "/n-0000000002", "/plain"] {
        assert_eq!(client.call(op::DELETE, &Put::new().bytes(site.path(name)).int(-1)).err, 0);
    }
    let other = site.path("/other-");
    assert_eq!(client.create(&other, b"", Create::EphemeralSequential), format!("{other}0000000003"));
    let bare = site.path("/");
    assert_eq!(client.create(&bare, b"", Create::Sequential), format!("{bare}0000000004"));
}

fn writes_with_a_wrong_version_are_refused(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = site.path("/v");
    client.create(&path, b"0", Create::Persistent);
    assert_eq!(client.set_if_version(&path, b"1", 1), Err(-103));
    assert_eq!(client.set_if_version(&path, b"1", 0).map(|stat| stat.version), Ok(1));
    assert_eq!(client.set_if_version(&path, b"2", -1).map(|stat| stat.version), Ok(2));
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(&path).int(1)).err, -103);
    client.create(&site.path("/v/child"), b"", Create::Persistent);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(&path).int(2)).err, -111);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(site.path("/v/child")).int(0)).err, 0);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(&path).int(2)).err, 0);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(&path).int(-1)).err, -101);
    assert_eq!(client.get(&path), Err(-101));
}

fn invalid_paths_and_acls_are_refused(site: &Site) {
    let mut client = Client::connect(site.addr);
    let good = site.path("/x");
    let below =
        ["/", "/.", "/..", "/x\u{0}y", "/x\u{1}", "/\u{f8ff}", "/\u{fff0}"].map(|name| site.path(name));
    for path in ["", "x"].into_iter().chain(below.iter().map(String::as_str)) {
        let reply = client.call(op::CREATE, &create_body(path, b"", Create::Persistent));
        assert_eq!(reply.err, -8, "path {path:?}");
    }
    let body = |acls: Put| Put::new().bytes(&good).bytes("").raw(&acls.0).int(0);
    assert_eq!(client.call(op::CREATE, &body(Put::new().int(0))).err, -114);
    assert_eq!(client.call(op::CREATE, &body(Put::new().int(-1))).err, -114);
    for (scheme, id) in [("nobody", "knows"), ("digest", "no colon"), ("ip", "not an address"), ("auth", "")]
    {
        let acl = Put::new().int(1).int(31).bytes(scheme).bytes(id);
        assert_eq!(client.call(op::CREATE, &body(acl)).err, -114, "{scheme}:{id}");
    }
    assert_eq!(client.call(op::CREATE, &Put::new().bytes(&good).bytes("").open_acl().int(77)).err, -8);
    assert_eq!(client.get(&good), Err(-101));
}

/// One operation of a multi.
fn part(code: i32, body: &Put) -> Put {
    Put::new().int(code).bool(false).int(-1).raw(&body.0)
}

fn multi(parts: &[Put]) -> Put {
    let parts: Vec<u8> = parts.iter().flat_map(|part| part.0.clone()).collect();
    Put::new().raw(&parts).int(-1).bool(true).int(-1)
}

fn results(reply: &Reply) -> Vec<(i32, i32)> {
    let mut take = Take(&reply.body);
    let mut results = Vec::new();
    loop {
        let (kind, done, err) = (take.int(), take.raw(1)[0] != 0, take.int());
        if done {
            assert_eq!((kind, err), (-1, -1));
            assert!(take.0.is_empty(), "bytes after the end");
            return results;
        }
        let detail = match kind {
            op::CREATE => i32::try_from(take.bytes().len()).expect("a short path"),
            op::CREATE2 => {
                let length = i32::try_from(take.bytes().len()).expect("a short path");
                assert_eq!(take.stat().version, 0);
                length
            }
            op::SET_DATA => take.stat().version,
            -1 => take.int(),
            _ => 0,
        };
        assert!(kind == -1 || err == 0, "a result of {kind} with err {err}");
        results.push((kind, detail));
    }
}

fn failed_multi_changes_nothing_and_names_the_failed_operation(site: &Site) {
    let mut client = Client::connect(site.addr);
    let (a, b) = (site.path("/a"), site.path("/b"));
    let before = absent(&mut client, &a).zxid;
    let reply = client.call(
        op::MULTI,
        &multi(&[
            part(op::CREATE, &create_body(&a, b"", Create::Persistent)),
            part(op::CHECK, &Put::new().bytes(&site.chroot).int(5)),
            part(op::CREATE, &create_body(&b, b"", Create::Persistent)),
            part(op::DELETE, &Put::new().bytes(&a).int(-1)),
        ]),
    );
    assert_eq!((reply.err, reply.zxid), (0, before + 1));
    assert_eq!(results(&reply), [(-1, 0), (-1, -103), (-1, -2), (-1, -2)]);
    assert_eq!(client.get(&a), Err(-101));
    assert_eq!(client.get(&b), Err(-101));
    assert_eq!(absent(&mut client, &a).zxid, before + 1);
}

fn multi_applies_in_order_under_one_zxid(site: &Site) {
    let mut client = Client::connect(site.addr);
    let (a, b) = (site.path("/a"), site.path("/a/b"));
    let before = absent(&mut client, &a).zxid;
    let reply = client.call(
        op::MULTI,
        &multi(&[
            part(op::CREATE, &create_body(&a, b"", Create::Persistent)),
            part(op::CREATE, &create_body(&b, b"", Create::Persistent)),
            part(op::SET_DATA, &set_body(&a, b"x", 0)),
            part(op::CHECK, &Put::new().bytes(&a).int(1)),
            part(op::DELETE, &Put::new().bytes(&b).int(0)),
        ]),
    );
    assert_eq!((reply.err, reply.zxid), (0, before + 1));
    let (long, longer) = (i32::try_from(a.len()).expect("short"), i32::try_from(b.len()).expect("short"));
    assert_eq!(
        results(&reply),
        [(op::CREATE, long), (op::CREATE, longer), (op::SET_DATA, 1), (op::CHECK, 0), (op::DELETE, 0)]
    );
    let (data, stat) = client.get(&a).expect("the node");
    assert_eq!(
        (data.as_slice(), stat.czxid, stat.mzxid, stat.pzxid),
        (&b"x"[..], before + 1, before + 1, before + 1)
    );
    assert_eq!((stat.num_children, stat.cversion), (0, 2));
    assert_eq!(results(&client.call(op::MULTI, &multi(&[]))), []);
}

/// Inside a multi, `create2` is answered like `create`, with the path alone; containers and TTL
/// nodes are answered with a stat.
fn kind_of_node_decides_the_reply_inside_a_multi(site: &Site) {
    let (container, ttl) = (19, 21);
    let node = |name: &str, flags: i32| Put::new().bytes(site.path(name)).bytes("").open_acl().int(flags);
    let mut client = Client::connect(site.addr);
    let reply = client.call(
        op::MULTI,
        &multi(&[
            part(op::CREATE, &node("/a", 0)),
            part(op::CREATE2, &node("/b", 0)),
            part(op::CREATE2, &node("/c", 1)),
            part(container, &node("/d", 4)),
            part(op::CREATE, &node("/e", 4)),
            part(ttl, &node("/f", 5).long(100_000)),
        ]),
    );
    let length = i32::try_from(site.path("/a").len()).expect("short");
    let (plain, with_stat) = ((op::CREATE, length), (op::CREATE2, length));
    assert_eq!(results(&reply), [plain, plain, plain, with_stat, with_stat, with_stat]);
    // Outside of a multi, create2 is answered with a stat.
    let alone = client.call(op::CREATE2, &node("/g", 0));
    let mut take = Take(&alone.body);
    assert_eq!((take.string(), take.stat().version, take.0.len()), (site.path("/g"), 0, 0));
}

fn reads_of_a_multi_read_fail_independently(site: &Site) {
    let mut client = Client::connect(site.addr);
    client.create(&site.path("/a"), b"data", Create::Persistent);
    let get = |path: &str| part(op::GET_DATA, &Put::new().bytes(path).bool(false));
    let children = part(op::GET_CHILDREN, &Put::new().bytes(&site.chroot).bool(false));
    let parts = [get(&site.path("/a")), get(&site.path("/none")), children];
    let reply = client.call(22, &multi(&parts));
    assert_eq!(reply.err, 0);
    let mut take = Take(&reply.body);
    assert_eq!((take.int(), take.raw(1), take.int()), (op::GET_DATA, &[0][..], 0));
    assert_eq!(take.bytes(), b"data");
    assert_eq!(take.stat().version, 0);
    assert_eq!((take.int(), take.raw(1), take.int(), take.int()), (-1, &[0][..], -101, -101));
    assert_eq!((take.int(), take.raw(1), take.int()), (op::GET_CHILDREN, &[0][..], 0));
    assert_eq!((take.int(), take.string()), (1, "a".to_owned()));
    assert_eq!((take.int(), take.raw(1), take.int(), take.0.len()), (-1, &[1][..], -1, 0));
}

fn pipelined_reads_see_earlier_writes(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = site.path("/p");
    client.create(&path, b"", Create::Persistent);
    for round in 0..50_i32 {
        client.send(op::SET_DATA, &set_body(&path, &round.to_be_bytes(), round)).expect("sent");
        client.send(op::GET_DATA, &Put::new().bytes(&path).bool(false)).expect("sent");
    }
    let mut last_zxid = 0;
    for round in 0..50_i32 {
        let (set, get) = (client.receive().expect("a reply"), client.receive().expect("a reply"));
        assert_eq!((set.xid, set.err, get.xid, get.err), (2 + 2 * round, 0, 3 + 2 * round, 0));
        assert_eq!(Take(&get.body).bytes(), round.to_be_bytes());
        assert!(set.zxid > last_zxid && get.zxid >= set.zxid, "zxids fall");
        last_zxid = set.zxid;
    }
}

fn children_are_listed_with_and_without_the_stat(site: &Site) {
    let mut client = Client::connect(site.addr);
    for name in ["/b", "/a"] {
        client.create(&site.path(name), b"", Create::Persistent);
    }
    for code in [op::GET_CHILDREN, 12] {
        let reply = client.call(code, &Put::new().bytes(&site.chroot).bool(false));
        let mut take = Take(&reply.body);
        assert_eq!(take.int(), 2);
        let mut names = [take.string(), take.string()];
        names.sort();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(take.0.len(), if code == 12 { 68 } else { 0 });
        assert_eq!(client.call(code, &Put::new().bytes(site.path("/none")).bool(false)).err, -101);
    }
}

fn stats_report_versions_and_zxids(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = site.path("/s");
    let reply = client.call(op::CREATE2, &create_body(&path, b"12345", Create::Persistent));
    let mut take = Take(&reply.body);
    assert_eq!(take.string(), path);
    let created = take.stat();
    assert_eq!((created.czxid, created.mzxid, created.pzxid), (reply.zxid, reply.zxid, reply.zxid));
    assert_eq!((created.version, created.cversion, created.aversion), (0, 0, 0));
    assert_eq!((created.data_length, created.num_children, created.ephemeral_owner), (5, 0, 0));

    client.create(&site.path("/s/x"), b"", Create::Persistent);
    client.call(op::DELETE, &Put::new().bytes(site.path("/s/x")).int(-1));
    client.create(&site.path("/s/y"), b"", Create::Persistent);
    let (_, stat) = client.get(&path).expect("the node");
    assert_eq!((stat.cversion, stat.num_children, stat.version), (3, 1, 0));
    assert_eq!((stat.mzxid, stat.pzxid), (created.mzxid, created.czxid + 3));

    let acl = client.call(7, &Put::new().bytes(&path).open_acl().int(0));
    assert_eq!((acl.err, Take(&acl.body).stat().aversion), (0, 1));
    assert_eq!(client.call(7, &Put::new().bytes(&path).open_acl().int(0)).err, -103);
}

fn ephemerals_have_an_owner_and_no_children(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = site.path("/e");
    client.create(&path, b"", Create::Ephemeral);
    assert_eq!(client.get(&path).expect("the node").1.ephemeral_owner, client.session.id);
    let child = site.path("/e/child");
    assert_eq!(client.call(op::CREATE, &create_body(&child, b"", Create::Persistent)).err, -108);
    let mut other = Client::connect(site.addr);
    assert_eq!(other.call(op::DELETE, &Put::new().bytes(&path).int(-1)).err, 0);
}

fn ephemerals_and_descendants_are_listed_and_counted(site: &Site) {
    let mut client = Client::connect(site.addr);
    client.create(&site.path("/a"), b"", Create::Persistent);
    client.create(&site.path("/a/b"), b"", Create::Persistent);
    client.create(&site.path("/a/e"), b"", Create::Ephemeral);
    let count = client.call(104, &Put::new().bytes(&site.chroot));
    assert_eq!((count.err, Take(&count.body).int()), (0, 3));
    let mine = client.call(103, &Put::new().bytes(site.path("/a")));
    let mut take = Take(&mine.body);
    assert_eq!((mine.err, take.int(), take.string()), (0, 1, site.path("/a/e")));
    assert_eq!(Take(&client.call(103, &Put::new().bytes("/elsewhere")).body).int(), 0);
    let sync = client.call(op::SYNC, &Put::new().bytes(&site.chroot));
    assert_eq!((sync.err, Take(&sync.body).string()), (0, site.chroot.clone()));
    let who = client.call(107, &Put::new());
    let mut take = Take(&who.body);
    assert_eq!(
        (who.err, take.int(), take.string(), take.string()),
        (0, 1, "ip".to_owned(), "127.0.0.1".to_owned())
    );
}

fn reserved_nodes_exist(site: &Site) {
    let mut client = Client::connect(site.addr);
    assert!(client.get("/").is_ok());
    assert!(client.get("/zookeeper").is_ok());
    assert!(client.get("/zookeeper/quota").is_ok());
    assert!(client.get("/zookeeper/config").is_ok());
    assert_eq!(client.call(op::DELETE, &Put::new().bytes("/").int(-1)).err, -8);
    assert_eq!(client.call(op::DELETE, &Put::new().bytes("/zookeeper").int(-1)).err, -8);
}

fn reconfiguration_and_sasl_are_refused(site: &Site) {
    let mut client = Client::connect(site.addr);
    let nothing = Put::new().int(-1).int(-1).int(-1).long(-1);
    assert_eq!(client.call(16, &nothing).err, -6);
    assert!(client.get(&site.chroot).is_ok());
}
