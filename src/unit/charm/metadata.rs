//! Parses and checks a charm's `metadata.yaml` and its optional `revision` file. All problems are
//! collected, so that an author can repair a charm in one go. The caller reads the files. Pure.

use std::fmt;

use serde_json::Value;

use crate::model::{CharmUrl, ServiceName};

/// The most bytes `metadata.yaml` may have. Charms of the first Juju stay below 4 KB.
pub const MAX_METADATA_BYTES: usize = 64 * 1024;
/// The most bytes the `revision` file may have: room for any 32-bit number and a line end.
pub const MAX_REVISION_BYTES: usize = 64;
/// Names have their own rule; this limit only keeps the error message short.
const MAX_NAME_CHARS: usize = 100;
const MAX_SUMMARY_CHARS: usize = 512;
const MAX_DESCRIPTION_CHARS: usize = 16 * 1024;
const DEFAULT_REVISION: u32 = 1;

/// The hooks that Portcullis runs. A charm may contain others, which are ignored.
pub const HOOKS: [&str; 5] = ["install", "start", "stop", "exposed", "unexposed"];

/// The metadata of a charm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charm {
    /// The id in the store and in status. Its name is the default service name.
    pub url: CharmUrl,
    pub summary: String,
    pub description: String,
}

/// One problem of a charm, with the file and key that it is in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("{file} has {bytes} bytes, at most {most} are read")]
    TooLarge { file: &'static str, bytes: usize, most: usize },
    #[error("{file} is not UTF-8 text")]
    NotText { file: &'static str },
    #[error("metadata.yaml is not YAML: {0}")]
    NotYaml(String),
    #[error("metadata.yaml is not a mapping of keys to values")]
    NotMapping,
    #[error("metadata.yaml has no {0}")]
    Missing(&'static str),
    #[error("metadata.yaml: {key} must be text, got {got}")]
    NotString { key: &'static str, got: &'static str },
    #[error("metadata.yaml: {key} is empty")]
    Empty { key: &'static str },
    #[error("metadata.yaml: {key} has {chars} characters, at most {most} are allowed")]
    TooLong { key: &'static str, chars: usize, most: usize },
    #[error(
        "metadata.yaml: name {0:?} takes lower-case letters, digits and single dashes, starts with a \
         letter, and has a letter after each dash"
    )]
    BadName(String),
    #[error("{place}: revision must be an integer from 0 to 4294967295, got {got}")]
    BadRevision { place: &'static str, got: String },
    #[error("there is no metadata.yaml")]
    NoMetadata,
    #[error("hooks/{hook} is not executable")]
    NotExecutable { hook: &'static str },
    #[error("{path} is neither a file nor a directory")]
    NotFile { path: String },
    #[error("{path} is a link that cannot be kept: {problem}")]
    BadLink { path: String, problem: String },
    #[error("path {path:?} is not allowed in a charm: {problem}")]
    BadPath { path: String, problem: String },
    #[error("{path} cannot be read: {reason}")]
    Unreadable { path: String, reason: String },
    #[error("{path} is deeper than {most} directories")]
    TooDeep { path: String, most: usize },
    #[error("the charm has more than {most} files")]
    TooMany { most: usize },
    #[error("the charm has more than {most} bytes")]
    TooMuch { most: usize },
}

/// All problems of one charm. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    pub(super) fn one(problem: Problem) -> Self {
        Self(vec![problem])
    }

    /// Returns `None` if there are no problems.
    pub(super) fn all(problems: Vec<Problem>) -> Self {
        debug_assert!(!problems.is_empty());
        Self(problems)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Parses a charm from the contents of `metadata.yaml` and, if it exists, the `revision` file. The
/// file overrides the key `revision`, as in the first Juju.
pub fn check(metadata: &[u8], revision_file: Option<&[u8]>) -> Result<Charm, Problems> {
    let mut problems = Vec::new();
    let revision_in_file = revision_file.and_then(|bytes| file_revision(bytes, &mut problems));
    let Some(map) = mapping(metadata, &mut problems) else { return Err(Problems(problems)) };
    let name = text(&map, "name", MAX_NAME_CHARS, &mut problems).and_then(|name| {
        let parsed = name.parse::<ServiceName>().ok();
        if parsed.is_none() {
            problems.push(Problem::BadName(name));
        }
        parsed
    });
    let summary = text(&map, "summary", MAX_SUMMARY_CHARS, &mut problems);
    let description = text(&map, "description", MAX_DESCRIPTION_CHARS, &mut problems);
    let revision_key = map.get("revision").and_then(|value| key_revision(value, &mut problems));
    match (name, summary, description) {
        (Some(name), Some(summary), Some(description)) if problems.is_empty() => {
            let revision = revision_in_file.or(revision_key).unwrap_or(DEFAULT_REVISION);
            Ok(Charm { url: CharmUrl::local(name, revision), summary, description })
        }
        _ => Err(Problems(problems)),
    }
}

fn mapping(metadata: &[u8], problems: &mut Vec<Problem>) -> Option<serde_json::Map<String, Value>> {
    let source = text_of("metadata.yaml", metadata, MAX_METADATA_BYTES, problems)?;
    match serde_saphyr::from_str::<Value>(source) {
        Ok(Value::Object(map)) => Some(map),
        Ok(_) => {
            problems.push(Problem::NotMapping);
            None
        }
        Err(error) => {
            problems.push(Problem::NotYaml(error.without_snippet().to_string()));
            None
        }
    }
}

fn text_of<'a>(
    file: &'static str,
    bytes: &'a [u8],
    most: usize,
    problems: &mut Vec<Problem>,
) -> Option<&'a str> {
    if bytes.len() > most {
        problems.push(Problem::TooLarge { file, bytes: bytes.len(), most });
        return None;
    }
    let text = std::str::from_utf8(bytes).ok();
    if text.is_none() {
        problems.push(Problem::NotText { file });
    }
    text
}

fn text(
    map: &serde_json::Map<String, Value>,
    key: &'static str,
    most: usize,
    problems: &mut Vec<Problem>,
) -> Option<String> {
    let problem = match map.get(key) {
        None => Problem::Missing(key),
        Some(Value::String(text)) => {
            let trimmed = text.trim();
            let chars = trimmed.chars().count();
            match chars {
                0 => Problem::Empty { key },
                _ if chars > most => Problem::TooLong { key, chars, most },
                _ => return Some(trimmed.to_owned()),
            }
        }
        Some(Value::Null) => Problem::Empty { key },
        Some(other) => Problem::NotString { key, got: kind(other) },
    };
    problems.push(problem);
    None
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

fn file_revision(bytes: &[u8], problems: &mut Vec<Problem>) -> Option<u32> {
    let text = text_of("revision", bytes, MAX_REVISION_BYTES, problems)?;
    let revision = text.trim().parse().ok();
    if revision.is_none() {
        problems.push(Problem::BadRevision { place: "revision", got: format!("{:?}", text.trim()) });
    }
    revision
}

fn key_revision(value: &Value, problems: &mut Vec<Problem>) -> Option<u32> {
    let revision = value.as_u64().and_then(|n| u32::try_from(n).ok());
    if revision.is_none() {
        let got = match value {
            Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
            plain => plain.to_string().chars().take(MAX_NAME_CHARS).collect(),
        };
        problems.push(Problem::BadRevision { place: "metadata.yaml", got });
    }
    revision
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "name: wordpress\nsummary: A blog\ndescription: |\n  Writes\n  things.\n";

    fn problems(metadata: &str, revision: Option<&str>) -> Vec<String> {
        let refused = check(metadata.as_bytes(), revision.map(str::as_bytes)).expect_err("refused");
        refused.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_valid_charm_is_accepted_with_its_id() {
        let charm = check(GOOD.as_bytes(), None).unwrap();
        assert_eq!(charm.url.to_string(), "local:wordpress-1");
        assert_eq!(charm.summary, "A blog");
        assert_eq!(charm.description, "Writes\nthings.");
    }

    #[test]
    fn the_revision_file_takes_precedence_over_the_key() {
        let keyed = format!("{GOOD}revision: 7\n");
        assert_eq!(check(keyed.as_bytes(), None).unwrap().url.revision(), 7);
        assert_eq!(check(keyed.as_bytes(), Some(b"42\n")).unwrap().url.revision(), 42);
        assert_eq!(check(GOOD.as_bytes(), Some(b"0")).unwrap().url.revision(), 0);
    }

    #[test]
    fn unknown_keys_are_accepted() {
        let more = format!("{GOOD}maintainer: x <x@example.com>\nrequires:\n  db:\n    interface: mysql\n");
        assert!(check(more.as_bytes(), None).is_ok());
    }

    #[test]
    fn every_problem_is_named_at_once() {
        assert_eq!(
            problems("name: Word Press\nsummary: [a]\nrevision: -1\n", Some("two")),
            [
                "revision: revision must be an integer from 0 to 4294967295, got \"two\"",
                "metadata.yaml: name \"Word Press\" takes lower-case letters, digits and single dashes, \
                 starts with a letter, and has a letter after each dash",
                "metadata.yaml: summary must be text, got a list",
                "metadata.yaml has no description",
                "metadata.yaml: revision must be an integer from 0 to 4294967295, got -1",
            ]
        );
    }

    #[test]
    fn metadata_that_is_not_a_mapping_is_refused() {
        assert_eq!(problems("- a\n- b\n", None), ["metadata.yaml is not a mapping of keys to values"]);
        assert_eq!(problems("", None), ["metadata.yaml is not a mapping of keys to values"]);
        assert!(problems("name: [", None)[0].starts_with("metadata.yaml is not YAML: "));
        assert!(problems("name: a\nname: b\n", None)[0].starts_with("metadata.yaml is not YAML: "));
    }

    #[test]
    fn sizes_have_limits() {
        let long = |key: &str, chars: usize| match key {
            "name" => GOOD.replace("wordpress", &"w".repeat(chars)),
            _ => GOOD.replace("A blog", &"s".repeat(chars)),
        };
        assert!(check(long("name", 100).as_bytes(), None).is_ok());
        assert_eq!(
            problems(&long("name", 101), None),
            ["metadata.yaml: name has 101 characters, at most 100 are allowed"]
        );
        assert_eq!(
            problems(&long("summary", 513), None),
            ["metadata.yaml: summary has 513 characters, at most 512 are allowed"]
        );
        let huge = format!("{GOOD}# {}", "x".repeat(MAX_METADATA_BYTES));
        assert!(problems(&huge, None)[0].starts_with("metadata.yaml has 65"));
    }

    #[test]
    fn bytes_that_are_not_utf8_are_reported() {
        let refused = check(b"name: \xff", None).expect_err("refused");
        assert_eq!(refused.to_string(), "metadata.yaml is not UTF-8 text");
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_metadata_causes_no_panic(metadata: Vec<u8>, revision: Option<Vec<u8>>) {
            if let Err(refused) = check(&metadata, revision.as_deref()) {
                proptest::prop_assert!(refused.iter().next().is_some());
            }
        }
    }
}
