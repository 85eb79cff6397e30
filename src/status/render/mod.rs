//! The output formats of a view. YAML and JSON are written from one document, so that they cannot
//! differ; the others are made from the view. Nothing here decides what is shown. Pure.

pub mod dot;
pub mod json;
pub mod svg;
pub mod tabular;
pub mod yaml;

/// A key of a map. Machines have numbers, which YAML distinguishes from text.
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

/// A document of YAML or JSON. Maps are written in the given order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doc {
    Map(Vec<(Key, Self)>),
    List(Vec<Self>),
    Text(String),
    Int(u64),
    Bool(bool),
    Null,
}
