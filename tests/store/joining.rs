//! Offers to hosts that join as a machine, and the entries of added operators.

use portcullis::store::joining::{
    JoinError, LaunchOffer, Offer, OfferKind, delete_expired_offers, offer_at_launch,
};
use portcullis::store::lease::{Lease, LeaseKey};
use portcullis::store::operators::shared_credential;
use portcullis::store::records::Placement;
use portcullis::store::{Credential, Error, tree};

use super::Backend;
use super::operations::{controller, fresh, operator};

const HOUR: u64 = 3_600_000;

pub(super) async fn an_offer_is_used_once_and_its_secret_is_gone_then(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let machine = environment.add_machine(None).await.unwrap();
    let other = environment.add_machine(None).await.unwrap();
    let once = environment.offer_join(machine, HOUR).await.unwrap();
    let host = backend.connect(Some(&once)).await;
    let read = |at| Offer::read(&host, machine, OfferKind::Operator, at);
    assert!(matches!(read(HOUR).await, Err(JoinError::Expired(_))));
    let offer = read(HOUR - 1).await.unwrap();
    assert_eq!(offer.credential, environment.machine_credential(machine).await.unwrap());
    environment.offer_join(other, HOUR).await.unwrap();
    let foreign = Offer::read(&host, other, OfferKind::Operator, 0).await;
    assert!(matches!(foreign, Err(JoinError::Unknown(_))), "{foreign:?}");

    offer.use_up(&host, machine, (5, "one")).await.unwrap();
    assert!(matches!(offer.use_up(&host, machine, (6, "two")).await, Err(JoinError::Used { .. })));
    let used = read(HOUR).await;
    assert!(matches!(&used, Err(JoinError::Used { by: Some(by), .. }) if by == "one"), "{used:?}");
    let newer = environment.offer_join(machine, HOUR).await.unwrap();
    assert_ne!(newer, once);
    assert!(matches!(read(0).await, Err(JoinError::Unknown(_))), "an older credential is void");
    let host = backend.connect(Some(&newer)).await;
    Offer::read(&host, machine, OfferKind::Operator, 0).await.unwrap();
}

pub(super) async fn the_controller_deletes_offers_that_have_expired(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let machine = async || environment.add_machine(None).await.unwrap();
    let (expired, valid) = (machine().await, machine().await);
    let (used, launched) = (machine().await, machine().await);
    let mut once = Vec::new();
    for (machine, expires_ms) in [(expired, HOUR), (valid, HOUR + 1), (used, HOUR)] {
        once.push(environment.offer_join(machine, expires_ms).await.unwrap());
    }
    let host = backend.connect(Some(&once[2])).await;
    let offer = Offer::read(&host, used, OfferKind::Operator, 0).await.unwrap();
    offer.use_up(&host, used, (5, "host")).await.unwrap();
    let tree = backend.connect(Some(&controller())).await;
    let roles = environment.info().roles.clone();
    let lease = Lease::acquire(&tree, &LeaseKey::firewall(), &roles.controllers(), "one").await.unwrap();
    let credential = environment.machine_credential(launched).await.unwrap();
    let of = (launched, &credential);
    let launch = offer_at_launch(&tree, &roles, of, lease.fence(), (0, HOUR)).await.unwrap();

    let all = [expired, valid, used, launched];
    assert_eq!(delete_expired_offers(&tree, &all, HOUR - 1).await, Ok(0));
    assert_eq!(delete_expired_offers(&tree, &all, HOUR).await, Ok(2));
    assert_eq!(delete_expired_offers(&tree, &all, HOUR).await, Ok(0));
    // By the clock of the host none of the tokens has expired.
    let read = async |once: &Credential, machine, kind| {
        Offer::read(&backend.connect(Some(once)).await, machine, kind, 0).await
    };
    let gone = read(&once[0], expired, OfferKind::Operator).await;
    assert!(matches!(gone, Err(JoinError::Unknown(_))), "{gone:?}");
    let gone = read(&launch.once, launched, OfferKind::Launch).await;
    assert!(matches!(gone, Err(JoinError::Unknown(_))), "{gone:?}");
    read(&once[1], valid, OfferKind::Operator).await.unwrap();
    let kept = read(&once[2], used, OfferKind::Operator).await;
    assert!(matches!(kept, Err(JoinError::Used { .. })), "{kept:?}");
}

