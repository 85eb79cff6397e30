//! Parses the JSON of beats and of state queries without copies: which fields are present, and
//! which have a wrong type. `request` makes the error messages. Pure.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Deserializer as Json;

use crate::heartbeat::core::beat::MAX_INTERVAL;

/// The fields of one beat; `None` if it is not a JSON object.
pub(super) fn beat(bytes: &[u8]) -> Option<Fields<'_>> {
    let mut json = Json::from_slice(bytes);
    let fields = json.deserialize_map(FieldsVisitor).ok()?;
    json.end().ok().map(|()| fields)
}

/// The fields of several beats; `None` also if there are more than `most`.
pub(super) fn beats(bytes: &[u8], most: usize) -> Option<Vec<Fields<'_>>> {
    let mut json = Json::from_slice(bytes);
    let beats = json.deserialize_seq(BeatsVisitor(most)).ok()?;
    json.end().ok().map(|()| beats)
}

/// The names in a state query; `None` if it is not a JSON object.
pub(super) fn state_query(bytes: &[u8]) -> Option<Field<'_>> {
    let mut json = Json::from_slice(bytes);
    let names = json.deserialize_map(StateQueryVisitor).ok()?;
    json.end().ok().map(|()| names)
}

/// A JSON value, with the distinctions that matter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Field<'a> {
    #[default]
    Missing,
    Text(Cow<'a, str>),
    /// A list of strings.
    List(Vec<Cow<'a, str>>),
    Number(u64),
    /// Any other value.
    Wrong,
}

/// The names of the fields; the required ones come first.
pub(super) const FIELDS: [&str; 6] = ["Component", "Hostname", "NID", "Status", "Timestamp", "Interval"];
const REQUIRED: usize = 5;

#[derive(Debug, Default)]
pub(super) struct Fields<'a>([Field<'a>; 6]);

impl Fields<'_> {
    /// Returns the first error in the required fields from `first` on, in their order.
    pub(super) fn problem(&self, first: usize) -> Option<String> {
        let known = || FIELDS.iter().zip(&self.0).take(REQUIRED).skip(first);
        let wrong =
            known().find(|(_, field)| matches!(field, Field::Wrong | Field::List(_) | Field::Number(_)));
        if let Some((name, _)) = wrong {
            return Some(format!("Invalid data type in {name} field"));
        }
        let missing = known().find(|(_, field)| match field {
            Field::Text(text) => text.is_empty(),
            _ => true,
        });
        missing.map(|(name, _)| format!("Missing {name} field"))
    }

    /// Seconds between two beats of the sender, as a number or as text; 0 if the field is missing.
    ///
    /// # Errors
    /// If the field is invalid.
    pub(super) fn interval(&self) -> Result<u16, String> {
        let seconds = match &self.0[5] {
            Field::Missing => return Ok(0),
            Field::Text(text) => text.parse().ok(),
            Field::Number(seconds) => u16::try_from(*seconds).ok(),
            Field::List(_) | Field::Wrong => return Err("Invalid data type in Interval field".to_owned()),
        };
        let allowed = seconds.filter(|seconds| (1..=MAX_INTERVAL).contains(seconds));
        allowed.ok_or_else(|| format!("Invalid Interval: not a number of seconds from 1 to {MAX_INTERVAL}"))
    }

    pub(super) fn text(&self, at: usize) -> &str {
        match &self.0[at] {
            Field::Text(text) => text,
            _ => "",
        }
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a beat")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        while let Some(at) = map.next_key_seed(KeySeed)? {
            match at {
                Some(at) => {
                    // As in Go, null leaves a field as it was.
                    if let Some(field) = map.next_value_seed(FieldSeed)? {
                        fields.0[at] = field;
                    }
                }
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(fields)
    }
}

impl<'de> DeserializeSeed<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

/// Finds the field of a key, in upper or lower case.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(FIELDS.iter().position(|field| key.eq_ignore_ascii_case(field)))
    }
}

struct FieldSeed;

impl<'de> DeserializeSeed<'de> for FieldSeed {
    type Value = Option<Field<'de>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for FieldSeed {
    type Value = Option<Field<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Some(Field::Text(Cow::Borrowed(text))))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Field::Text(Cow::Owned(text.to_owned()))))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Some(Field::Wrong))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Some(Field::Wrong))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Some(Field::Number(number)))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Some(Field::Wrong))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (mut list, mut wrong) = (Vec::new(), false);
        while let Some(field) = seq.next_element_seed(FieldSeed)? {
            match field {
                Some(Field::Text(text)) => list.push(text),
                _ => wrong = true,
            }
        }
        Ok(Some(if wrong { Field::Wrong } else { Field::List(list) }))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Some(Field::Wrong))
    }
}

/// A list of beats, with a limit.
struct BeatsVisitor(usize);

impl<'de> Visitor<'de> for BeatsVisitor {
    type Value = Vec<Fields<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of beats")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut beats = Vec::new();
        while let Some(fields) = seq.next_element_seed(FieldsVisitor)? {
            if beats.len() >= self.0 {
                return Err(A::Error::custom("too many"));
            }
            beats.push(fields);
        }
        Ok(beats)
    }
}

/// The names in a state query.
struct StateQueryVisitor;

impl<'de> Visitor<'de> for StateQueryVisitor {
    type Value = Field<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a state query")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Field<'de>, A::Error> {
        let mut names = Field::Missing;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key.eq_ignore_ascii_case("XNames") {
                names = map.next_value_seed(FieldSeed)?.unwrap_or_default();
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(names)
    }
}
