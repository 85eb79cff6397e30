//! How a view looks. YAML and JSON are written from one document, so that they cannot disagree; the table is made
//! from the view itself. Nothing here decides what is shown, only how.

pub mod dot;
pub mod json;
pub mod svg;
pub mod tabular;
pub mod yaml;

/// A key of a map. Machines are numbered, and YAML tells numbers from text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Int(u64),
    Text(String),
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// What YAML and JSON have in common, as far as status needs it. Maps are written in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doc {
    Map(Vec<(Key, Self)>),
    List(Vec<Self>),
    Text(String),
    Int(u64),
    Bool(bool),
    Null,
}
