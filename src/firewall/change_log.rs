//! The change log of a machine: its last changes with time, units and result, stored in the tree
//! beside the machine's report. Pure. Values, their JSON and their text. New entries displace old
//! ones, and a repeated failure is recorded once.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::Applied;
use portcullis_provider::rule::{Change, PortRange, Rule};
use serde_json::{Value, json};

use super::explain::escape_control;
use crate::runtime::clock;

/// The maximum size of one machine's change log in bytes and in entries.
pub const MAX_BYTES: usize = 48 * 1024;
const MAX_ENTRIES: usize = 100;
/// The maximum number of items of one change; further items are only counted.
const MAX_ITEMS: usize = 50;

/// One change of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Milliseconds since 1970.
    pub at: u64,
    pub items: Vec<Item>,
    /// The number of items that were left out.
    pub more: usize,
}

/// Ports that were opened or closed, or an attempt to do so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub what: String,
    pub units: Vec<String>,
    /// Why the request failed, if it did.
    pub failure: Option<String>,
}

impl Entry {
    /// `units_of` returns the units that a rule is opened or closed for; `drift` describes repairs
    /// of anything other than rules.
    pub fn new(
        at: u64,
        change: &Change,
        applied: &Applied,
        drift: &[String],
        units_of: impl Fn(&Rule) -> Vec<String>,
    ) -> Self {
        let mut items = Vec::new();
        for (word, rules, result) in
            [("open", &change.open, &applied.opened), ("close", &change.close, &applied.closed)]
        {
            let failure = result.as_ref().err().map(ToString::to_string);
            for (ports, (sources, units)) in by_ports(rules, &units_of) {
                let direction = if word == "open" { "to" } else { "from" };
                let what = format!("{word} {ports} {direction} {}", sources.join(", "));
                items.push(Item { what, units, failure: failure.clone() });
            }
        }
        let failure = applied.errors().next().map(ToString::to_string);
        items.extend(drift.iter().map(|drift| Item {
            what: format!("repair {drift}"),
            units: Vec::new(),
            failure: failure.clone(),
        }));
        let more = items.len().saturating_sub(MAX_ITEMS);
        items.truncate(MAX_ITEMS);
        Self { at, items, more }
    }

    /// The part of the entry that concerns a unit, if any. Items that were left out are not
    /// counted.
    pub fn of_unit(&self, unit: &str) -> Option<Self> {
        let concerns = |item: &&Item| item.units.iter().any(|name| name == unit);
        let items: Vec<Item> = self.items.iter().filter(concerns).cloned().collect();
        (!items.is_empty()).then_some(Self { at: self.at, items, more: 0 })
    }

    pub fn to_json(&self) -> Value {
        let item = |item: &Item| {
            let mut json = json!({"what": item.what});
            if !item.units.is_empty() {
                json["units"] = item.units.iter().map(String::as_str).collect();
            }
            if let Some(failure) = &item.failure {
                json["failure"] = Value::from(failure.as_str());
            }
            json
        };
        let mut json = json!({"at": self.at, "items": self.items.iter().map(item).collect::<Vec<_>>()});
        if self.more > 0 {
            json["more"] = Value::from(self.more);
        }
        json
    }

    fn parse(value: &Value) -> Option<Self> {
        let item = |value: &Value| {
            let names = value["units"].as_array().into_iter().flatten();
            Some(Item {
                what: value["what"].as_str()?.to_owned(),
                units: names.map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>()?,
                failure: value["failure"].as_str().map(str::to_owned),
            })
        };
        Some(Self {
            at: value["at"].as_u64()?,
            items: value["items"].as_array()?.iter().map(item).collect::<Option<_>>()?,
            more: value["more"].as_u64().and_then(|more| more.try_into().ok()).unwrap_or(0),
        })
    }

    /// One line per item, each with its time and `of`.
    pub fn to_text(&self, of: &str) -> String {
        let head = format!("{}  {of}  ", clock::utc(self.at));
        let mut text = String::new();
        for item in &self.items {
            let result =
                item.failure.as_ref().map_or_else(|| "done".to_owned(), |why| format!("failed: {why}"));
            let units =
                if item.units.is_empty() { String::new() } else { format!(" for {}", item.units.join(", ")) };
            text.push_str(&escape_control(&format!("{head}{}{units}: {result}", item.what)));
            text.push('\n');
        }
        if self.more > 0 {
            text.push_str(&format!("{head}and {} more\n", self.more));
        }
        text
    }
}

