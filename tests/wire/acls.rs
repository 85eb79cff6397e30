//! Access control: schemes, rights, and the super user.

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, Put, Reply, Take, closed, create_body, op, set_body};

on_both_stores![
    crate::with_super_user;
    unknown_scheme_is_refused_and_the_connection_closed,
    digest_grants_access_to_the_owner_only,
    each_right_allows_only_its_own_operations,
    deletion_requires_a_right_on_the_parent,
    rights_are_not_inherited,
    auth_is_replaced_by_the_callers_identities,
    rights_that_do_not_exist_are_stored_and_grant_nothing,
    addresses_match_by_prefix,
    super_user_bypasses_access_lists,
    who_am_i_returns_names_without_passwords,
];

const READ: i32 = 1;
const WRITE: i32 = 2;
const MAKE: i32 = 4;
const DELETE: i32 = 8;
const ADMIN: i32 = 16;
const ALL_RIGHTS: i32 = 31;

const NO_AUTH: i32 = -102;

/// `ann:pw`, as ACLs name it.
const ANN: &str = "ann:RYbu6l5aZwqon8VWmkcGvezdzfc=";

fn authenticate(client: &mut Client, scheme: &str, credentials: &str) -> Reply {
    let body = Put::new().int(0).bytes(scheme).bytes(credentials);
    client.send_as(-4, op::AUTH, &body).expect("sent");
    client.receive().expect("an answer")
}

fn ann(site: &Site) -> Client {
    let mut client = Client::connect(site.addr);
    let reply = authenticate(&mut client, "digest", "ann:pw");
    assert_eq!((reply.xid, reply.err), (-4, 0));
    client
}

fn acl(entries: &[(i32, &str, &str)]) -> Put {
    let mut put = Put::new().int(i32::try_from(entries.len()).expect("a few"));
    for (rights, scheme, id) in entries {
        put = put.int(*rights).bytes(scheme).bytes(id);
    }
    put
}

fn create_with(client: &mut Client, path: &str, entries: &[(i32, &str, &str)]) -> i32 {
    client.call(op::CREATE, &Put::new().bytes(path).bytes("x").raw(&acl(entries).0).int(0)).err
}

fn get_acl(client: &mut Client, path: &str) -> Result<Vec<(i32, String, String)>, i32> {
    let reply = client.call(6, &Put::new().bytes(path));
    if reply.err != 0 {
        return Err(reply.err);
    }
    let mut take = Take(&reply.body);
    Ok((0..take.int()).map(|_| (take.int(), take.string(), take.string())).collect())
}

fn delete(client: &mut Client, path: &str) -> i32 {
    client.call(op::DELETE, &Put::new().bytes(path).int(-1)).err
}

fn unknown_scheme_is_refused_and_the_connection_closed(site: &Site) {
    let mut client = Client::connect(site.addr);
    let reply = authenticate(&mut client, "nobody", "knows");
    assert_eq!((reply.xid, reply.err), (-4, -115));
    assert!(closed(&mut client.stream));
}

fn digest_grants_access_to_the_owner_only(site: &Site) {
    let path = site.path("/x");
    let (mut ann, mut other) = (ann(site), Client::connect(site.addr));
    assert_eq!(create_with(&mut ann, &path, &[(ALL_RIGHTS, "digest", ANN)]), 0);
    assert_eq!(ann.get(&path).map(|(data, _)| data), Ok(b"x".to_vec()));
    assert_eq!(other.get(&path), Err(NO_AUTH));
    assert_eq!(other.set_if_version(&path, b"y", -1), Err(NO_AUTH));
    assert_eq!(authenticate(&mut other, "digest", "ann:wrong").err, 0);
    assert_eq!(other.get(&path), Err(NO_AUTH));
    assert_eq!(authenticate(&mut other, "digest", "ann:pw").err, 0);
    assert!(other.get(&path).is_ok(), "a session may have several identities");
}

fn each_right_allows_only_its_own_operations(site: &Site) {
    let mut client = Client::connect(site.addr);
    for right in [READ, WRITE, MAKE, DELETE, ADMIN] {
        let path = site.path(&format!("/r{right}"));
        assert_eq!(create_with(&mut client, &path, &[(right, "world", "anyone")]), 0);
        let expect = |wanted: i32| if right == wanted { 0 } else { NO_AUTH };
        assert_eq!(client.get(&path).err().unwrap_or(0), expect(READ), "read with {right}");
        let children = client.call(op::GET_CHILDREN, &Put::new().bytes(&path).bool(false));
        assert_eq!(children.err, expect(READ), "list with {right}");
        assert_eq!(
            client.set_if_version(&path, b"", -1).err().unwrap_or(0),
            expect(WRITE),
            "write with {right}"
        );
        let child = format!("{path}/c");
        let made = client.call(op::CREATE, &create_body(&child, b"", Create::Persistent)).err;
        assert_eq!(made, expect(MAKE), "create with {right}");
        assert_eq!(
            client.call(op::EXISTS, &Put::new().bytes(&path).bool(false)).err,
            0,
            "exists needs no right"
        );
        let same = Put::new().bytes(&path).raw(&acl(&[(right, "world", "anyone")]).0).int(-1);
        assert_eq!(client.call(7, &same).err, expect(ADMIN), "set rights with {right}");
        let may_see = right == READ || right == ADMIN;
        assert_eq!(get_acl(&mut client, &path).is_ok(), may_see, "see rights with {right}");
    }
}

