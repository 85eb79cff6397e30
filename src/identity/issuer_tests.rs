//! Machines and an issuer on a store in memory, with the rights of each.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::identity::machine::{Machine, ObtainError};
use crate::net::tls::authority::Names;
use crate::net::tls::certificate::Certificate;
use crate::net::tls::key::PrivateKey;
use crate::store::certificates::{put_request, read_answer, read_authority};
use crate::store::records::Placement;
use crate::store::{Bootstrap, Credential, Environment, MemoryStore, MemoryTree, paths};

pub(crate) const NOW: u64 = 1_800_000_000_000;

pub(crate) struct World {
    pub(crate) store: MemoryStore,
    pub(crate) operator: Environment<MemoryTree>,
    pub(crate) controller: MemoryTree,
    pub(crate) authority: Authority,
}

impl World {
    pub(crate) async fn new() -> Self {
        let store = MemoryStore::default();
        let [operator, controller] =
            ["operator", "controller"].map(|user| Credential::generate(user).unwrap());
        let wanted = Bootstrap {
            environment: "prod".parse().unwrap(),
            placement: Placement::Unassigned,
            operator: operator.identity(),
            controller: controller.identity(),
        };
        let opened = Environment::bootstrap(store.connect(Some(&operator)), &wanted).await.unwrap();
        let authority = Authority::create("prod", &PrivateKey::generate().unwrap(), NOW).unwrap();
        opened.publish_authority(authority.certificate()).await.unwrap();
        let controller = store.connect(Some(&controller));
        Self { store, operator: opened, controller, authority }
    }

    /// Adds a machine, and connects as that machine.
    pub(crate) async fn machine(&self) -> (Machine, MemoryTree) {
        let id = self.operator.add_machine(None).await.unwrap();
        let credential = self.operator.machine_credential(id).await.unwrap();
        let roles = self.operator.info().roles.clone();
        let machine = Machine { id, identity: credential.identity(), roles };
        (machine, self.store.connect(Some(&credential)))
    }

