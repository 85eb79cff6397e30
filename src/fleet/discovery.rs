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

/// The host of an agent. A manager on loopback is reached only from its own host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// The host of the manager, or of the store and therefore probably of the manager.
    Managers,
    Other,
}

/// Reads the addresses of the leading manager, and sends them to `found`. Runs until it is dropped.
pub async fn follow_manager<T: Tree>(tree: T, host: Host, found: watch::Sender<Vec<ManagerAddress>>) {
    loop {
        if let Err(problem) = follow_once(&tree, host, &found).await {
            warn!(%problem, "the addresses of the manager cannot be read");
        }
        sleep(PAUSE).await;
    }
}

async fn follow_once<T: Tree>(
    tree: &T,
    host: Host,
    found: &watch::Sender<Vec<ManagerAddress>>,
) -> Result<(), Error> {
    let mut feed = Watched::ManagerAddress.feed(tree).await?;
    loop {
        let mut list = parse(&addresses(tree).await?);
        list.retain(|address| host == Host::Managers || !address.is_local());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use crate::store::fleet::{prepare, write_addresses};
    use crate::store::lease::{Lease, LeaseKey};
    use crate::store::records::Placement;

    #[tokio::test(start_paused = true)]
    async fn another_host_does_not_use_an_address_on_loopback() {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let (tree, roles) = (store.connect(Some(&controller)), environment.info().roles.clone());
        prepare(&tree, &roles).await.unwrap();
        let key = LeaseKey::fleet();
        let lease = Lease::try_acquire(&tree, &key, &roles.controllers(), "a").await.unwrap().unwrap();
        let list = ["127.0.0.1:842", "not an address", "192.0.2.1:842"].map(str::to_owned);
        write_addresses(&tree, &lease, &list).await.unwrap();
        for (host, expected) in
            [(Host::Managers, &["127.0.0.1:842", "192.0.2.1:842"][..]), (Host::Other, &["192.0.2.1:842"])]
        {
            let (found, mut managers) = watch::channel(Vec::new());
            let reader = store.connect(None);
            tokio::select! {
                () = follow_manager(reader, host, found) => {}
                list = managers.wait_for(|list| !list.is_empty()) => {
                    let list: Vec<String> = list.unwrap().iter().map(ToString::to_string).collect();
                    assert_eq!(list, expected, "{host:?}");
                }
            }
        }
    }
}
