//! Watches: which events are sent, in which order, how often, and after a reconnect.

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, Hello, Put, Reply, Take, op, set_body};

on_both_stores![
    crate::with_super_user;
    event_of_an_own_write_precedes_the_reply,
    event_of_another_clients_write_precedes_the_new_value,
    one_shot_watches_fire_once,
    deletion_is_reported_once_per_session,
    persistent_watches_remain,
    recursive_watches_cover_the_subtree_without_children_changed,
    set_watches_sends_missed_events_first,
    set_watches2_restores_persistent_watches,
    removed_watches_send_no_events,
    watches_are_removed_with_the_connection,
    events_follow_the_order_of_writes,
    multi_sends_an_event_for_each_write,
];

const CREATED: i32 = 1;
const DELETED: i32 = 2;
const CHANGED: i32 = 3;
const CHILDREN: i32 = 4;

const PERSISTENT: i32 = 0;
const RECURSIVE: i32 = 1;

fn event(reply: &Reply) -> (i32, String) {
    assert_eq!((reply.xid, reply.zxid, reply.err), (-1, -1, 0), "not an event");
    let mut take = Take(&reply.body);
    let (kind, state, path) = (take.int(), take.int(), take.string());
    assert_eq!((state, take.0.len()), (3, 0));
    (kind, path)
}

/// Returns all events that the server sends before the reply to a request made now.
fn events(client: &mut Client) -> Vec<(i32, String)> {
    let xid = client.send(op::SYNC, &Put::new().bytes("/")).expect("sent");
    let mut events = Vec::new();
    loop {
        let reply = client.receive().expect("an event or the answer");
        if reply.xid == xid {
            return events;
        }
        events.push(event(&reply));
    }
}

fn watch(client: &mut Client, code: i32, path: &str) -> i32 {
    client.call(code, &Put::new().bytes(path).bool(true)).err
}

fn add_watch(client: &mut Client, path: &str, mode: i32) {
    assert_eq!(client.call(op::ADD_WATCH, &Put::new().bytes(path).int(mode)).err, 0);
}

fn delete(client: &mut Client, path: &str) {
    assert_eq!(client.call(op::DELETE, &Put::new().bytes(path).int(-1)).err, 0);
}

fn event_of_an_own_write_precedes_the_reply(site: &Site) {
    let mut client = Client::connect(site.addr);
    let path = site.path("/x");
    client.create(&path, b"", Create::Persistent);
    watch(&mut client, op::GET_DATA, &path);
    let xid = client.send(op::SET_DATA, &set_body(&path, b"new", -1)).expect("sent");
    assert_eq!(event(&client.receive().expect("the event")), (CHANGED, path));
    assert_eq!(client.receive().expect("the reply").xid, xid);
}

fn event_of_another_clients_write_precedes_the_new_value(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let path = site.path("/x");
    writer.create(&path, b"0", Create::Persistent);
    for round in 1..=50 {
        let new = round.to_string();
        watch(&mut watcher, op::GET_DATA, &path);
        writer.send(op::SET_DATA, &set_body(&path, new.as_bytes(), -1)).expect("sent");
        let mut notified = false;
        // Reads until the new value appears; the event must not come after it.
        loop {
            let xid = watcher.send(op::GET_DATA, &Put::new().bytes(&path).bool(false)).expect("sent");
            let mut reply = watcher.receive().expect("an event or the answer");
            if reply.xid != xid {
                assert_eq!(event(&reply), (CHANGED, path.clone()));
                notified = true;
                reply = watcher.receive().expect("the answer");
            }
            if Take(&reply.body).bytes() == new.as_bytes() {
                break;
            }
        }
        assert!(notified, "round {round}: the value was there before the event");
        assert_eq!(writer.receive().expect("the reply").err, 0);
    }
}

fn one_shot_watches_fire_once(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let path = site.path("/x");
    assert_eq!(watch(&mut watcher, op::EXISTS, &path), -101);
    assert_eq!(watch(&mut watcher, op::GET_CHILDREN, &site.chroot), 0);
    writer.create(&path, b"", Create::Persistent);
    assert_eq!(events(&mut watcher), [(CREATED, path.clone()), (CHILDREN, site.chroot.clone())]);
    writer.set_if_version(&path, b"unseen", -1).expect("written");
    assert_eq!(events(&mut watcher), []);
    assert_eq!(watch(&mut watcher, op::GET_DATA, &path), 0);
    assert_eq!(watch(&mut watcher, op::GET_DATA, &path), 0);
    writer.set_if_version(&path, b"seen", -1).expect("written");
    writer.set_if_version(&path, b"unseen", -1).expect("written");
    assert_eq!(events(&mut watcher), [(CHANGED, path.clone())]);
    // Unlike exists, a failed read sets no watch.
    assert_eq!(watch(&mut watcher, op::GET_DATA, &site.path("/none")), -101);
    writer.create(&site.path("/none"), b"", Create::Persistent);
    assert_eq!(events(&mut watcher), []);
}

