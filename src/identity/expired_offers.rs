//! Deletes the offers of tokens that have expired. A joining host compares the time of expiry with
//! its own clock, which may be wrong. The key of the authority is not needed.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{info, warn};

use crate::store::joining::delete_expired_offers;
use crate::store::list_machines;
use crate::store::tree::{self, Tree};

/// Time between two deletions.
const PERIOD: Duration = Duration::from_secs(600);

/// Machines whose offers are read at once.
const BATCH: usize = 256;

/// Deletes the offers to all machines that have expired at `now_ms`, and returns their number.
///
/// # Errors
/// The failures of the store.
pub async fn delete_all<T: Tree>(tree: &T, now_ms: u64) -> Result<usize, tree::Error> {
    let machines: Vec<_> = list_machines(tree).await?.into_iter().collect();
    let mut deleted = 0;
    for machines in machines.chunks(BATCH) {
        deleted += delete_expired_offers(tree, machines, now_ms).await?;
    }
    Ok(deleted)
}

/// Deletes expired offers at once and in every period. `clock` returns the time in milliseconds
/// since 1970.
pub async fn keep_deleting<T: Tree>(tree: &T, clock: fn() -> u64) -> Infallible {
    loop {
        match delete_all(tree, clock()).await {
            Ok(0) => {}
            Ok(deleted) => info!(deleted, "expired tokens for machines deleted"),
            Err(error) => warn!(%error, "expired tokens for machines cannot be deleted"),
        }
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::identity::issuer::tests::{NOW, World};
    use crate::store::joining::OfferKind;
    use crate::store::paths;

    #[tokio::test(start_paused = true)]
    async fn expired_offers_are_deleted_in_every_period() {
        static CLOCK: AtomicU64 = AtomicU64::new(NOW);
        let world = World::new().await;
        let (early, late) = (world.machine().await.0.id, world.machine().await.0.id);
        world.operator.offer_join(early, NOW + 1_000).await.unwrap();
        world.operator.offer_join(late, NOW + 10_000).await.unwrap();
        let exists = async |id| {
            let path = paths::machine_offer(id, OfferKind::Operator);
            world.operator.tree().exists(&path).await.unwrap()
        };
        let checking = async {
            sleep(2 * PERIOD).await;
            assert!(exists(early).await && exists(late).await);
            CLOCK.fetch_add(1_000, Ordering::SeqCst);
            sleep(2 * PERIOD).await;
            assert_eq!((exists(early).await, exists(late).await), (false, true));
        };
        tokio::select! {
            never = keep_deleting(&world.controller, || CLOCK.load(Ordering::SeqCst)) => match never {},
            () = checking => {}
        }
    }
}
