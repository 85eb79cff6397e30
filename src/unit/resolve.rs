//! An operator's decision about a hook that failed: written into the unit's state, where its agent finds it.

use super::workflow::{Failure, Resolution, State};
use crate::model::UnitId;
use crate::store::paths;
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

/// Returns what was resolved. Doing it twice does no harm: it is about the failure that there is now.
///
/// # Errors
/// See [`Error`].
pub async fn resolve<T: Tree>(tree: &T, id: UnitId, resolution: Resolution) -> Result<Failure, Error> {
    let path = paths::unit_state(id);
    for _ in 0..MAX_ATTEMPTS {
        let node = match tree.get(&path).await {
            Ok(node) => node,
            Err(tree::Error::NoNode(_)) => return Err(Error::NothingFailed("pending".to_owned())),
            Err(error) => return Err(error.into()),
        };
        let state =
            State::parse(&node.data).map_err(|problem| Error::Corrupt(format!("{path}: {problem}")))?;
        let Some(failure) = state.failure.clone() else { return Err(Error::NothingFailed(state.label())) };
        let data = State { resolved: Some(resolution), ..state }.to_bytes();
        let write = Write::SetIfVersion { path: path.clone(), data, version: node.version };
        match tree.write(vec![write]).await {
            Ok(()) => return Ok(failure),
            Err(tree::Error::BadVersion(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Contended)
}
