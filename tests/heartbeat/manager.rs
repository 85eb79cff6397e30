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
    /// Takes nothing until the mood changes; then also from callers who are no more.
    Holding,
}

/// One thing that it was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) at: Instant,
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) flag: String,
    pub(crate) message: String,
    /// The number of the change, as the header of the call has it.
    pub(crate) sequence: u64,
    /// Of which call.
    pub(crate) call: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) mood: Mood,
    pub(crate) refused: BTreeSet<String>,
    pub(crate) told: Vec<Told>,
    pub(crate) calls: usize,
    /// Calls that have come, whatever became of them.
    pub(crate) arrived: usize,
}

impl Book {
    /// What each component is, as far as the manager knows.
    pub(crate) fn believes(&self) -> BTreeMap<String, (String, String)> {
        self.told.iter().map(|told| (told.name.clone(), (told.state.clone(), told.flag.clone()))).collect()
    }

    /// Every change that it was told of, by name and number, with how often. The same number is always the same change.
    pub(crate) fn changes(&self) -> BTreeMap<(String, u64), Vec<Told>> {
        let mut changes: BTreeMap<(String, u64), Vec<Told>> = BTreeMap::new();
        for told in &self.told {
            changes.entry((told.name.clone(), told.sequence)).or_default().push(told.clone());
        }
        for told in changes.values() {
            let what = |told: &Told| (told.state.clone(), told.flag.clone(), told.message.clone());
            assert!(told.iter().all(|again| what(again) == what(&told[0])), "{told:?}");
        }
        changes
    }

    /// Takes a call in and gives the status.
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
        let numbers = expand(sequences);
        assert_eq!(numbers.len(), names.len(), "{sequences}");
        let text = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
        for (name, sequence) in names.into_iter().zip(numbers) {
            self.told.push(Told {
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

/// `7-9,12` as the numbers that it stands for.
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
        self.0.lock().expect("nobody panics while writing")
    }
}

impl Post for Manager {
    async fn post(&self, call: Outgoing) -> Result<u16, CallError> {
        assert!(call.url.ends_with("/State/Components/BulkStateData"), "{}", call.url);
        let mood = self.book().mood;
        match mood {
            Mood::Holding => unreachable!("for real callers"),
            Mood::Down => return Err(CallError::Address),
            Mood::Failing => return Ok(500),
            Mood::Hanging => {
                tokio::time::sleep(call.limit).await;
                return Err(CallError::TooSlow);
            }
            Mood::Slow => tokio::time::sleep(Duration::from_secs(2)).await,
            Mood::Fine => tokio::time::sleep(Duration::from_millis(3)).await,
        }
        Ok(self.book().take(&call.sequences, &call.body))
    }
}
