//! The contract of every [`Tree`].

use super::Backend;
use portcullis::model::{MachineId, ServiceId, UnitId};
use portcullis::store::Credential;
use portcullis::store::acl::{Acl, Roles};
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Answer, Error, Event, Feed, Read, Tree, Write};
use std::time::Duration;

fn operator() -> Credential {
    Credential::parse("operator:secret").unwrap()
}

fn stranger() -> Credential {
    Credential::parse("stranger:secret").unwrap()
}

/// Everything for the operator, and reading for the controller.
fn acl() -> Acl {
    let controller = Credential::parse("controller:secret").unwrap();
    Roles { operator: operator().identity(), controller: controller.identity() }.operators()
}

fn create(path: NodePath, data: &str) -> Write {
    Write::create(path, data, acl())
}

async fn text(tree: &impl Tree, path: &NodePath) -> String {
    String::from_utf8(tree.get(path).await.unwrap().data).unwrap()
}

pub(super) async fn absent_znodes_are_reported(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let path = paths::names();
    assert_eq!(tree.get(&path).await, Err(Error::NoNode(path.clone())));
    assert_eq!(tree.children(&path).await, Err(Error::NoNode(path.clone())));
    assert_eq!(tree.exists(&path).await, Ok(false));
    let reads = vec![Read::Data(path.clone()), Read::Children(path.clone()), Read::Children(paths::root())];
    let answers = tree.read_many(reads).await.unwrap();
    assert_eq!(answers[..2], [Answer::Data(None), Answer::Children(None)]);
    assert!(answers[2].clone().into_children().is_some());
    assert_eq!(tree.read_many(Vec::new()).await, Ok(Vec::new()));
    let set = Write::SetIfVersion { path: path.clone(), data: Vec::new(), version: 0 };
    assert_eq!(tree.write(vec![set]).await, Err(Error::NoNode(path.clone())));
    let orphan = create(paths::service_names(), "");
    assert_eq!(tree.write(vec![orphan]).await, Err(Error::NoNode(paths::service_names())));
    tree.sync().await.unwrap();
}

pub(super) async fn versions_guard_every_change(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let path = paths::services();
    tree.write(vec![create(path.clone(), "a")]).await.unwrap();
    let node = tree.get(&path).await.unwrap();
    assert_eq!((node.data.as_slice(), node.version, node.children), (b"a".as_slice(), 0, 0));
    assert_eq!(tree.write(vec![create(path.clone(), "b")]).await, Err(Error::NodeExists(path.clone())));

    let set = |version, data: &str| Write::SetIfVersion { path: path.clone(), data: data.into(), version };
    tree.write(vec![set(0, "c")]).await.unwrap();
    assert_eq!(tree.write(vec![set(0, "d")]).await, Err(Error::BadVersion(path.clone())));
    let check = |version| Write::Check { path: path.clone(), version };
    assert_eq!(tree.write(vec![check(0), set(1, "e")]).await, Err(Error::BadVersion(path.clone())));
    tree.write(vec![check(1)]).await.unwrap();
    assert_eq!(text(&tree, &path).await, "c");

    let delete = |version| Write::DeleteIfVersion { path: path.clone(), version };
    assert_eq!(tree.write(vec![delete(0)]).await, Err(Error::BadVersion(path.clone())));
    let child = paths::service(ServiceId::new(0));
    tree.write(vec![create(child.clone(), "")]).await.unwrap();
    assert_eq!(tree.get(&path).await.unwrap().children, 1);
    assert_eq!(tree.write(vec![delete(1)]).await, Err(Error::NotEmpty(path.clone())));
    let whatever = |path: &NodePath| Write::Delete { path: path.clone() };
    assert_eq!(tree.write(vec![whatever(&path)]).await, Err(Error::NotEmpty(path.clone())));
    tree.write(vec![Write::DeleteIfVersion { path: child.clone(), version: 0 }, delete(1)]).await.unwrap();
    assert_eq!(tree.exists(&path).await, Ok(false));

    // Without a version, the znode only has to exist.
    assert_eq!(tree.write(vec![whatever(&path)]).await, Err(Error::NoNode(path.clone())));
    tree.write(vec![create(path.clone(), ""), set(0, "f"), create(child.clone(), "")]).await.unwrap();
    tree.write(vec![whatever(&child), whatever(&path)]).await.unwrap();
    assert_eq!(tree.exists(&path).await, Ok(false));
}

pub(super) async fn a_multi_is_all_or_nothing(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let writes = vec![
        create(paths::services(), ""),
        create(paths::service(ServiceId::new(0)), ""),
        create(paths::unit(UnitId::new(0)), ""),
        create(paths::machines(), ""),
    ];
    // The third has no parent, and the error names it.
    assert_eq!(tree.write(writes).await, Err(Error::NoNode(paths::unit(UnitId::new(0)))));
    for path in [paths::services(), paths::machines()] {
        assert_eq!(tree.exists(&path).await, Ok(false), "{path}");
    }
}

