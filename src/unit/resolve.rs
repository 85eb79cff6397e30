//! An operator's decision about a hook that failed: written into the unit's state, where its agent finds it.

use serde_json::Value;

use super::workflow::{Failure, Resolution, State};
use crate::store::paths::NodePath;
use crate::store::stopping::LABEL;
use crate::store::tree::{self, Tree, Write};

/// The agent and the operator hardly ever write at the same time.
const MAX_ATTEMPTS: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the unit has no hook that failed: it is {0}")]
    NothingFailed(String),
    #[error("{0}")]
    Corrupt(String),
    #[error("the unit changes all the time")]
    Contended,
    #[error(transparent)]
    Tree(#[from] tree::Error),
}

/// Decides about the failure in the state at `path`, and returns it. Doing it twice does no harm: it is about the failure
/// that there is now.
///
/// # Errors
/// See [`Error`].
pub async fn resolve<T: Tree>(tree: &T, path: &NodePath, resolution: Resolution) -> Result<Failure, Error> {
    for _ in 0..MAX_ATTEMPTS {
        let node = match tree.get(path).await {
            Ok(node) => node,
            Err(tree::Error::NoNode(_)) => return Err(Error::NothingFailed("pending".to_owned())),
            Err(error) => return Err(error.into()),
        };
        let state =
            State::parse(&node.data).map_err(|problem| Error::Corrupt(format!("{path}: {problem}")))?;
        // It is an object, or there would be no state; what else is in it is kept.
        let mut value: Value = serde_json::from_slice(&node.data).unwrap_or_default();
        let Some(failure) = state.failure.clone() else {
            // As status has it, where it is there: of a unit that was removed that is not how far it is.
            let shown = value.get(LABEL).and_then(Value::as_str);
            return Err(Error::NothingFailed(shown.map_or_else(|| state.label(), str::to_owned)));
        };
        value["resolved"] = resolution.name().into();
        let data = value.to_string().into_bytes();
        let write = Write::SetIfVersion { path: path.clone(), data, version: node.version };
        match tree.write(vec![write]).await {
            Ok(()) => return Ok(failure),
            Err(tree::Error::BadVersion(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Contended)
}
