//! A real tracker and a failing state manager, over HTTP: beats do not wait for it, and in the end
//! it has got each change, once unless a call hung.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::harness::{Store, wait_for};
use crate::manager::{Manager, Mood};
use crate::process::{Client, Site, serve_manager};

const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn failing_state_manager_delays_no_beat() {
    let site = Site::new(Store::keeper());
    let manager = Manager::default();
    let sm = format!("Sm_url={}", serve_manager(&manager));
    // No component falls silent in this test.
    site.juju(&["heartbeat", "params", &sm, "Sm_timeout=4", "Sm_retries=1", "Warntime=3000", "Errtime=3600"]);
    manager.book().refused.insert("refused".to_owned());
    let tracker = site.tracker(&["--open"]);
    let mut client = Client::connect(tracker.addr).unwrap();
    let mut beat = |name: &str| {
        assert_eq!(client.beat(name).unwrap(), 200);
    };
    for (mood, name) in [
        (Mood::Failing, "failing"),
        (Mood::Down, "down"),
        (Mood::Answering(404), "absent"),
        (Mood::Hanging, "hanging"),
    ] {
        manager.book().mood = mood;
        let arrived = manager.book().arrived;
        beat(name);
        wait_for("a call in vain", DEADLINE, || (manager.book().arrived > arrived).then_some(()));
        beat(name);
        assert_eq!(manager.book().updates.len(), 0);
    }
    wait_for("an outage that is shown", DEADLINE, || {
        tracker.get("/hmi/v1/health").1.contains("\"HsmStatus\":\"not responsive, ").then_some(())
    });
    manager.book().mood = Mood::Slow;
    beat("refused");
    beat("slow");
    wait_for("everybody told", DEADLINE, || (manager.book().newest_states().len() == 5).then_some(()));
    wait_for("one that is set aside", DEADLINE, || {
        let (_, health) = tracker.get("/hmi/v1/health");
        let well = health.contains("\"HsmStatus\":\"responsive\"") && health.contains("\"Untold\":0");
        (well && health.contains("\"Refused\":1")).then_some(())
    });
    manager.book().mood = Mood::Fine;
    beat("fine");
    wait_for("one more told", DEADLINE, || (manager.book().newest_states().len() == 6).then_some(()));
    let names = ["failing", "down", "absent", "hanging", "slow", "fine"];
    // The components of the call that hung are sent again when it has ended, with the same numbers.
    let update: Vec<String> = manager.book().changes().into_keys().map(|(name, _)| name).collect();
    let once: BTreeSet<&str> = names.into();
    assert!(
        update.len() == once.len() && update.iter().all(|name| once.contains(name.as_str())),
        "{update:?}"
    );
    tracker.end();
}