pub(super) async fn rights_are_enforced(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let path = paths::names();
    tree.write(vec![create(path.clone(), "secret")]).await.unwrap();
    for other in [backend.connect(Some(&stranger())).await, backend.connect(None).await] {
        assert_eq!(other.get(&path).await, Err(Error::NoAuth(path.clone())));
        assert_eq!(other.children(&path).await, Err(Error::NoAuth(path.clone())));
        let both = vec![Read::Children(paths::root()), Read::Data(path.clone())];
        assert_eq!(other.read_many(both.clone()).await, Err(Error::NoAuth(path.clone())));
        let each = other.read_each(both).await.unwrap();
        assert!(matches!(&each[0], Ok(Answer::Children(Some(_)))), "the other one is answered");
        assert_eq!(each[1], Err(Error::NoAuth(path.clone())));
        let why = Error::NoAuth(path.clone()).to_string();
        assert_eq!(
            other.data_of_each(vec![path.clone(), paths::units()]).await,
            Ok(vec![Err(why), Ok(None)])
        );
        let set = Write::SetIfVersion { path: path.clone(), data: Vec::new(), version: 0 };
        assert_eq!(other.write(vec![set]).await, Err(Error::NoAuth(path.clone())));
        let below = create(paths::service_names(), "");
        assert_eq!(other.write(vec![below]).await, Err(Error::NoAuth(paths::service_names())));
        assert_eq!(other.set_acl(&path, acl()).await, Err(Error::NoAuth(path.clone())));
        // Checking the existence needs no right.
        assert_eq!(other.exists(&path).await, Ok(true));
    }
    assert_eq!(text(&tree, &path).await, "secret");
}

pub(super) async fn rights_are_replaced_only_with_permission(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let path = paths::names();
    tree.write(vec![create(path.clone(), "x")]).await.unwrap();
    let other = backend.connect(Some(&stranger())).await;
    assert_eq!(other.get(&path).await, Err(Error::NoAuth(path.clone())));
    let roles = Roles { operator: operator().identity(), controller: stranger().identity() };
    tree.set_acl(&path, roles.operators()).await.unwrap();
    assert_eq!(text(&other, &path).await, "x");
    assert_eq!(tree.set_acl(&paths::units(), acl()).await, Err(Error::NoNode(paths::units())));
}

pub(super) async fn many_reads_are_answered_in_order(backend: &impl Backend) {
    const COUNT: u32 = 1234;
    let tree = backend.connect(Some(&operator())).await;
    tree.write(vec![create(paths::units(), "")]).await.unwrap();
    let unit = |n| paths::unit(UnitId::new(n));
    for start in (0..COUNT).step_by(500) {
        let writes = (start..COUNT.min(start + 500)).map(|n| create(unit(n), &n.to_string())).collect();
        tree.write(writes).await.unwrap();
    }
    let mut reads: Vec<Read> = (0..COUNT).rev().map(|n| Read::Data(unit(n))).collect();
    reads.push(Read::Data(unit(COUNT)));
    reads.push(Read::Children(paths::units()));
    let mut answers = tree.read_many(reads).await.unwrap();
    let children = answers.pop().unwrap().into_children().unwrap();
    assert_eq!(children.len(), COUNT as usize);
    assert!(children.is_sorted());
    assert_eq!(tree.children(&paths::units()).await.unwrap(), children);
    assert_eq!(answers.pop(), Some(Answer::Data(None)));
    for (n, answer) in (0..COUNT).rev().zip(answers) {
        assert_eq!(answer.into_data().unwrap().data, n.to_string().into_bytes());
    }
}

pub(super) async fn ephemerals_end_with_their_session(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let agent = paths::machine_agent(MachineId::new(0));
    tree.write(vec![create(paths::machines(), ""), create(paths::machine(MachineId::new(0)), "")])
        .await
        .unwrap();
    let other = backend.connect(Some(&operator())).await;
    let write = Write::Create { path: agent.clone(), data: b"up".to_vec(), acl: acl(), ephemeral: true };
    other.write(vec![write]).await.unwrap();
    tree.sync().await.unwrap();
    assert_eq!(text(&tree, &agent).await, "up");
    backend.close(other).await;
    tree.sync().await.unwrap();
    assert_eq!(tree.exists(&agent).await, Ok(false));
}

async fn next(feed: &mut impl Feed) -> Event {
    tokio::time::timeout(Duration::from_secs(10), feed.next()).await.expect("no event").unwrap()
}

pub(super) async fn a_feed_reports_its_subtree_only(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let writer = backend.connect(Some(&operator())).await;
    writer.write(vec![create(paths::services(), ""), create(paths::units(), "")]).await.unwrap();
    let mut feed = tree.watch(&paths::services()).await.unwrap();
    assert_eq!(next(&mut feed).await, Event::Everything);
    let service = paths::service(ServiceId::new(0));
    let flag = paths::exposed(ServiceId::new(0));
    writer.write(vec![create(service.clone(), "")]).await.unwrap();
    writer.write(vec![create(paths::unit(UnitId::new(0)), "")]).await.unwrap();
    writer.write(vec![create(flag.clone(), "{}")]).await.unwrap();
    let set = Write::SetIfVersion { path: service.clone(), data: b"x".to_vec(), version: 0 };
    writer.write(vec![set]).await.unwrap();
    writer.write(vec![Write::DeleteIfVersion { path: flag.clone(), version: 0 }]).await.unwrap();
    for expected in [&service, &flag, &service, &flag] {
        assert_eq!(next(&mut feed).await, Event::Changed(expected.clone()));
    }
}

pub(super) async fn oversized_writes_are_refused_before_sending(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let big = Write::create(paths::names(), vec![b'x'; 65 * 1024], acl());
    let refusal = tree.write(vec![big]).await.unwrap_err();
    assert_eq!(refusal.to_string(), "/names: 66560 bytes are more than the 65536 allowed");
    let many = (0..20).map(|n| Write::create(paths::service(ServiceId::new(n)), vec![b'x'; 60_000], acl()));
    assert!(matches!(tree.write(many.collect()).await, Err(Error::TooLarge { limit: 1_000_000, .. })));
    tree.write(vec![create(paths::names(), "still here")]).await.unwrap();
}