fn deletion_is_reported_once_per_session(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let path = site.path("/x");
    writer.create(&path, b"", Create::Persistent);
    watch(&mut watcher, op::GET_DATA, &path);
    watch(&mut watcher, op::EXISTS, &path);
    watch(&mut watcher, op::GET_CHILDREN, &path);
    add_watch(&mut watcher, &path, PERSISTENT);
    watch(&mut watcher, op::GET_CHILDREN, &site.chroot);
    delete(&mut writer, &path);
    assert_eq!(events(&mut watcher), [(DELETED, path), (CHILDREN, site.chroot.clone())]);
}

fn persistent_watches_remain(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let (path, child) = (site.path("/x"), site.path("/x/y"));
    add_watch(&mut watcher, &path, PERSISTENT);
    writer.create(&path, b"", Create::Persistent);
    writer.set_if_version(&path, b"1", -1).expect("written");
    writer.set_if_version(&path, b"2", -1).expect("written");
    writer.create(&child, b"", Create::Persistent);
    writer.set_if_version(&child, b"not watched", -1).expect("written");
    delete(&mut writer, &child);
    delete(&mut writer, &path);
    writer.create(&path, b"", Create::Persistent);
    let kinds: Vec<i32> = events(&mut watcher).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [CREATED, CHANGED, CHANGED, CHILDREN, CHILDREN, DELETED, CREATED]);
}

fn recursive_watches_cover_the_subtree_without_children_changed(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let (top, below) = (site.path("/top"), site.path("/top/below"));
    add_watch(&mut watcher, &top, RECURSIVE);
    writer.create(&top, b"", Create::Persistent);
    writer.create(&site.path("/topmost"), b"", Create::Persistent);
    writer.create(&below, b"", Create::Persistent);
    writer.set_if_version(&below, b"x", -1).expect("written");
    delete(&mut writer, &below);
    delete(&mut writer, &top);
    assert_eq!(
        events(&mut watcher),
        [
            (CREATED, top.clone()),
            (CREATED, below.clone()),
            (CHANGED, below.clone()),
            (DELETED, below),
            (DELETED, top)
        ]
    );
    assert_eq!(watcher.call(op::ADD_WATCH, &Put::new().bytes("/x").int(7)).err, -5);
}

fn set_watches_sends_missed_events_first(site: &Site) {
    let mut writer = Client::connect(site.addr);
    let path = |name: &str| site.path(name);
    for name in ["/data", "/gone", "/kids", "/quiet", "/lost-kids"] {
        writer.create(&path(name), b"", Create::Persistent);
    }
    let seen = writer.call(op::SYNC, &Put::new().bytes("/")).zxid;
    writer.set_if_version(&path("/data"), b"x", -1).expect("written");
    delete(&mut writer, &path("/gone"));
    delete(&mut writer, &path("/lost-kids"));
    writer.create(&path("/new"), b"", Create::Persistent);
    writer.create(&path("/kids/kid"), b"", Create::Persistent);

    let hello = Hello { last_zxid: seen, ..Hello::default() };
    let mut client = Client::try_connect(site.addr, &hello).expect("a session");
    let body = Put::new().long(seen);
    let body = body.int(3).bytes(path("/data")).bytes(path("/gone")).bytes(path("/quiet"));
    let body = body.int(2).bytes(path("/new")).bytes(path("/later"));
    let body = body.int(2).bytes(path("/kids")).bytes(path("/lost-kids"));
    client.send_as(-8, op::SET_WATCHES, &body).expect("sent");
    let mut missed: Vec<_> = (0..5).map(|_| event(&client.receive().expect("an event"))).collect();
    missed.sort();
    assert_eq!(
        missed,
        [
            (CREATED, path("/new")),
            (DELETED, path("/gone")),
            (DELETED, path("/lost-kids")),
            (CHANGED, path("/data")),
            (CHILDREN, path("/kids"))
        ]
    );
    let reply = client.receive().expect("the answer");
    assert_eq!((reply.xid, reply.err), (-8, 0));

    writer.set_if_version(&path("/quiet"), b"x", -1).expect("written");
    writer.create(&path("/later"), b"", Create::Persistent);
    writer.set_if_version(&path("/data"), b"y", -1).expect("written");
    assert_eq!(events(&mut client), [(CHANGED, path("/quiet")), (CREATED, path("/later"))]);
}