fn deletion_requires_a_right_on_the_parent(site: &Site) {
    let mut client = Client::connect(site.addr);
    let (open, shut) = (site.path("/open"), site.path("/shut"));
    assert_eq!(create_with(&mut client, &open, &[(MAKE | DELETE, "world", "anyone")]), 0);
    assert_eq!(create_with(&mut client, &shut, &[(MAKE, "world", "anyone")]), 0);
    let (loose, stuck) = (format!("{open}/n"), format!("{shut}/n"));
    assert_eq!(create_with(&mut client, &loose, &[(READ, "world", "anyone")]), 0);
    assert_eq!(create_with(&mut client, &stuck, &[(ALL_RIGHTS, "world", "anyone")]), 0);
    assert_eq!(delete(&mut client, &loose), 0);
    assert_eq!(delete(&mut client, &stuck), NO_AUTH);
}

fn rights_are_not_inherited(site: &Site) {
    let (mut ann, mut other) = (ann(site), Client::connect(site.addr));
    let (top, below) = (site.path("/top"), site.path("/top/below"));
    assert_eq!(create_with(&mut ann, &top, &[(ALL_RIGHTS, "digest", ANN)]), 0);
    assert_eq!(create_with(&mut ann, &below, &[(ALL_RIGHTS, "world", "anyone")]), 0);
    assert_eq!(other.get(&top), Err(NO_AUTH));
    assert!(other.get(&below).is_ok());
}

fn auth_is_replaced_by_the_callers_identities(site: &Site) {
    let mut ann = ann(site);
    let path = site.path("/x");
    assert_eq!(create_with(&mut ann, &path, &[(ALL_RIGHTS, "auth", "")]), 0);
    assert_eq!(get_acl(&mut ann, &path), Ok(vec![(ALL_RIGHTS, "digest".to_owned(), ANN.to_owned())]));
    assert_eq!(Client::connect(site.addr).get(&path), Err(NO_AUTH));

    let null = Put::new().int(1).int(ALL_RIGHTS).bytes("auth").int(-1);
    let path = site.path("/null");
    assert_eq!(ann.call(op::CREATE, &Put::new().bytes(&path).bytes("").raw(&null.0).int(0)).err, 0);
    assert_eq!(get_acl(&mut ann, &path), Ok(vec![(ALL_RIGHTS, "digest".to_owned(), ANN.to_owned())]));
}

fn rights_that_do_not_exist_are_stored_and_grant_nothing(site: &Site) {
    let mut client = Client::connect(site.addr);
    for (number, rights) in [0, 32, 1 << 20, i32::MIN].into_iter().enumerate() {
        let path = site.path(&format!("/none{number}"));
        assert_eq!(create_with(&mut client, &path, &[(rights, "world", "anyone")]), 0, "{rights}");
        assert_eq!(client.get(&path), Err(NO_AUTH), "{rights}");
    }
    let (path, some) = (site.path("/some"), [(READ | 32, "world", "anyone")]);
    assert_eq!(create_with(&mut client, &path, &some), 0);
    assert_eq!(get_acl(&mut client, &path), Ok(vec![(READ | 32, "world".to_owned(), "anyone".to_owned())]));
}

fn addresses_match_by_prefix(site: &Site) {
    let mut client = Client::connect(site.addr);
    for (number, (id, allowed)) in
        [("127.0.0.1", true), ("127.0.0.0/8", true), ("127.0.0.2", false), ("10.0.0.0/8", false)]
            .iter()
            .enumerate()
    {
        let path = site.path(&format!("/ip{number}"));
        assert_eq!(create_with(&mut client, &path, &[(ALL_RIGHTS, "ip", id)]), 0, "{id}");
        assert_eq!(client.get(&path).is_ok(), *allowed, "{id}");
    }
}

fn super_user_bypasses_access_lists(site: &Site) {
    let (mut ann, mut boss) = (ann(site), Client::connect(site.addr));
    let path = site.path("/x");
    assert_eq!(create_with(&mut ann, &path, &[(READ, "digest", ANN)]), 0);
    assert_eq!(boss.get(&path), Err(NO_AUTH));
    assert_eq!(authenticate(&mut boss, "digest", "super:wrong").err, 0);
    assert_eq!(boss.get(&path), Err(NO_AUTH));
    assert_eq!(authenticate(&mut boss, "digest", "super:secret").err, 0);
    assert!(boss.get(&path).is_ok());
    assert_eq!(boss.call(op::SET_DATA, &set_body(&path, b"y", -1)).err, 0);
    assert_eq!(
        boss.call(7, &Put::new().bytes(&path).raw(&acl(&[(READ, "world", "anyone")]).0).int(-1)).err,
        0
    );
    assert!(Client::connect(site.addr).get(&path).is_ok());
}

fn who_am_i_returns_names_without_passwords(site: &Site) {
    let mut ann = ann(site);
    let reply = ann.call(107, &Put::new());
    let mut take = Take(&reply.body);
    let mut who: Vec<_> = (0..take.int()).map(|_| (take.string(), take.string())).collect();
    who.sort();
    let pair = |scheme: &str, name: &str| (scheme.to_owned(), name.to_owned());
    assert_eq!(who, [pair("digest", "ann"), pair("ip", "127.0.0.1")]);
}
