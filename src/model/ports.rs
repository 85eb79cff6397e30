//! The ports of a unit: the document in its znode, and the argument of the hook tools. Pure.
//!
//! Unknown keys of the document and of its entries are kept. An invalid document is an error and
//! never "no ports", which would close the unit's ports.

use super::{PortRange, Protocol};
use serde_json::{Map, Value, json};

/// Size limit of a ports document, in bytes.
pub const MAX_BYTES: usize = 64 * 1024;

/// Limit of entries of a ports document.
pub const MAX_ENTRIES: usize = 1000;

/// Limit of nesting, so that a hostile document cannot exhaust the stack. Valid ones nest three
/// deep.
const MAX_DEPTH: usize = 32;

/// A ports document: the opened ranges, in order of opening.
#[derive(Debug, Clone, PartialEq)]
pub struct PortsDocument {
    entries: Vec<Entry>,
    /// Unknown keys of the document.
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    range: PortRange,
    /// Unknown keys of the entry.
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPorts {
    #[error("{bytes} bytes are more than the {MAX_BYTES} allowed for ports")]
    TooLarge { bytes: usize },
    #[error("{entries} open ports are more than the {MAX_ENTRIES} allowed")]
    TooMany { entries: usize },
    #[error("neither JSON nor YAML: {problem}")]
    Syntax { problem: String },
    #[error("not a mapping with a list \"open\"")]
    Shape,
    #[error("entry {index} of \"open\" {problem}")]
    Entry { index: usize, problem: &'static str },
}

/// An invalid port argument. The texts are those of the first Juju, which charms match on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPort {
    #[error("Invalid format for port/protocol, got '{0}'")]
    Format(String),
    #[error("Invalid port, must be an integer, got '{0}'")]
    NotInteger(String),
    #[error("Invalid port, must be from 1 to 65535, got {0}")]
    OutOfRange(String),
    #[error("Invalid protocol, must be 'tcp' or 'udp', got '{0}'")]
    Protocol(String),
    #[error("Invalid port range, got '{0}'")]
    Range(String),
}

/// Parses `PORT[-PORT][/PROTOCOL]`.
///
/// # Errors
/// The first problem found.
pub fn parse_argument(argument: &str) -> Result<PortRange, InvalidPort> {
    let (ports, proto) = argument.split_once('/').unwrap_or((argument, "tcp"));
    if proto.contains('/') {
        return Err(InvalidPort::Format(shown(argument)));
    }
    let (from, to) = match ports.split_once('-') {
        // A leading dash is a negative number, which is out of range, not an incomplete range.
        Some((from, to)) if !from.is_empty() => (parse_port(from)?, parse_port(to)?),
        _ => {
            let port = parse_port(ports)?;
            (port, port)
        }
    };
    let proto = Protocol::from_name(proto).ok_or_else(|| InvalidPort::Protocol(shown(proto)))?;
    PortRange::new(from, to, proto).map_err(|_| InvalidPort::Range(shown(ports)))
}

fn parse_port(text: &str) -> Result<u16, InvalidPort> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(InvalidPort::NotInteger(shown(text)));
    }
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => {
            // Printed as a number: 0 for 00.
            let number = digits.trim_start_matches('0');
            let sign = if text.starts_with('-') && !number.is_empty() { "-" } else { "" };
            let number = if number.is_empty() { "0" } else { number };
            Err(InvalidPort::OutOfRange(shown(&format!("{sign}{number}"))))
        }
    }
}

