//! Taking whole subtrees out: everything below some nodes, deepest first, each at the version that was read, so that
//! what appears or changes meanwhile makes the removal fail as a whole.

use super::error::Error;
use super::paths::NodePath;
use super::records::corrupt;
use super::tree::{Read, Tree, Write};

/// Nothing of ours is deeper; a deeper tree is not ours to take out.
const MAX_DEPTH: usize = 6;

/// Reads what is below `roots`, level by level, and returns the writes that delete it. Absent roots are passed over.
pub(super) async fn deletions<T: Tree>(tree: &T, roots: Vec<NodePath>) -> Result<Vec<Write>, Error> {
    let mut levels: Vec<Vec<Write>> = Vec::new();
    let mut level = roots;
    while !level.is_empty() {
        if levels.len() == MAX_DEPTH {
            return Err(corrupt(&level[0], "deeper than anything that belongs here".to_owned()));
        }
        let reads = level.iter().flat_map(|path| [Read::Data(path.clone()), Read::Children(path.clone())]);
        let mut answers = tree.read_many(reads.collect()).await?.into_iter();
        let mut deletes = Vec::with_capacity(level.len());
        let mut below = Vec::new();
        for path in level {
            let node = answers.next().and_then(|answer| answer.into_data());
            let names = answers.next().and_then(|answer| answer.into_children());
            let (Some(node), Some(names)) = (node, names) else { continue };
            below.extend(names.iter().map(|name| path.child(name)));
            deletes.push(Write::DeleteIfVersion { path, version: node.version });
        }
        levels.push(deletes);
        level = below;
    }
    Ok(levels.into_iter().rev().flatten().collect())
}