    /// A copy of the authority, as another process loads it.
    pub(crate) fn authority(&self) -> Authority {
        Authority::load(self.authority.certificate(), self.authority.key()).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn machines_get_certificates_and_renewals_through_the_store() {
    static CLOCK: AtomicU64 = AtomicU64::new(NOW);
    let clock = || CLOCK.load(Ordering::SeqCst);
    let world = World::new().await;
    let (stop, stopped) = watch::channel(false);
    let issuer = tokio::spawn(Issuer::new(world.controller.clone(), world.authority(), clock).run(stopped));
    let (machine, tree) = world.machine().await;
    let key = PrivateKey::generate().unwrap();
    let chain = machine.obtain(&tree, &key).await.unwrap();
    let names = Certificate::parse(&chain).unwrap().names().to_string();
    assert_eq!(names, "machine-0");
    assert!(chain.ends_with(world.authority.certificate()));
    // Converged: neither side writes again.
    let version = async || tree.get(&paths::machine_certificate(machine.id)).await.unwrap().version;
    assert_eq!(version().await, 1);
    assert_eq!(machine.obtain(&tree, &key).await.unwrap(), chain);
    sleep(3 * RESYNC).await;
    assert_eq!(version().await, 1);

    CLOCK.fetch_add(61 * 86_400_000, Ordering::SeqCst);
    sleep(2 * RESYNC).await;
    let renewed = machine.obtain(&tree, &key).await.unwrap();
    assert_ne!(renewed, chain, "after two thirds there is a new certificate for the same key");
    assert_eq!(version().await, 2);
    assert!(world.operator.renew_certificate(machine.id).await.unwrap());
    sleep(RESYNC).await;
    assert_ne!(read_answer(&tree, machine.id).await.unwrap(), None, "an operator asked for a new one");
    let (idle, _) = world.machine().await;
    assert!(!world.operator.renew_certificate(idle.id).await.unwrap(), "it has made no request");
    stop.send_replace(true);
    issuer.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stolen_machine_credential_gets_no_other_name_and_writes_no_certificate() {
    let world = World::new().await;
    let mut issuer = Issuer::new(world.controller.clone(), world.authority(), || NOW);
    let (thief, tree) = world.machine().await;
    let (victim, victims_tree) = world.machine().await;
    let key = PrivateKey::generate().unwrap();
    let request = |id| key.request(&Names::of([crate::model::number_name(id)]));
    let forged = request(victim.id).unwrap();
    put_request(&tree, &thief.roles, (thief.id, &thief.identity), &forged).await.unwrap();
    issuer.pass(&[thief.id, victim.id]).await.unwrap();
    let found = read_answer(&tree, thief.id).await.unwrap().unwrap().answer;
    assert_eq!(found, Answer::Refused("'machine-1' is not a name of machine 0".to_owned()));
    // The machine gets its own name with a proper request.
    let own = request(thief.id).unwrap();
    put_request(&tree, &thief.roles, (thief.id, &thief.identity), &own).await.unwrap();
    issuer.pass(&[thief.id]).await.unwrap();
    let mine = read_answer(&tree, thief.id).await.unwrap().unwrap();
    assert!(matches!(mine.answer, Answer::Issued(_)));
    assert!(matches!(answer(&tree, thief.id, &mine, 2).await, Err(tree::Error::NoAuth(_))));
    let elsewhere = put_request(&tree, &thief.roles, (victim.id, &thief.identity), &own).await;
    assert!(matches!(elsewhere, Err(Error::Tree(tree::Error::NoAuth(_)))));
    let obtained = timeout(RESYNC, victim.obtain(&victims_tree, &key)).await;
    assert!(obtained.is_err(), "no issuer runs");
    assert!(matches!(read_answer(&tree, victim.id).await, Err(tree::Error::NoAuth(_))));
    // Everybody can read the certificate of the authority, and only the operator can write it.
    let anyone = world.store.connect(None);
    assert_eq!(read_authority(&anyone).await.unwrap().as_deref(), Some(world.authority.certificate()));
    let denied = crate::store::update::put(&tree, &paths::authority(), b"x", &thief.roles.operators()).await;
    assert!(matches!(denied, Err(Error::Tree(tree::Error::NoAuth(_)))));
}

#[tokio::test(start_paused = true)]
async fn a_machine_without_a_readable_answer_does_not_delay_others() {
    let world = World::new().await;
    let mut issuer = Issuer::new(world.controller.clone(), world.authority(), || NOW);
    let (hidden, tree) = world.machine().await;
    let (open, open_tree) = world.machine().await;
    let key = PrivateKey::generate().unwrap();
    // The machine creates its znode with an ACL that denies access to the issuer.
    let own =
        crate::store::acl::Roles { operator: hidden.identity.clone(), controller: hidden.identity.clone() };
    let path = paths::machine_certificate(hidden.id);
    crate::store::update::ensure(&tree, &path, &own.operators()).await.unwrap();
    for (machine, tree) in [(&hidden, &tree), (&open, &open_tree)] {
        let request = key.request(&Names::default()).unwrap();
        put_request(tree, &machine.roles, (machine.id, &machine.identity), &request).await.unwrap();
    }
    issuer.pass(&[hidden.id, open.id]).await.unwrap();
    assert!(read_answer(&open_tree, open.id).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_issuer_with_another_key_than_the_published_one_issues_nothing() {
    let world = World::new().await;
    let (machine, tree) = world.machine().await;
    let request = PrivateKey::generate().unwrap().request(&Names::of(["machine-0"])).unwrap();
    put_request(&tree, &machine.roles, (machine.id, &machine.identity), &request).await.unwrap();
    let other = Authority::create("prod", &PrivateKey::generate().unwrap(), NOW).unwrap();
    for (authority, is_answered) in [(other, false), (world.authority(), true)] {
        let mut issuer = Issuer::new(world.controller.clone(), authority, || NOW);
        issuer.pass(&[machine.id]).await.unwrap();
        assert_eq!(read_answer(&tree, machine.id).await.unwrap().is_some(), is_answered);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_ends_the_wait_of_a_machine() {
    let world = World::new().await;
    let (machine, tree) = world.machine().await;
    let waiting = async {
        let key = PrivateKey::generate().unwrap();
        machine.obtain(&tree, &key).await
    };
    let refusing = async {
        loop {
            sleep(Duration::from_millis(10)).await;
            for applicant in read_applicants(&world.controller, &[machine.id]).await.unwrap() {
                let Some(request) = applicant.request else { continue };
                let request = crate::store::certificates::request_hash(&request);
                let refused = Answered { request, answer: Answer::Refused("not today".to_owned()) };
                answer(&world.controller, machine.id, &refused, applicant.version).await.unwrap();
            }
        }
    };
    let waited = tokio::select! { waited = waiting => waited, () = refusing => unreachable!() };
    assert!(matches!(waited, Err(ObtainError::Refused(reason)) if reason == "not today"));
}
