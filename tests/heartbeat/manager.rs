//! A state manager of the tests' own: it can be down, hang, fail, be slow, or refuse one name, and it remembers what it was
//! told. Whether that was right is for the tests to say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis::heartbeat::notify::{CallError, Outgoing, Post};
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Mood {
    #[default]
    Fine,
    Down,
    Hanging,
    Failing,
    Slow,
}

/// One thing that it was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) at: Instant,
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) flag: String,
    pub(crate) message: String,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) mood: Mood,
    pub(crate) refused: BTreeSet<String>,
    pub(crate) told: Vec<Told>,
    pub(crate) calls: usize,
}

impl Book {
    /// What each component is, as far as the manager knows.
    pub(crate) fn believes(&self) -> BTreeMap<String, (String, String)> {
        self.told.iter().map(|told| (told.name.clone(), (told.state.clone(), told.flag.clone()))).collect()
    }

    /// Takes a call in and gives the status.
    pub(crate) fn take(&mut self, body: &[u8]) -> u16 {
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
        let text = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
        for name in names {
            self.told.push(Told {
                at: Instant::now(),
                name,
                state: text(&document["State"]),
                flag: text(&document["Flag"]),
                message: text(&document["ExtendedInfo"]["Message"]),
            });
        }
        200
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Manager(pub(crate) Arc<Mutex<Book>>);

impl Manager {
    pub(crate) fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.0.lock().expect("nobody panics while writing")
    }
}

impl Post for Manager {
    async fn post(&self, call: Outgoing) -> Result<u16, CallError> {
        assert!(call.url.ends_with("/State/Components/BulkStateData"), "{}", call.url);
        let mood = self.book().mood;
        match mood {
            Mood::Down => return Err(CallError::Address),
            Mood::Failing => return Ok(500),
            Mood::Hanging => {
                tokio::time::sleep(call.limit).await;
                return Err(CallError::TooSlow);
            }
            Mood::Slow => tokio::time::sleep(Duration::from_secs(2)).await,
            Mood::Fine => tokio::time::sleep(Duration::from_millis(3)).await,
        }
        Ok(self.book().take(&call.body))
    }
}
