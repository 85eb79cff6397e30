//! Two and three trackers on Apache ZooKeeper, under load, while they are killed, paused and
//! restarted: no component that sends beats is called silent, no accepted beat is lost, and each
//! change is sent once; or again with the same number, if a judge crashed before it got the answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::harness::{Store, wait_for};
use crate::manager::{Book, Manager, Mood};
use crate::process::{Client, Site, Tracker, serve_manager, serve_webhook};

const COMPONENTS: usize = 120;
const SENDERS: usize = 4;
const PERIOD: Duration = Duration::from_millis(700);
const DEADLINE: Duration = Duration::from_secs(60);

/// The fleet: every component sends beats to any tracker, and to another one if that does not
/// answer.
struct Fleet {
    listeners: Arc<Mutex<Vec<SocketAddr>>>,
    /// Components from this number on have gone silent.
    silent_from: Arc<AtomicU64>,
    taken: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    senders: Vec<JoinHandle<()>>,
}

impl Fleet {
    fn new() -> Self {
        let mut fleet = Self {
            listeners: Arc::default(),
            silent_from: Arc::new(AtomicU64::new(COMPONENTS as u64)),
            taken: Arc::default(),
            stop: Arc::default(),
            senders: Vec::new(),
        };
        for sender in 0..SENDERS {
            let (listeners, silent_from) = (Arc::clone(&fleet.listeners), Arc::clone(&fleet.silent_from));
            let (taken, stop) = (Arc::clone(&fleet.taken), Arc::clone(&fleet.stop));
            fleet.senders.push(std::thread::spawn(move || {
                let mut clients = BTreeMap::new();
                let mut turn = sender;
                while !stop.load(Ordering::Relaxed) {
                    let round = Instant::now();
                    for component in (sender..COMPONENTS).step_by(SENDERS) {
                        if (component as u64) < silent_from.load(Ordering::Relaxed) {
                            turn += 1;
                            send(&listeners, &mut clients, turn, &name(component));
                            taken.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    std::thread::sleep(PERIOD.saturating_sub(round.elapsed()));
                }
            }));
        }
        fleet
    }

    fn set_trackers<'a>(&self, trackers: impl IntoIterator<Item = &'a Tracker>) {
        *self.listeners.lock().unwrap() = trackers.into_iter().map(|tracker| tracker.addr).collect();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for sender in self.senders.drain(..) {
            sender.join().expect("a sender that was heard");
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn name(component: usize) -> String {
    format!("x{component}c0s0b0n0")
}

/// Sends a beat until a tracker accepts it.
fn send(
    listeners: &Mutex<Vec<SocketAddr>>,
    clients: &mut BTreeMap<SocketAddr, Client>,
    mut turn: usize,
    name: &str,
) {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < DEADLINE, "no tracker accepts beats");
        let known = listeners.lock().unwrap().clone();
        if known.is_empty() {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        let listener = known[turn % known.len()];
        turn += 1;
        let client = match clients.remove(&listener) {
            Some(client) => Ok(client),
            None => Client::connect(listener),
        };
        let Ok(mut client) = client else { continue };
        if matches!(client.beat(name), Ok(200)) {
            clients.insert(listener, client);
            return;
        }
    }
}

/// Waits until all starts are sent and stored: otherwise the next judge would send some again.
fn all_started(site: &Site, manager: &Manager) {
    wait_for("every start told", DEADLINE, || {
        (manager.book().newest_states().len() == COMPONENTS).then_some(())
    });
    wait_for("every start written down", DEADLINE, || {
        let list = site.juju(&["heartbeat", "list", "--format", "json"]);
        (list.matches("\"told\":\"yes\"").count() == COMPONENTS).then_some(())
    });
}

/// The components in a call.
fn components_in(manager: &Manager, call: usize) -> BTreeSet<String> {
    manager
        .book()
        .updates
        .iter()
        .filter(|update| update.call == call)
        .map(|update| update.name.clone())
        .collect()
}

/// Checks that the webhook got every change in order, and again only the one that was being sent
/// when a judge crashed or was stopped.
fn check_the_webhook(manager: &Manager, changes: usize) {
    let numbers = |book: &Book| book.hooked.iter().map(|update| update.sequence).collect::<Vec<u64>>();
    wait_for("every change told to the webhook", DEADLINE, || {
        (numbers(&manager.book()).into_iter().collect::<BTreeSet<_>>().len() >= changes).then_some(())
    });
    let numbers = numbers(&manager.book());
    assert!(numbers.is_sorted(), "{numbers:?}");
    let again = numbers.len() - changes;
    assert!(again <= 3, "{again} of {numbers:?}");
}

fn judge(trackers: &[Tracker]) -> usize {
    wait_for("a judge", DEADLINE, || trackers.iter().position(Tracker::is_judging))
}

/// Faults of trackers under load, which must have no visible effect.
fn trouble(count: usize) {
    let site = Site::new(Store::zookeeper());
    let manager = Manager::default();
    let sm = format!("Sm_url={}", serve_manager(&manager));
    let hook = format!("Webhook_url={}", serve_webhook(&manager));
    site.juju(&["heartbeat", "params", &sm, &hook, "Warntime=6", "Errtime=12", "Interval=1", "Mass_share=0"]);
    manager.book().mood = Mood::Holding;
    let mut trackers: Vec<Tracker> = (0..count).map(|_| site.tracker(&["--open"])).collect();
    let fleet = Fleet::new();
    fleet.set_trackers(&trackers);

    // The judge crashes while it waits for the answer to a call, which is accepted: its successor
    // cannot know that.
    wait_for("a call on its way", DEADLINE, || (manager.book().arrived > 0).then_some(()));
    let at = judge(&trackers);
    trackers.remove(at).kill9();
    assert_eq!(manager.book().arrived, 1, "one call at a time");
    manager.book().mood = Mood::Fine;
    judge(&trackers);
    trackers.push(site.tracker(&["--open"]));
    fleet.set_trackers(&trackers);
    all_started(&site, &manager);
    let in_doubt: BTreeSet<String> = components_in(&manager, 1);
    assert!(!in_doubt.is_empty());

    // The judge is killed like in a power failure.
    let at = judge(&trackers);
    trackers.remove(at).kill9();
    judge(&trackers);
    trackers.push(site.tracker(&["--open"]));
    fleet.set_trackers(&trackers);

    pause_the_judge(&trackers, &fleet);

    // Each is restarted in turn.
    for _ in 0..count {
        let old = trackers.remove(0);
        fleet.set_trackers(&trackers);
        old.end();
        trackers.push(site.tracker(&["--open"]));
        fleet.set_trackers(&trackers);
    }
    judge(&trackers);
    // Each start, and no other change; twice only those of the call during which the first judge
    // crashed, with the same numbers.
    let changes = manager.book().changes();
    let words: BTreeSet<&str> = changes.values().flatten().map(|update| update.message.as_str()).collect();
    assert_eq!(words, BTreeSet::from(["Heartbeat started"]));
    assert_eq!(changes.len(), COMPONENTS, "{changes:#?}");
    for ((name, sequence), update) in &changes {
        assert_eq!(update.len(), 1 + usize::from(in_doubt.contains(name)), "{name} {sequence}: {update:?}");
    }
    let taken = fleet.taken.load(Ordering::Relaxed);
    check_that_deaths_are_sent_once(&manager, fleet);
    assert!(taken > 1000, "only {taken} beats");
    for tracker in trackers {
        tracker.end();
    }
}

/// Pauses the judge until its session expires, and continues it.
fn pause_the_judge(trackers: &[Tracker], fleet: &Fleet) {
    let at = judge(trackers);
    trackers[at].signal("-STOP");
    let others: Vec<&Tracker> =
        trackers.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, tracker)| tracker).collect();
    fleet.set_trackers(others.iter().copied());
    wait_for("another judge", DEADLINE, || others.iter().position(|tracker| tracker.is_judging()));
    trackers[at].signal("-CONT");
    wait_for("a tracker that is connected and not the judge", DEADLINE, || {
        let (_, health) = trackers[at].get("/hmi/v1/health");
        (health.contains("\"Judging\":false") && health.contains("\"connected\"")).then_some(())
    });
    fleet.set_trackers(trackers);
}

/// Lets some components fall silent.
fn check_that_deaths_are_sent_once(manager: &Manager, mut fleet: Fleet) {
    let (silent, starts) = (5, manager.book().updates.len());
    fleet.silent_from.store((COMPONENTS - silent) as u64, Ordering::Relaxed);
    wait_for("the deaths", DEADLINE, || {
        let book = manager.book();
        (book.updates.iter().filter(|update| update.flag == "Alert").count() == silent).then_some(())
    });
    check_the_webhook(manager, COMPONENTS + 2 * silent);
    fleet.end();
    let later: Vec<(String, String)> = manager.book().updates[starts..]
        .iter()
        .map(|update| (update.name.clone(), update.flag.clone()))
        .collect();
    for component in COMPONENTS - silent..COMPONENTS {
        let flags: Vec<&str> =
            later.iter().filter(|(of, _)| *of == name(component)).map(|(_, flag)| flag.as_str()).collect();
        assert_eq!(flags, ["Warning", "Alert"], "{}", name(component));
    }
    assert_eq!(later.len(), 2 * silent, "{later:?}");
}

#[test]
fn two_trackers_survive_faults() {
    trouble(2);
}

#[test]
fn three_trackers_survive_faults() {
    trouble(3);
}