/// Groups rules by ports, with their sources and units.
fn by_ports(
    rules: &BTreeSet<Rule>,
    units_of: impl Fn(&Rule) -> Vec<String>,
) -> BTreeMap<PortRange, (Vec<String>, Vec<String>)> {
    let mut ports: BTreeMap<PortRange, (Vec<String>, Vec<String>)> = BTreeMap::new();
    for rule in rules {
        let (sources, units) = ports.entry(rule.ports).or_default();
        sources.push(rule.source.to_string());
        for unit in units_of(rule) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    ports
}

/// The last entries of one machine, the oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeLog(Vec<Entry>);

/// Data that is not a valid change log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a change log of a firewall")]
pub struct InvalidChangeLog;

impl ChangeLog {
    /// # Errors
    /// If the data is not a valid change log.
    pub fn parse(data: &[u8]) -> Result<Self, InvalidChangeLog> {
        let value: Value = serde_json::from_slice(data).map_err(|_| InvalidChangeLog)?;
        let entries = value.as_array().ok_or(InvalidChangeLog)?;
        entries.iter().map(Entry::parse).collect::<Option<_>>().map(Self).ok_or(InvalidChangeLog)
    }

    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// Appends an entry. Returns false if it is empty, already present, or repeats the last
    /// failure.
    pub fn push(&mut self, entry: Entry) -> bool {
        let repeats =
            |last: &Entry| last.items == entry.items && entry.items.iter().any(|item| item.failure.is_some());
        // An earlier write may have succeeded although its result was lost.
        if entry.items.is_empty() || self.0.last().is_some_and(repeats) || self.0.contains(&entry) {
            return false;
        }
        self.0.push(entry);
        let over = self.0.len().saturating_sub(MAX_ENTRIES);
        self.0.drain(..over);
        true
    }

    /// At most [`MAX_BYTES`]: the oldest entries are left out.
    pub fn to_bytes(&self) -> Vec<u8> {
        let entries: Vec<String> = self.0.iter().map(|entry| entry.to_json().to_string()).collect();
        let mut left = MAX_BYTES - 2;
        let fitting = entries.iter().rev().take_while(|text| {
            let fits = text.len() < left;
            left = left.saturating_sub(text.len() + 1);
            fits
        });
        let kept = fitting.count();
        format!("[{}]", entries[entries.len() - kept..].join(",")).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::rule::{Cidr, Protocol};
    use portcullis_provider::{Error, Subject};

    fn rule(port: u16, source: Cidr) -> Rule {
        Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), source)
    }

    fn entry(at: u64, open: &[u16], close: &[u16], applied: &Applied) -> Entry {
        let rules = |ports: &[u16]| {
            ports.iter().flat_map(|&p| [Cidr::WORLD_V4, Cidr::WORLD_V6].map(|s| rule(p, s))).collect()
        };
        let change = Change { open: rules(open), close: rules(close) };
        Entry::new(at, &change, applied, &[], |rule| vec![format!("web/{}", rule.ports.from() % 10)])
    }

    fn throttled() -> Applied {
        Applied { opened: Err(Error::Throttled { what: Subject::Provider }), closed: Ok(()) }
    }

    #[test]
    fn an_entry_shows_time_change_units_and_result() {
        let entry = entry(1_794_814_812_000, &[80, 81], &[443], &throttled());
        let head = "2026-11-16T07:40:12Z  machine 0  ";
        let failed = "failed: calls for the provider are throttled";
        let text = format!(
            "{head}open 80/tcp to 0.0.0.0/0, ::/0 for web/0: {failed}\n\
             {head}open 81/tcp to 0.0.0.0/0, ::/0 for web/1: {failed}\n\
             {head}close 443/tcp from 0.0.0.0/0, ::/0 for web/3: done\n"
        );
        assert_eq!(entry.to_text("machine 0"), text);
    }

    #[test]
    fn an_entry_can_be_limited_to_one_unit() {
        let entry = entry(1_794_814_812_000, &[80, 81], &[443, 90], &Applied::as_one(Ok(())));
        let shown = entry.of_unit("web/0").unwrap().to_text("machine 0");
        let text = "\
2026-11-16T07:40:12Z  machine 0  open 80/tcp to 0.0.0.0/0, ::/0 for web/0: done
2026-11-16T07:40:12Z  machine 0  close 90/tcp from 0.0.0.0/0, ::/0 for web/0: done
";
        assert_eq!((shown.as_str(), entry.of_unit("web/2")), (text, None));
        let many: Vec<u16> = (1..200).collect();
        let long = self::entry(1, &many, &[], &Applied::as_one(Ok(()))).of_unit("web/3").unwrap();
        assert!(long.more == 0 && long.items.iter().all(|item| item.units == ["web/3"]));
    }

    #[test]
    fn a_change_log_is_parsed_as_written_and_invalid_data_is_refused() {
        let mut change_log = ChangeLog::default();
        assert!(change_log.push(entry(1, &[80], &[], &Applied::as_one(Ok(())))));
        assert!(change_log.push(entry(2, &[81], &[80], &throttled())));
        assert_eq!(ChangeLog::parse(&change_log.to_bytes()), Ok(change_log));
        for text in ["", "{}", "[{}]", r#"[{"at": 1, "items": [{}]}]"#, r#"[{"at": -1, "items": []}]"#] {
            assert_eq!(ChangeLog::parse(text.as_bytes()), Err(InvalidChangeLog), "{text}");
        }
    }

    #[test]
    fn a_repeated_failure_is_recorded_once_and_a_repeated_success_twice() {
        let mut change_log = ChangeLog::default();
        assert!(change_log.push(entry(1, &[80], &[], &throttled())));
        assert!(!change_log.push(entry(2, &[80], &[], &throttled())));
        for at in 3..5 {
            assert!(change_log.push(entry(at, &[80], &[], &Applied::as_one(Ok(())))));
        }
        assert!(!change_log.push(entry(5, &[], &[], &Applied::as_one(Ok(())))), "an entry without items");
        assert_eq!(change_log.entries().len(), 3);
    }

    #[test]
    fn a_change_log_never_exceeds_its_limits() {
        let mut change_log = ChangeLog::default();
        let many: Vec<u16> = (1..2000).collect();
        for at in 0..150 {
            change_log.push(entry(at, &many, &[], &Applied::as_one(Ok(()))));
        }
        assert_eq!(change_log.entries().len(), MAX_ENTRIES);
        assert_eq!(change_log.entries()[0].more, 1999 - MAX_ITEMS);
        let bytes = change_log.to_bytes();
        assert!(bytes.len() <= MAX_BYTES && bytes.len() > MAX_BYTES / 2, "{}", bytes.len());
        let kept = ChangeLog::parse(&bytes).unwrap();
        assert_eq!(kept.entries().last(), change_log.entries().last());
    }
}
