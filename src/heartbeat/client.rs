//! Sends a machine's beats: to one tracker, to the next one if that does not accept them, and a
//! last beat with a planned stop at the end.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::token;
use crate::model::MachineId;
use crate::net::http::client::{Call, HttpClient};
use crate::runtime::backoff::doubling;
use crate::runtime::clock::{utc, wall_ms};

/// Three beats fit into the shortest default window.
pub const PERIOD: Duration = Duration::from_secs(3);

/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A beat that no tracker took is sent again after this long, then after twice as long, up to
/// [`PERIOD`]: a tracker that has just been started refuses beats for a moment.
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// After this time without a tracker, a warning is logged.
const WARN_AFTER: Duration = PERIOD;

/// The beats of one machine.
#[derive(Debug, Clone)]
pub struct BeatClient {
    url_path: String,
    authorization: String,
    /// Base addresses of the trackers, `http://HOST[:PORT]`; they may change at any time.
    trackers: watch::Receiver<Vec<String>>,
}

impl BeatClient {
    /// `credential` is the machine's `user:secret`.
    pub fn new(machine: MachineId, credential: &str, trackers: watch::Receiver<Vec<String>>) -> Self {
        let url_path = format!("/hmi/v1/heartbeat/{}", Name::of_machine(machine));
        Self { url_path, authorization: token::authorization(machine, credential), trackers }
    }

