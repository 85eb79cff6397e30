//! A document as JSON on one line, so that a stream of them can be cut at the line ends. Pure.

use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, Serializer};

use super::{Doc, Key};

impl Serialize for Doc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Map(entries) => {
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                for (key, value) in entries {
                    match key {
                        Key::Int(n) => map.serialize_entry(n, value)?,
                        Key::Text(text) => map.serialize_entry(text, value)?,
                    }
                }
                map.end()
            }
            Self::List(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    list.serialize_element(item)?;
                }
                list.end()
            }
            Self::Text(text) => serializer.serialize_str(text),
            Self::Int(n) => serializer.serialize_u64(*n),
            Self::Bool(yes) => serializer.serialize_bool(*yes),
            Self::Null => serializer.serialize_unit(),
        }
    }
}

pub fn render(doc: &Doc) -> String {
    // serde_json accepts all keys and values of a document.
    let mut text = serde_json::to_string(doc).expect("a document is always JSON");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_keys_become_text() {
        let doc = Doc::Map(vec![
            (Key::Int(2), Doc::List(vec![Doc::Text("80/tcp".into()), Doc::Null])),
            ("a\"\u{7}".into(), Doc::Map(vec![])),
        ]);
        assert_eq!(render(&doc), "{\"2\":[\"80/tcp\",null],\"a\\\"\\u0007\":{}}\n");
    }
}
