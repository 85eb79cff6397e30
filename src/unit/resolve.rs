//! The operator's decision about a failed hook: written into the unit's state, where its agent
//! reads it.

use serde_json::Value;

use super::workflow::{Failure, Resolution, State};
use crate::store;
use crate::store::failed_stops::LABEL;
use crate::store::paths::NodePath;
use crate::store::tree::{self, Tree};
use crate::store::update::Change;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the unit has no hook that failed: it is {0}")]
    NothingFailed(String),
    #[error("{0}")]
    Corrupt(String),
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Records a decision about the failure in the state at `path`, and returns the failure. Safe to
/// repeat: it applies to the current failure.
///
/// # Errors
/// See [`Error`].
pub async fn resolve<T: Tree>(tree: &T, path: &NodePath, resolution: Resolution) -> Result<Failure, Error> {
    let resolved = store::update(tree, path, |node| {
        let state =
            State::parse(&node.data).map_err(|problem| Error::Corrupt(format!("{path}: {problem}")))?;
        // A state is always an object; unknown keys are kept.
        let mut value: Value = serde_json::from_slice(&node.data).unwrap_or_default();
        let Some(failure) = state.failure.clone() else {
            // The label as status shows it, if there is one: the label of a removed unit is not its
            // workflow state.
            let shown = value.get(LABEL).and_then(Value::as_str);
            return Err(Error::NothingFailed(shown.map_or_else(|| state.label(), str::to_owned)));
        };
        value["resolved"] = resolution.name().into();
        Ok(Change::Set(value.to_string().into_bytes(), failure))
    });
    match resolved.await {
        Err(Error::Store(store::Error::Tree(tree::Error::NoNode(_)))) => {
            Err(Error::NothingFailed("pending".to_owned()))
        }
        done => done,
    }
}
