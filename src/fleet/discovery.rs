//! Follows the addresses of the leading manager in the store, for the agent of a machine.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::address::ManagerAddress;
use crate::store::Error;
use crate::store::changes::Watched;
use crate::store::fleet::addresses;
use crate::store::tree::{Feed as _, Tree};

/// An agent reads the addresses again after this time, because events get lost.
const READ_AGAIN: Duration = Duration::from_secs(30);

/// Pause after a failure of the store.
const PAUSE: Duration = Duration::from_secs(2);

/// Reads the addresses of the leading manager, and sends them to `found`. Runs until it is dropped.
pub async fn follow_manager<T: Tree>(tree: T, found: watch::Sender<Vec<ManagerAddress>>) {
    loop {
        if let Err(problem) = follow_once(&tree, &found).await {
            warn!(%problem, "the addresses of the manager cannot be read");
        }
        sleep(PAUSE).await;
    }
}

async fn follow_once<T: Tree>(tree: &T, found: &watch::Sender<Vec<ManagerAddress>>) -> Result<(), Error> {
    let mut feed = Watched::ManagerAddress.feed(tree).await?;
    loop {
        let list = parse(&addresses(tree).await?);
        // Without a list the previous one stays in use: the manager may still be there.
        if !list.is_empty() && list != *found.borrow() {
            info!(addresses = ?list.iter().map(ToString::to_string).collect::<Vec<_>>(), "manager changed");
            found.send_replace(list);
        }
        if let Ok(event) = timeout(READ_AGAIN, feed.next()).await {
            event?;
        }
    }
}

/// Returns the valid addresses of a list.
pub fn parse(list: &[String]) -> Vec<ManagerAddress> {
    list.iter().filter_map(|text| text.parse().ok()).collect()
}
