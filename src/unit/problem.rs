//! What keeps a machine from looking after its units, said where the operator sees it: the log of a machine is a long way off.

use std::collections::BTreeMap;

use tracing::warn;

use super::site::Site;
use crate::model::UnitId;
use crate::store::paths;
use crate::store::records::machine_problem_to_bytes;
use crate::store::tree::{self, Tree, Write};

/// Units that were removed and are not cleared away, and why.
pub(super) type HeldUp = BTreeMap<UnitId, String>;

/// Of so many units it is said one by one.
const NAMED: usize = 3;

/// All problems in one line. `behind` is the reason why no unit is removed, if the store was
/// restored.
pub(super) fn words(ground: Option<&str>, behind: Option<&str>, held_up: &HeldUp) -> Option<String> {
    let unit =
        |(id, why): (&UnitId, &String)| format!("{} was removed and is not cleared away: {why}", id.key());
    let mut all: Vec<String> = ground.map(str::to_owned).into_iter().collect();
    all.extend(behind.map(|why| format!("units are not removed: {why}")));
    all.extend(held_up.iter().take(NAMED).map(unit));
    if let Some(more @ 1..) = held_up.len().checked_sub(NAMED) {
        all.push(format!("and {more} more units"));
    }
    (!all.is_empty()).then(|| all.join("; "))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_are_named_and_the_rest_counted() {
        assert_eq!(words(None, None, &HeldUp::new()), None);
        assert_eq!(words(Some("no room"), None, &HeldUp::new()).as_deref(), Some("no room"));
        let held_up = |count| (0..count).map(|n| (UnitId::new(n), "busy".to_owned())).collect();
        let one = words(Some("no room"), None, &held_up(1)).unwrap();
        assert_eq!(one, "no room; unit-0000000000 was removed and is not cleared away: busy");
        let behind = words(Some("no room"), Some("older"), &held_up(0)).unwrap();
        assert_eq!(behind, "no room; units are not removed: older");
        let many = words(None, None, &held_up(5)).unwrap();
        assert!(many.matches("busy").count() == 3 && many.ends_with("; and 2 more units"), "{many}");
        assert!(!words(None, None, &held_up(3)).unwrap().contains("more units"));
    }
}