pub(super) async fn an_offer_at_launch_is_the_same_until_it_is_used(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let machine = environment.add_machine(None).await.unwrap();
    let credential = environment.machine_credential(machine).await.unwrap();
    let roles = environment.info().roles.clone();
    let tree = backend.connect(Some(&controller())).await;
    let lease = Lease::acquire(&tree, &LeaseKey::firewall(), &roles.controllers(), "one").await.unwrap();
    let offered = async |now_ms| -> Result<LaunchOffer, tree::Error> {
        offer_at_launch(&tree, &roles, (machine, &credential), lease.fence(), (now_ms, HOUR)).await
    };
    let first = offered(1_000).await.unwrap();
    assert_eq!(first.expires_ms, 1_000 + HOUR);
    assert_eq!(offered(1_000 + HOUR / 2).await.unwrap(), first, "a repeated launch sends the same");
    let late = offered(1_001 + HOUR / 2).await.unwrap();
    assert!(late.once != first.once && late.expires_ms > first.expires_ms, "{late:?}");

    let host = backend.connect(Some(&late.once)).await;
    let offer = Offer::read(&host, machine, OfferKind::Launch, 0).await.unwrap();
    assert_eq!((&offer.credential, &offer.roles), (&credential, &roles));
    offer.use_up(&host, machine, (5, "host")).await.unwrap();
    let again = offered(2_000 + HOUR / 2).await.unwrap();
    assert_ne!(again.once, late.once, "the instance after this one gets another credential");
    let stale = Offer::read(&host, machine, OfferKind::Launch, 0).await;
    assert!(matches!(stale, Err(JoinError::Unknown(_))), "{stale:?}");

    // Only the leader makes offers.
    backend.close(tree).await;
    let tree = backend.connect(Some(&controller())).await;
    let _newer = Lease::acquire(&tree, &LeaseKey::firewall(), &roles.controllers(), "two").await.unwrap();
    let refused =
        offer_at_launch(&tree, &roles, (machine, &credential), lease.fence(), (9 * HOUR, HOUR)).await;
    assert!(matches!(refused, Err(tree::Error::BadVersion(_))), "{refused:?}");
}

pub(super) async fn an_added_operator_reads_its_entry_until_it_is_removed(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let (name, other) = ("ann".parse().unwrap(), "bob".parse().unwrap());
    let [ann, bob] = [&name, &other].map(|name| Credential::of_operator(name).unwrap());
    environment.add_operator(&name, &ann.identity(), &operator()).await.unwrap();
    environment.add_operator(&other, &bob.identity(), &operator()).await.unwrap();
    let twice = environment.add_operator(&name, &ann.identity(), &operator()).await;
    assert!(matches!(twice, Err(Error::OperatorExists(_))), "{twice:?}");
    assert_eq!(environment.operators().await.unwrap(), [name.clone(), other.clone()]);

    let tree = backend.connect(Some(&ann)).await;
    assert_eq!(shared_credential(&tree, &name).await.unwrap(), operator());
    let foreign = shared_credential(&tree, &other).await;
    assert!(matches!(foreign, Err(Error::OperatorRemoved(_))), "{foreign:?}");

    environment.remove_operator(&name).await.unwrap();
    let removed = shared_credential(&tree, &name).await;
    assert!(matches!(removed, Err(Error::OperatorRemoved(_))), "{removed:?}");
    let again = environment.remove_operator(&name).await;
    assert!(matches!(again, Err(Error::OperatorNotFound(_))), "{again:?}");
    assert_eq!(environment.operators().await.unwrap(), [other]);
}