/// Converts a text to one line of limited length.
fn shown(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        if shown.len() >= 60 {
            shown.push_str("...");
            break;
        }
        if c.is_control() { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

impl PortsDocument {
    /// Iterates over the open ranges, in order of opening.
    pub fn ranges(&self) -> impl Iterator<Item = PortRange> + '_ {
        self.entries.iter().map(|entry| entry.range)
    }

    pub fn contains(&self, range: PortRange) -> bool {
        self.ranges().any(|open| open == range)
    }

    /// Parses the data of a ports node: JSON, or the YAML of the first Juju. Empty data, `null` and
    /// a missing `open` mean that no port was opened.
    ///
    /// # Errors
    /// If it is not a ports document.
    pub fn parse(data: &[u8]) -> Result<Self, InvalidPorts> {
        if data.len() > MAX_BYTES {
            return Err(InvalidPorts::TooLarge { bytes: data.len() });
        }
        let mut rest = match read_value(data)? {
            Value::Null => Map::new(),
            Value::Object(map) => map,
            _ => return Err(InvalidPorts::Shape),
        };
        let open = match rest.shift_remove("open") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(open)) => open,
            Some(_) => return Err(InvalidPorts::Shape),
        };
        if open.len() > MAX_ENTRIES {
            return Err(InvalidPorts::TooMany { entries: open.len() });
        }
        let mut document = Self { entries: Vec::new(), rest };
        for (index, value) in open.into_iter().enumerate() {
            let entry = Entry::from_value(value).map_err(|problem| InvalidPorts::Entry { index, problem })?;
            if !document.contains(entry.range) {
                document.entries.push(entry);
            }
        }
        Ok(document)
    }

    /// Encodes the document.
    ///
    /// # Errors
    /// If it exceeds the size limit.
    pub fn to_bytes(&self) -> Result<Vec<u8>, InvalidPorts> {
        let mut map = Map::new();
        map.insert("open".to_owned(), self.entries.iter().map(Entry::to_value).collect());
        map.extend(self.rest.clone());
        let bytes = Value::Object(map).to_string().into_bytes();
        if bytes.len() > MAX_BYTES {
            return Err(InvalidPorts::TooLarge { bytes: bytes.len() });
        }
        Ok(bytes)
    }

    /// Adds a range at the end, if it is not open yet.
    ///
    /// # Errors
    /// If the limit of entries is reached.
    pub fn open(&mut self, range: PortRange) -> Result<(), InvalidPorts> {
        if self.contains(range) {
            return Ok(());
        }
        if self.entries.len() >= MAX_ENTRIES {
            return Err(InvalidPorts::TooMany { entries: self.entries.len() + 1 });
        }
        self.entries.push(Entry { range, rest: Map::new() });
        Ok(())
    }

    /// Removes a range, if it is open. It must equal the opened range; part of a range is not
    /// removed.
    pub fn close(&mut self, range: PortRange) {
        self.entries.retain(|entry| entry.range != range);
    }
}

impl Entry {
    fn from_value(value: Value) -> Result<Self, &'static str> {
        let Value::Object(mut rest) = value else {
            return Err("is not a mapping");
        };
        let mut port = |key: &str| match rest.shift_remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value
                .as_u64()
                .and_then(|n| u16::try_from(n).ok())
                .filter(|&n| n > 0)
                .map(Some)
                .ok_or("has a port that is not a number from 1 to 65535"),
        };
        let from = port("port")?.ok_or("has no port")?;
        let to = port("to")?.unwrap_or(from);
        let proto = match rest.shift_remove("proto") {
            None => return Err("has no proto"),
            Some(Value::String(name)) => {
                Protocol::from_name(&name).ok_or("has a proto that is not tcp or udp")?
            }
            Some(_) => return Err("has a proto that is not tcp or udp"),
        };
        let range = PortRange::new(from, to, proto).map_err(|_| "has a range that ends before it begins")?;
        Ok(Self { range, rest })
    }

    fn to_value(&self) -> Value {
        let mut map = Map::new();
        map.insert("port".to_owned(), json!(self.range.from()));
        if !self.range.is_single() {
            map.insert("to".to_owned(), json!(self.range.to()));
        }
        map.insert("proto".to_owned(), json!(self.range.proto().name()));
        map.extend(self.rest.clone());
        Value::Object(map)
    }
}

/// Parses JSON, or YAML if it is not JSON. If both fail, the error is that of the more likely
/// format.
fn read_value(data: &[u8]) -> Result<Value, InvalidPorts> {
    let text = std::str::from_utf8(data)
        .map_err(|e| InvalidPorts::Syntax { problem: format!("not UTF-8 at byte {}", e.valid_up_to()) })?;
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    super::strict_json::parse(data).or_else(|json| {
        let looks_like_json = text.trim_start().starts_with(['{', '[', '"']);
        let as_json = InvalidPorts::Syntax { problem: json.to_string() };
        read_yaml(text).map_err(|yaml| if looks_like_json { as_json } else { yaml })
    })
}

fn read_yaml(text: &str) -> Result<Value, InvalidPorts> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_nodes: 20_000,
            max_events: 50_000,
            // Aliases can expand exponentially, and no valid document has one.
            max_aliases: 0,
            max_anchors: 0,
        },
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|e| InvalidPorts::Syntax {
        problem: e.to_string().lines().next().unwrap_or("unreadable").to_owned(),
    })
}

#[cfg(test)]
#[path = "ports_tests.rs"]
mod tests;
