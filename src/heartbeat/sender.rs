//! A machine's own beats: to one tracker of several, to the next when that one does not take them, and a farewell at the
//! end. A shell; what trackers make of a beat is theirs.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::name::Name;
use super::notify::{Outgoing, Post};
use super::token;
use crate::model::MachineId;
use crate::runtime::clock::{utc, wall_ms};

/// Three beats fit into the shortest window that trackers have by default.
pub const PERIOD: Duration = Duration::from_secs(3);

/// A tracker that has not answered by then is passed over.
const PATIENCE: Duration = Duration::from_secs(1);

/// A beat that no tracker took is sent again after this long, then after twice as long, up to
/// [`PERIOD`]: a tracker that has just been started refuses beats for a moment.
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// After this time without a tracker, a warning is logged.
const UNHEARD: Duration = PERIOD;

/// Who beats, and to whom.
#[derive(Debug, Clone)]
pub struct Sender {
    url_ends: String,
    authorization: String,
    /// `http://HOST[:PORT]` each; whoever knows better may say so at any time.
    trackers: watch::Receiver<Vec<String>>,
}

impl Sender {
    /// `credential` is the machine's `user:secret`.
    pub fn new(machine: MachineId, credential: &str, trackers: watch::Receiver<Vec<String>>) -> Self {
        let url_ends = format!("/hmi/v1/heartbeat/{}", Name::of_machine(machine));
        Self { url_ends, authorization: token::authorization(machine, credential), trackers }
    }

