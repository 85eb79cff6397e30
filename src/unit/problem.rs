//! What keeps a machine from looking after its units, said where the operator sees it: the log of a machine is a long way off.

use tracing::warn;

use super::site::Site;
use crate::store::paths;
use crate::store::records::machine_problem_to_bytes;
use crate::store::tree::{self, Tree, Write};

/// Says it, or that there is nothing to say; what was said already is not said again. Says whether it is told: a store that
/// is away is to be told the next time.
pub async fn tell<T: Tree>(tree: &T, site: &Site, problem: Option<&str>) -> bool {
    match told(tree, site, machine_problem_to_bytes(problem)).await {
        // The machine is gone, and so is whoever would be told.
        Ok(()) | Err(tree::Error::NoNode(_)) => true,
        Err(error) => {
            warn!(%error, "what is wrong with the units could not be told");
            false
        }
    }
}

async fn told<T: Tree>(tree: &T, site: &Site, data: Vec<u8>) -> Result<(), tree::Error> {
    let path = paths::machine_problem(site.machine);
    let write = match tree.get(&path).await {
        Ok(node) if node.data == data => return Ok(()),
        Ok(node) => Write::SetIfVersion { path, data, version: node.version },
        Err(tree::Error::NoNode(_)) if data.is_empty() => return Ok(()),
        Err(tree::Error::NoNode(_)) => Write::create(path, data, site.roles.machine_problem(&site.identity)),
        Err(error) => return Err(error),
    };
    tree.write(vec![write]).await
}