    /// Beats until `stop` is true, then says good-bye. The clock goes on whatever a tracker does.
    pub async fn run<P: HttpClient>(mut self, post: Arc<P>, mut stop: watch::Receiver<bool>) {
        let mut accepted = None;
        let mut first = 0;
        let mut failures = 0;
        let mut failing_since = None;
        loop {
            let trackers = self.trackers.borrow_and_update().clone();
            let taken = self.send(&*post, &trackers, "OK", &mut first).await;
            let now = Instant::now();
            let idle = taken || trackers.is_empty();
            let pause = if idle { PERIOD } else { doubling(FIRST_RETRY, failures, PERIOD) };
            failures = if taken { 0 } else { failures.saturating_add(1) };
            if taken || trackers.is_empty() {
                failing_since = None;
            } else if failing_since.is_none() {
                failing_since = Some(now);
            }
            if taken && accepted != Some(true) {
                info!(tracker = %trackers[first], "a tracker accepts beats");
                accepted = Some(true);
            } else if failing_since.is_some_and(|since| now >= since + WARN_AFTER) && accepted != Some(false)
            {
                warn!("no tracker accepts beats");
                accepted = Some(false);
            }
            let changed = async {
                // Without a sender, the list does not change any more.
                if self.trackers.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = changed => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        let trackers = self.trackers.borrow().clone();
        self.send(&*post, &trackers, "stopping", &mut first).await;
    }

    /// Whether anybody took it; `first` is the one that did, and is tried first the next time.
    async fn send<P: HttpClient>(
        &self,
        post: &P,
        trackers: &[String],
        status: &str,
        first: &mut usize,
    ) -> bool {
        // For people: trackers show it in events, and measure silence with their own clocks.
        let body =
            serde_json::json!({"Status": status, "Timestamp": utc(wall_ms())}).to_string().into_bytes();
        for step in 0..trackers.len() {
            let at = (*first + step) % trackers.len();
            let call = Call {
                method: "POST",
                url: format!("{}{}", trackers[at], self.url_path),
                headers: vec![("authorization", self.authorization.clone())],
                body: body.clone(),
                limit: TIMEOUT,
                // Beats are idempotent.
                repeatable: true,
            };
            let answer = post.call(call).await;
            if matches!(answer, Ok(200)) {
                *first = at;
                return true;
            }
            debug!(tracker = %trackers[at], ?answer, "beat not accepted");
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::heartbeat::api::request::{ApiCall, RawRequest, read};
    use crate::net::http::client::CallError;

    /// Two trackers, of which the first is away.
    #[derive(Default)]
    struct Trackers(Mutex<Vec<BeatEffect>>);

    type BeatEffect = (String, (Name, bool), String);

    impl HttpClient for Trackers {
        async fn call(&self, call: Call) -> Result<u16, CallError> {
            let (host, path) = call.url.strip_prefix("http://").unwrap().split_once('/').unwrap();
            if host == "away" {
                return Err(CallError::TooSlow);
            }
            if host == "stranded" {
                return Ok(503);
            }
            let path = format!("/{path}");
            let answer = RawRequest {
                method: call.method,
                path: &path,
                query: None,
                last_event: None,
                body: Ok(&call.body),
            };
            let Ok(ApiCall::Beats(beats)) = read(answer) else { panic!("no beat: {call:?}") };
            let beat = (beats[0].name, beats[0].details.going_away);
            self.0.lock().unwrap().push((
                host.to_owned(),
                beat,
                call.header("authorization").unwrap().to_owned(),
            ));
            Ok(200)
        }
    }

    /// A tracker that cannot reach the store answers with 503; the same beat goes to the next one,
    /// and so do those after it.
    #[tokio::test(start_paused = true)]
    async fn sender_moves_away_from_a_tracker_that_answers_503() {
        let trackers = Arc::new(Trackers::default());
        let urls = ["http://stranded".to_owned(), "http://here".to_owned()].to_vec();
        let sender = BeatClient::new(MachineId::new(3), "machine-0000000003:x", watch::channel(urls).1);
        let (_stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&trackers), stopped));
        tokio::time::sleep(PERIOD * 2 + PERIOD / 2).await;
        running.abort();
        let hosts: Vec<String> = trackers.0.lock().unwrap().iter().map(|(host, ..)| host.clone()).collect();
        assert_eq!(hosts, ["here"; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn machine_sends_beats_until_it_stops() {
        let trackers = Arc::new(Trackers::default());
        let urls = |hosts: &[&str]| hosts.iter().map(|host| format!("http://{host}")).collect::<Vec<_>>();
        let (changed, urls_changed) = watch::channel(urls(&["away"]));
        let sender = BeatClient::new(MachineId::new(3), "machine-0000000003:x", urls_changed);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&trackers), stopped));
        tokio::time::sleep(PERIOD * 2).await;
        assert!(trackers.0.lock().unwrap().is_empty());
        changed.send_replace(urls(&["away", "here"]));
        tokio::time::sleep(PERIOD * 4 + PERIOD / 2).await;
        stop.send_replace(true);
        running.await.unwrap();
        let answer = trackers.0.lock().unwrap();
        let name = Name::of_machine(MachineId::new(3));
        assert_eq!(answer.len(), 6);
        for (host, beat, authorization) in &answer[..5] {
            assert_eq!((host.as_str(), beat), ("here", &(name, false)));
            assert!(token::MachineToken::parse(authorization).unwrap().holds("machine-0000000003:x"));
        }
        assert_eq!(answer[5].1, (name, true));
    }

    /// A tracker that answers 503 until its store is loaded, and the times of its requests.
    struct Starting {
        ready: Instant,
        asked: Mutex<Vec<Duration>>,
    }

    impl HttpClient for Starting {
        async fn call(&self, _: Call) -> Result<u16, CallError> {
            let now = Instant::now();
            let begun = self.ready - Duration::from_millis(250);
            self.asked.lock().unwrap().push(now - begun);
            Ok(if now < self.ready { 503 } else { 200 })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_beat_is_sent_again_soon() {
        let ready = Instant::now() + Duration::from_millis(250);
        let tracker = Arc::new(Starting { ready, asked: Mutex::default() });
        let (_known, trackers) = watch::channel(vec!["http://here".to_owned()]);
        let sender = BeatClient::new(MachineId::new(0), "machine-0000000000:x", trackers);
        let (_stop, stopped) = watch::channel(false);
        let running = tokio::spawn(sender.run(Arc::clone(&tracker), stopped));
        tokio::time::sleep(PERIOD * 2).await;
        running.abort();
        // Refused twice, taken once the tracker is ready, and from then on at the usual pace.
        let asked: Vec<u128> = tracker.asked.lock().unwrap().iter().map(Duration::as_millis).collect();
        assert_eq!(asked, [0, 100, 300, 3300]);
    }
}
