//! The faults of the store in memory.

use super::*;
use crate::store::paths;

#[tokio::test]
async fn a_lost_answer_hides_whether_the_write_was_applied() {
    let store = MemoryStore::default();
    let credential = Credential::parse("operator:x").unwrap();
    let tree = store.connect(Some(&credential));
    let acl = super::super::acl::Roles { operator: credential.identity(), controller: credential.identity() };
    store.lose_answers([Fault::LostBefore, Fault::LostAfter]);
    for expected in [false, true] {
        let write = Write::create(paths::names(), Vec::new(), acl.operators());
        assert!(tree.write(vec![write]).await.unwrap_err().is_ambiguous());
        assert_eq!(tree.exists(&paths::names()).await, Ok(expected));
    }
}

#[tokio::test]
async fn an_expired_session_loses_its_ephemerals_and_its_feeds_report_it() {
    let store = MemoryStore::default();
    let credential = Credential::parse("operator:x").unwrap();
    let roles =
        super::super::acl::Roles { operator: credential.identity(), controller: credential.identity() };
    let tree = store.connect(Some(&credential));
    let (path, acl) = (paths::names(), roles.operators());
    tree.write(vec![Write::Create { path, data: Vec::new(), acl, ephemeral: true }]).await.unwrap();
    let mut feed = tree.watch(&paths::root()).await.unwrap();
    assert_eq!(feed.next().await, Ok(Event::Everything));
    store.expire(&tree);
    assert_eq!(tree.exists(&paths::names()).await, Ok(false));
    assert_eq!(feed.next().await, Ok(Event::Changed(paths::names())));
    assert_eq!(feed.next().await, Ok(Event::Everything));
}

#[tokio::test]
async fn a_lagging_client_reads_the_past_until_it_syncs_and_then_gets_its_events() {
    let store = MemoryStore::default();
    let credential = Credential::parse("operator:x").unwrap();
    let roles =
        super::super::acl::Roles { operator: credential.identity(), controller: credential.identity() };
    let (writer, reader) = (store.connect(Some(&credential)), store.connect(Some(&credential)));
    let mut feed = reader.watch(&paths::root()).await.unwrap();
    assert_eq!(feed.next().await, Ok(Event::Everything));
    let before = store.backup();
    reader.fall_behind(&before);
    writer.write(vec![Write::create(paths::names(), Vec::new(), roles.operators())]).await.unwrap();
    assert_eq!(reader.exists(&paths::names()).await, Ok(false));
    assert!(feed.events.try_recv().is_err());
    reader.sync().await.unwrap();
    assert_eq!(feed.next().await, Ok(Event::Changed(paths::names())));
    assert_eq!(reader.exists(&paths::names()).await, Ok(true));
    store.restore(&before);
    assert_eq!(feed.next().await, Ok(Event::Everything));
    assert_eq!(reader.exists(&paths::names()).await, Ok(false));
}

#[tokio::test]
async fn an_interruption_reports_everything() {
    let store = MemoryStore::default();
    let mut feed = store.connect(None).watch(&paths::root()).await.unwrap();
    assert_eq!(feed.next().await, Ok(Event::Everything));
    store.interrupt();
    assert_eq!(feed.next().await, Ok(Event::Everything));
}

#[tokio::test]
async fn events_go_only_to_clients_that_may_read_the_node() {
    let store = MemoryStore::default();
    let credential = Credential::parse("operator:x").unwrap();
    let roles =
        super::super::acl::Roles { operator: credential.identity(), controller: credential.identity() };
    let (writer, stranger) = (store.connect(Some(&credential)), store.connect(None));
    let mut own = writer.watch(&paths::root()).await.unwrap();
    let mut foreign = stranger.watch(&paths::root()).await.unwrap();
    assert_eq!((own.next().await, foreign.next().await), (Ok(Event::Everything), Ok(Event::Everything)));
    writer.write(vec![Write::create(paths::names(), Vec::new(), roles.operators())]).await.unwrap();
    assert_eq!(own.next().await, Ok(Event::Changed(paths::names())));
    assert!(foreign.events.try_recv().is_err(), "the name of a node that it may not read");
    let refused = stranger.watch(&paths::names()).await;
    assert!(matches!(refused, Err(Error::NoAuth(path)) if path == paths::names()));
    assert!(writer.watch(&paths::names()).await.is_ok());
}