    /// Beats until `stop` is true, then says good-bye. The clock goes on whatever a tracker does.
    pub async fn run<P: Post>(mut self, post: Arc<P>, mut stop: watch::Receiver<bool>) {
        let mut heard = None;
        let mut first = 0;
        let mut retry = FIRST_RETRY;
        let mut unheard_since = None;
        loop {
            let trackers = self.trackers.borrow_and_update().clone();
            let taken = self.say(&*post, &trackers, "OK", &mut first).await;
            let now = Instant::now();
            let pause = if taken || trackers.is_empty() { PERIOD } else { retry };
            retry = if taken { FIRST_RETRY } else { PERIOD.min(retry * 2) };
            if taken || trackers.is_empty() {
                unheard_since = None;
            } else if unheard_since.is_none() {
                unheard_since = Some(now);
            }
            if taken && heard != Some(true) {
                info!(tracker = %trackers[first], "a tracker accepts beats");
                heard = Some(true);
            } else if unheard_since.is_some_and(|since| now >= since + UNHEARD) && heard != Some(false) {
                warn!("no tracker accepts beats");
                heard = Some(false);
            }
            let told = async {
                // Who can say no more has said it all.
                if self.trackers.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = told => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        let trackers = self.trackers.borrow().clone();
        self.say(&*post, &trackers, "stopping", &mut first).await;
    }

    /// Whether anybody took it; `first` is the one that did, and is tried first the next time.
    async fn say<P: Post>(&self, post: &P, trackers: &[String], status: &str, first: &mut usize) -> bool {
        // For people: trackers show it in events, and measure silence with their own clocks.
        let body =
            serde_json::json!({"Status": status, "Timestamp": utc(wall_ms())}).to_string().into_bytes();
        for step in 0..trackers.len() {
            let at = (*first + step) % trackers.len();
            let call = Outgoing {
                method: "POST",
                url: format!("{}{}", trackers[at], self.url_ends),
                authorization: Some(self.authorization.clone()),
                signature: None,
                sequences: String::new(),
                body: body.clone(),
                limit: PATIENCE,
            };
            let said = post.post(call).await;
            if matches!(said, Ok(200)) {
                *first = at;
                return true;
            }
            debug!(tracker = %trackers[at], ?said, "beat not taken");
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::heartbeat::notify::CallError;
    use crate::heartbeat::request::{Said, Wish, read};

    /// Two trackers, of which the first is away.
    #[derive(Default)]
    struct Trackers(Mutex<Vec<Heard>>);

    type Heard = (String, (Name, bool), String);

    impl Post for Trackers {
        async fn post(&self, call: Outgoing) -> Result<u16, CallError> {
            let (host, path) = call.url.strip_prefix("http://").unwrap().split_once('/').unwrap();
            if host == "away" {
                return Err(CallError::TooSlow);
            }
            if host == "stranded" {
                return Ok(503);
            }
            let path = format!("/{path}");
            let said = Said {
                method: call.method,
                path: &path,
                query: None,
                last_event: None,
                body: Ok(&call.body),
            };
            let Ok(Wish::Beats(beats)) = read(said) else { panic!("no beat: {call:?}") };
            let beat = (beats[0].name, beats[0].details.going_away);
            self.0.lock().unwrap().push((host.to_owned(), beat, call.clone().authorization.unwrap()));
            Ok(200)
        }
    }

    /// A tracker that cannot reach the store answers with 503; the same beat goes to the next one, and so do those after it.
    #[tokio::test(start_paused = true)]
    async fn sender_moves_away_from_a_tracker_that_answers_503() {
        let trackers = Arc::new(Trackers::default());
        let urls = ["http://stranded".to_owned(), "http://here".to_owned()].to_vec();
        let sender = Sender::new(MachineId::new(3), "machine-0000000003:x", watch::channel(urls).1);
        let (_stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&trackers), stopped));
        tokio::time::sleep(PERIOD * 2 + PERIOD / 2).await;
        running.abort();
        let hosts: Vec<String> = trackers.0.lock().unwrap().iter().map(|(host, ..)| host.clone()).collect();
        assert_eq!(hosts, ["here"; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_beats_until_it_says_good_bye() {
        let trackers = Arc::new(Trackers::default());
        let urls = |hosts: &[&str]| hosts.iter().map(|host| format!("http://{host}")).collect::<Vec<_>>();
        let (told, urls_told) = watch::channel(urls(&["away"]));
        let sender = Sender::new(MachineId::new(3), "machine-0000000003:x", urls_told);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&trackers), stopped));
        tokio::time::sleep(PERIOD * 2).await;
        assert!(trackers.0.lock().unwrap().is_empty());
        told.send_replace(urls(&["away", "here"]));
        tokio::time::sleep(PERIOD * 4 + PERIOD / 2).await;
        stop.send_replace(true);
        running.await.unwrap();
        let said = trackers.0.lock().unwrap();
        let name = Name::of_machine(MachineId::new(3));
        assert_eq!(said.len(), 6);
        for (host, beat, authorization) in &said[..5] {
            assert_eq!((host.as_str(), beat), ("here", &(name, false)));
            assert!(token::Claim::parse(authorization).unwrap().holds("machine-0000000003:x"));
        }
        assert_eq!(said[5].1, (name, true));
    }

    /// A tracker that answers 503 until its store is loaded, and the times of its requests.
    struct Starting {
        ready: Instant,
        asked: Mutex<Vec<Duration>>,
    }

    impl Post for Starting {
        async fn post(&self, _: Outgoing) -> Result<u16, CallError> {
            let now = Instant::now();
            let begun = self.ready - Duration::from_millis(250);
            self.asked.lock().unwrap().push(now - begun);
            Ok(if now < self.ready { 503 } else { 200 })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_beat_that_was_refused_is_sent_again_soon() {
        let ready = Instant::now() + Duration::from_millis(250);
        let tracker = Arc::new(Starting { ready, asked: Mutex::default() });
        let (_known, trackers) = watch::channel(vec!["http://here".to_owned()]);
        let sender = Sender::new(MachineId::new(0), "machine-0000000000:x", trackers);
        let (_stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&tracker), stopped));
        tokio::time::sleep(PERIOD * 2).await;
        running.abort();
        // Refused twice, taken once the tracker is ready, and from then on at the usual pace.
        let asked: Vec<u128> = tracker.asked.lock().unwrap().iter().map(Duration::as_millis).collect();
        assert_eq!(asked, [0, 100, 300, 3300]);
    }
}
