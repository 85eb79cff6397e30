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
use crate::net::tls::ClientTls;
use crate::runtime::backoff::doubling;
use crate::runtime::clock::{utc, wall_ms};
use crate::runtime::service::stopped;

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
    /// Presents the machine's certificate to https:// trackers, once there is one.
    tls: Option<ClientTls>,
    /// Base addresses of the trackers, `http://HOST[:PORT]`; they may change at any time.
    trackers: watch::Receiver<Vec<String>>,
}

impl BeatClient {
    /// `credential` is the machine's `user:secret`.
    pub fn new(machine: MachineId, credential: &str, trackers: watch::Receiver<Vec<String>>) -> Self {
        let url_path = format!("/hmi/v1/heartbeat/{}", Name::of_machine(machine));
        Self { url_path, authorization: token::authorization(machine, credential), tls: None, trackers }
    }

    /// Authenticates to https:// trackers with the certificate of the client that sends the beats,
    /// instead of a token.
    #[must_use]
    pub fn with_certificate(self, tls: ClientTls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// Beats until `stop` is true, then says good-bye. The clock goes on whatever a tracker does.
    pub async fn run<P: HttpClient>(mut self, post: Arc<P>, mut stop: watch::Receiver<bool>) {
        let mut accepted = None;
        let mut first = 0;
        let mut failures = 0;
        let mut failing_since = None;
        loop {
            let trackers = self.trackers.borrow_and_update().clone();
            let sent = self.send(&*post, &trackers, "OK", &mut first).await;
            let taken = sent.is_ok();
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
                warn!(problem = sent.err(), "no tracker accepts beats");
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
                () = stopped(&mut stop) => break,
            }
        }
        let trackers = self.trackers.borrow().clone();
        // The last beat is not repeated: trackers notice the silence.
        drop(self.send(&*post, &trackers, "stopping", &mut first).await);
    }

    /// Whether a connection to this tracker shows the name of the machine.
    async fn presents_certificate(&self, tracker: &str) -> bool {
        match &self.tls {
            Some(tls) if tracker.starts_with("https://") => tls.has_certificate().await,
            _ => false,
        }
    }

    /// Sends a beat to the first tracker that accepts it, which `first` then names. Returns why the
    /// last one did not, if none does.
    async fn send<P: HttpClient>(
        &self,
        post: &P,
        trackers: &[String],
        status: &str,
        first: &mut usize,
    ) -> Result<(), String> {
        let mut problem = "no tracker is known".to_owned();
        // For people: trackers show it in events, and measure silence with their own clocks.
        let body =
            serde_json::json!({"Status": status, "Timestamp": utc(wall_ms())}).to_string().into_bytes();
        for step in 0..trackers.len() {
            let at = (*first + step) % trackers.len();
            let call = |headers| Call {
                method: "POST",
                url: format!("{}{}", trackers[at], self.url_path),
                headers,
                body: body.clone(),
                limit: TIMEOUT,
                // Beats are idempotent.
                repeatable: true,
            };
            let token = vec![("authorization", self.authorization.clone())];
            let answer = if self.presents_certificate(&trackers[at]).await {
                match post.call(call(Vec::new())).await {
                    // This tracker does not ask for certificates.
                    Ok(401) => post.call(call(token)).await,
                    answer => answer,
                }
            } else {
                post.call(call(token)).await
            };
            if matches!(answer, Ok(200)) {
                *first = at;
                return Ok(());
            }
            debug!(tracker = %trackers[at], ?answer, "beat not accepted");
            problem = match answer {
                Ok(status) => format!("{} answered {status}", trackers[at]),
                Err(error) => format!("{}: {}", trackers[at], error.problem(&trackers[at])),
            };
        }
        Err(problem)
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

    /// Returns a client with a certificate in `directory`.
    fn with_certificate(directory: &std::path::Path) -> ClientTls {
        use crate::net::tls::authority::{Authority, Names, ROLE_LIFETIME, Validity};
        use crate::net::tls::key::PrivateKey;
        use crate::net::tls::{ClientFiles, IdentityFiles};
        use crate::runtime::atomic_file::{Privacy, replace};
        let key = PrivateKey::generate().unwrap();
        let ca = Authority::create("prod", &key, wall_ms()).unwrap();
        let validity = Validity::starting(wall_ms(), ROLE_LIFETIME);
        let chain = ca.issue_for(&key, &Names::of(["machine-3"]), validity).unwrap();
        let identity = IdentityFiles { certificates: directory.join("pem"), key: directory.join("key") };
        replace(&identity.key, key.expose().as_bytes(), Privacy::Secret).unwrap();
        replace(&identity.certificates, chain.as_bytes(), Privacy::Plain).unwrap();
        let files = ClientFiles { system_roots: true, identity: Some(identity), ..ClientFiles::default() };
        ClientTls::load(files).unwrap()
    }

    /// Answers 401 to calls without a token at the host `tokens`, and records the others.
    #[derive(Default)]
    struct Secure(Mutex<Vec<(String, bool)>>);

    impl HttpClient for Secure {
        async fn call(&self, call: Call) -> Result<u16, CallError> {
            let host = call.url.split('/').take(3).collect::<Vec<_>>().join("/");
            let has_token = call.header("authorization").is_some();
            self.0.lock().unwrap().push((host.clone(), has_token));
            Ok(if host.ends_with("tokens") && !has_token { 401 } else { 200 })
        }
    }

    #[tokio::test]
    async fn a_certificate_replaces_the_token_only_at_trackers_with_tls() {
        let directory = tempfile::tempdir().unwrap();
        let tls = with_certificate(directory.path());
        let sent = async |url: &str, tls: Option<&ClientTls>| {
            let urls = watch::channel(vec![url.to_owned()]).1;
            let sender = BeatClient::new(MachineId::new(3), "machine-0000000003:x", urls.clone());
            let sender = tls.map_or(sender.clone(), |tls| sender.with_certificate(tls.clone()));
            let trackers = Secure::default();
            let urls = urls.borrow().clone();
            sender.send(&trackers, &urls, "OK", &mut 0).await.unwrap();
            let calls = trackers.0.into_inner().unwrap();
            calls.into_iter().map(|(_, has_token)| has_token).collect::<Vec<_>>()
        };
        assert_eq!(sent("https://here", Some(&tls)).await, [false]);
        assert_eq!(sent("https://tokens", Some(&tls)).await, [false, true], "it asks for no certificate");
        assert_eq!(sent("http://here", Some(&tls)).await, [true]);
        assert_eq!(sent("https://here", None).await, [true]);
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
