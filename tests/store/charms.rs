//! Charms in the tree: stored once, readable with their hash, and verified.

use super::Backend;
use super::operations::{controller, fresh, operator};
use portcullis::model::CharmHash;
use portcullis::store::records::{CHARM_HASH, Placement};
use portcullis::store::tree::{Error as TreeError, Tree, Write};
use portcullis::store::{Deploy, Error, MAX_CHARM_BYTES, charm, paths};
use serde_json::{Map, Value};

/// Several chunks, the last of them not full, and no two alike.
fn bytes() -> Vec<u8> {
    (0..200_001_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn made_of(service: &str, hash: &CharmHash) -> Deploy {
    Deploy {
        service: service.parse().unwrap(),
        charm: "local:web-1".parse().unwrap(),
        metadata: Map::from_iter([(CHARM_HASH.to_owned(), Value::from(hash.expose()))]),
        units: 1,
        to: None,
    }
}

pub(super) async fn a_charm_is_stored_once_and_found_by_its_hash(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let hash = environment.store_charm(&bytes()).await.unwrap();
    assert_eq!(hash, CharmHash::of(&bytes()));
    let boss = environment.tree();
    let before = boss.get(&paths::charm(&hash)).await.unwrap();
    assert_eq!(before.children, 4);
    assert_eq!(environment.store_charm(&bytes()).await.unwrap(), hash);
    assert_eq!(boss.get(&paths::charm(&hash)).await.unwrap(), before, "a second time changes nothing");
    assert_eq!(charm(boss, &hash).await.unwrap(), bytes());

    let empty = environment.store_charm(b"").await.unwrap();
    assert_eq!(charm(boss, &empty).await.unwrap(), b"");
    let missing = charm(boss, &CharmHash::of(b"never stored")).await.unwrap_err();
    assert!(matches!(missing, Error::NoCharm(_)), "{missing}");
    let refused = environment.store_charm(&vec![0; MAX_CHARM_BYTES + 1]).await.unwrap_err();
    assert_eq!(refused.to_string(), "a charm of 16777217 bytes is more than the 16777216 that can be kept");
}

pub(super) async fn an_incomplete_charm_is_completed(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let hash = environment.store_charm(&bytes()).await.unwrap();
    let boss = environment.tree();
    let lost = paths::charm_chunk(&hash, 2);
    boss.write(vec![Write::DeleteIfVersion { path: lost, version: 0 }]).await.unwrap();
    let half = charm(boss, &hash).await.unwrap_err();
    assert!(matches!(half, Error::NoCharm(_)), "{half}");
    environment.store_charm(&bytes()).await.unwrap();
    assert_eq!(charm(boss, &hash).await.unwrap(), bytes());
}

pub(super) async fn a_modified_charm_is_refused(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let hash = environment.store_charm(&bytes()).await.unwrap();
    let set = Write::SetIfVersion { path: paths::charm_chunk(&hash, 1), data: vec![7; 60_000], version: 0 };
    environment.tree().write(vec![set]).await.unwrap();
    let changed = charm(environment.tree(), &hash).await.unwrap_err();
    assert!(matches!(changed, Error::OtherCharm(_)), "{changed}");
    assert!(!changed.to_string().contains(hash.expose()), "the hash opens the charm: {changed}");
}

/// The hash grants reading the charm and nothing else.
pub(super) async fn the_hash_of_a_charm_grants_reading_it(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let hash = environment.store_charm(&bytes()).await.unwrap();
    let made = environment.deploy(&made_of("web", &hash)).await.unwrap();
    let machine = environment.machine_credential(made.units[0].machine).await.unwrap();
    let agent = backend.connect(Some(&machine)).await;
    let chunk = paths::charm_chunk(&hash, 0);
    assert_eq!(agent.get(&chunk).await, Err(TreeError::NoAuth(chunk.clone())));
    assert_eq!(agent.children(&paths::charms()).await, Err(TreeError::NoAuth(paths::charms())));
    // The hash is in the unit's record, which the machine may read.
    let record = agent.get(&paths::unit(made.units[0].id)).await.unwrap();
    let record: Value = serde_json::from_slice(&record.data).unwrap();
    let known = CharmHash::parse(record[CHARM_HASH].as_str().unwrap()).unwrap();
    assert_eq!(charm(&agent, &known).await.unwrap(), bytes());
    let set = Write::SetIfVersion { path: chunk.clone(), data: Vec::new(), version: 0 };
    assert_eq!(agent.write(vec![set]).await, Err(TreeError::NoAuth(chunk)));
    // A unit that is added later has it, too.
    let more = environment.add_units(&"web".parse().unwrap(), 1, None).await.unwrap();
    let record = environment.tree().get(&paths::unit(more[0].id)).await.unwrap();
    assert!(String::from_utf8(record.data).unwrap().contains(hash.expose()));
    let controller = backend.connect(Some(&controller())).await;
    assert_eq!(charm(&controller, &hash).await.unwrap(), bytes());
    assert_ne!(operator().identity(), machine.identity());
}

pub(super) async fn a_charm_is_removed_with_its_last_service(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let hash = environment.store_charm(&bytes()).await.unwrap();
    for name in ["one", "two"] {
        environment.deploy(&made_of(name, &hash)).await.unwrap();
    }
    environment.destroy_service(&"one".parse().unwrap()).await.unwrap();
    environment.sweep_charm(&hash).await.unwrap();
    assert_eq!(charm(environment.tree(), &hash).await.unwrap(), bytes());
    environment.destroy_service(&"two".parse().unwrap()).await.unwrap();
    environment.sweep_charm(&hash).await.unwrap();
    let gone = environment.deploy(&made_of("three", &hash)).await.unwrap_err();
    assert!(matches!(gone, Error::NoCharm(_)), "no service is made of a charm that is not there: {gone}");
    assert!(!environment.tree().exists(&paths::charm(&hash)).await.unwrap());
}