fn set_watches2_restores_persistent_watches(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let (lasting, deep) = (site.path("/lasting"), site.path("/deep"));
    let seen = writer.call(op::SYNC, &Put::new().bytes("/")).zxid;
    let body = Put::new().long(seen).int(0).int(0).int(0).int(1).bytes(&lasting).int(1).bytes(&deep);
    watcher.send_as(-8, 105, &body).expect("sent");
    assert_eq!(watcher.receive().expect("the answer").err, 0);
    writer.create(&lasting, b"", Create::Persistent);
    writer.set_if_version(&lasting, b"x", -1).expect("written");
    writer.create(&deep, b"", Create::Persistent);
    writer.create(&format!("{deep}/er"), b"", Create::Persistent);
    let expected = [
        (CREATED, lasting.clone()),
        (CHANGED, lasting),
        (CREATED, deep.clone()),
        (CREATED, format!("{deep}/er")),
    ];
    assert_eq!(events(&mut watcher), expected);
}

fn removed_watches_send_no_events(site: &Site) {
    const CHECK_WATCHES: i32 = 17;
    const REMOVE_WATCHES: i32 = 18;
    let (children, data, any) = (1, 2, 3);
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let path = site.path("/x");
    writer.create(&path, b"", Create::Persistent);
    let about = |kind: i32| Put::new().bytes(&path).int(kind);
    assert_eq!(watcher.call(CHECK_WATCHES, &about(any)).err, -121);
    assert_eq!(watcher.call(REMOVE_WATCHES, &about(any)).err, -121);
    watch(&mut watcher, op::GET_DATA, &path);
    assert_eq!(watcher.call(CHECK_WATCHES, &about(data)).err, 0);
    assert_eq!(watcher.call(CHECK_WATCHES, &about(children)).err, -121);
    assert_eq!(watcher.call(REMOVE_WATCHES, &about(data)).err, 0);
    assert_eq!(watcher.call(REMOVE_WATCHES, &about(data)).err, -121);
    writer.set_if_version(&path, b"x", -1).expect("written");
    assert_eq!(events(&mut watcher), []);

    add_watch(&mut watcher, &path, RECURSIVE);
    assert_eq!(watcher.call(REMOVE_WATCHES, &about(any)).err, 0);
    writer.set_if_version(&path, b"y", -1).expect("written");
    assert_eq!(events(&mut watcher), []);
}

fn watches_are_removed_with_the_connection(site: &Site) {
    let (mut first, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let path = site.path("/x");
    writer.create(&path, b"", Create::Persistent);
    watch(&mut first, op::GET_DATA, &path);
    let mut second = Client::try_connect(site.addr, &Hello::again(&first.session)).expect("the same session");
    writer.set_if_version(&path, b"x", -1).expect("written");
    assert_eq!(events(&mut second), []);
}

fn events_follow_the_order_of_writes(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    add_watch(&mut watcher, &site.chroot, RECURSIVE);
    let paths: Vec<String> = (0..100).map(|number| site.path(&format!("/n{number}"))).collect();
    for path in &paths {
        writer.create(path, b"", Create::Persistent);
        // An event arrives before the new value can be read.
        assert!(watcher.send(op::EXISTS, &Put::new().bytes(path).bool(false)).is_ok());
    }
    let mut created = Vec::new();
    let mut answers = 0;
    while answers < paths.len() {
        let reply = watcher.receive().expect("an event or an answer");
        if reply.xid == -1 {
            created.push(event(&reply).1);
        } else {
            assert_eq!(reply.err, 0);
            answers += 1;
            assert!(created.len() >= answers, "read the new node before its event");
        }
    }
    assert_eq!(created, paths);
}

fn multi_sends_an_event_for_each_write(site: &Site) {
    let (mut watcher, mut writer) = (Client::connect(site.addr), Client::connect(site.addr));
    let (a, b) = (site.path("/a"), site.path("/b"));
    add_watch(&mut watcher, &site.chroot, RECURSIVE);
    watch(&mut watcher, op::GET_CHILDREN, &site.chroot);
    let part = |path: &str| {
        let body = crate::harness::wire::create_body(path, b"", Create::Persistent);
        Put::new().int(op::CREATE).bool(false).int(-1).raw(&body.0)
    };
    let body = Put::new().raw(&part(&a).0).raw(&part(&b).0).int(-1).bool(true).int(-1);
    assert_eq!(writer.call(op::MULTI, &body).err, 0);
    assert_eq!(events(&mut watcher), [(CREATED, a), (CHILDREN, site.chroot.clone()), (CREATED, b)]);
}
