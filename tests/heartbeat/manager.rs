//! A state manager and a webhook for tests, which can fail in several ways and record what they
//! got. The tests check the records.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis::heartbeat::hsm::SEQUENCES;
use portcullis::heartbeat::webhook::SIGNATURE;
use portcullis::net::http::client::{Call, CallError, HttpClient};
use tokio::time::Instant;

pub(crate) const HOOK_URL: &str = "http://hook/told";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Mood {
    #[default]
    Fine,
    Down,
    Hanging,
    Failing,
    /// Refuses everything, like a proxy that is starting.
    Answering(u16),
    Slow,
    /// Applies a call after this time, whether the caller waits for it or not.
    Late(Duration),
    /// Accepts nothing until the mood changes; then also calls of callers that are gone.
    Holding,
}

/// One update of a component that it accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) at: Instant,
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) flag: String,
    pub(crate) message: String,
    /// The number of the change, as the header of the call has it.
    pub(crate) sequence: u64,
    /// The call that it came with.
    pub(crate) call: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) mood: Mood,
    pub(crate) refused: BTreeSet<String>,
    /// Names that it does not know.
    pub(crate) unknown: BTreeSet<String>,
    pub(crate) updates: Vec<Update>,
    pub(crate) calls: usize,
    /// Calls received, whatever the result.
    pub(crate) arrived: usize,
    pub(crate) hook_mood: Mood,
    /// Set when a call is accepted: a fault happens at that moment.
    pub(crate) unplug: Option<Arc<AtomicBool>>,
    pub(crate) hooked: Vec<Hooked>,
}

/// One document that the webhook got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hooked {
    pub(crate) name: String,
    pub(crate) health: String,
    pub(crate) sequence: u64,
}

impl Book {
    /// The newest state of each component.
    pub(crate) fn newest_states(&self) -> BTreeMap<String, (String, String)> {
        self.updates
            .iter()
            .map(|update| (update.name.clone(), (update.state.clone(), update.flag.clone())))
            .collect()
    }

    /// Every change, by name and number, with how often it was sent. The same number is always the
    /// same change.
    pub(crate) fn changes(&self) -> BTreeMap<(String, u64), Vec<Update>> {
        let mut changes: BTreeMap<(String, u64), Vec<Update>> = BTreeMap::new();
        for update in &self.updates {
            changes.entry((update.name.clone(), update.sequence)).or_default().push(update.clone());
        }
        for update in changes.values() {
            let what = |update: &Update| (update.state.clone(), update.flag.clone(), update.message.clone());
            assert!(update.iter().all(|again| what(again) == what(&update[0])), "{update:?}");
        }
        changes
    }

    /// Records a document for the webhook.
    pub(crate) fn take_hook(&mut self, sequences: &str, body: &[u8]) {
        let document: serde_json::Value = serde_json::from_slice(body).expect("JSON");
        let text = |key: &str| document[key].as_str().expect("a string").to_owned();
        let sequence = document["sequence"].as_u64().expect("a number");
        assert_eq!(sequences, sequence.to_string(), "the number is in the header, too");
        self.hooked.push(Hooked { name: text("component"), health: text("health"), sequence });
    }

    /// Records a call and returns the status.
    pub(crate) fn take(&mut self, sequences: &str, body: &[u8]) -> u16 {
        self.calls += 1;
        let document: serde_json::Value = serde_json::from_slice(body).expect("JSON");
        let names: Vec<String> = document["ComponentIDs"]
            .as_array()
            .expect("names")
            .iter()
            .map(|name| name.as_str().expect("a name").to_owned())
            .collect();
        if names.iter().any(|name| self.refused.contains(name)) {
            return 400;
        }
        if names.iter().any(|name| self.unknown.contains(name)) {
            return 404;
        }
        if let Some(unplug) = self.unplug.take() {
            unplug.store(true, Ordering::Relaxed);
        }
        let numbers = expand(sequences);
        assert_eq!(numbers.len(), names.len(), "{sequences}");
        let text = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
        for (name, sequence) in names.into_iter().zip(numbers) {
            self.updates.push(Update {
                at: Instant::now(),
                name,
                state: text(&document["State"]),
                flag: text(&document["Flag"]),
                message: text(&document["ExtendedInfo"]["Message"]),
                sequence,
                call: self.calls,
            });
        }
        200
    }
}

/// Expands `7-9,12`.
fn expand(runs: &str) -> Vec<u64> {
    let number = |text: &str| text.parse::<u64>().expect("a number");
    runs.split(',')
        .flat_map(|run| {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            number(first)..=number(last)
        })
        .collect()
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Manager(pub(crate) Arc<Mutex<Book>>);

impl Manager {
    pub(crate) fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.0.lock().expect("no panic while locked")
    }
}

impl Manager {
    /// Handles a call. The caller may disconnect before the reply.
    async fn receive(&self, call: Call) -> Result<u16, CallError> {
        assert!(call.header(SIGNATURE).is_some());
        let mood = self.book().hook_mood;
        let time = match mood {
            Mood::Holding | Mood::Late(_) => unreachable!("for the state manager"),
            Mood::Down => return Err(CallError::Connect(ErrorKind::ConnectionRefused.into())),
            Mood::Failing => return Ok(500),
            Mood::Answering(status) => return Ok(status),
            Mood::Hanging => call.limit,
            Mood::Slow => Duration::from_secs(1),
            Mood::Fine => Duration::from_millis(3),
        };
        if mood != Mood::Hanging {
            self.book().take_hook(call.header(SEQUENCES).unwrap(), &call.body);
        }
        tokio::time::sleep(time).await;
        if mood == Mood::Hanging { Err(CallError::TooSlow) } else { Ok(204) }
    }
}

impl Manager {
    async fn apply_late(&self, call: Call, time: Duration) -> Result<u16, CallError> {
        let (manager, limit) = (self.clone(), call.limit);
        let applied = tokio::spawn(async move {
            tokio::time::sleep(time).await;
            manager.book().take(call.header(SEQUENCES).unwrap(), &call.body)
        });
        match tokio::time::timeout(limit, applied).await {
            Ok(status) => Ok(status.expect("no panic")),
            Err(_) => Err(CallError::TooSlow),
        }
    }
}

impl HttpClient for Manager {
    async fn call(&self, call: Call) -> Result<u16, CallError> {
        if call.url == HOOK_URL {
            return self.receive(call).await;
        }
        assert!(call.url.ends_with("/State/Components/BulkStateData"), "{}", call.url);
        let mood = self.book().mood;
        if mood != Mood::Fine {
            self.book().arrived += 1;
        }
        match mood {
            Mood::Holding => unreachable!("for real callers"),
            Mood::Down => return Err(CallError::Connect(ErrorKind::ConnectionRefused.into())),
            Mood::Failing => return Ok(500),
            Mood::Answering(status) => return Ok(status),
            Mood::Hanging => {
                tokio::time::sleep(call.limit).await;
                return Err(CallError::TooSlow);
            }
            Mood::Slow => tokio::time::sleep(Duration::from_secs(2)).await,
            Mood::Late(time) => return self.apply_late(call, time).await,
            Mood::Fine => tokio::time::sleep(Duration::from_millis(3)).await,
        }
        Ok(self.book().take(call.header(SEQUENCES).unwrap(), &call.body))
    }
}
