//! The manager of an environment: it leads while it holds the fleet's lease. The leader publishes
//! its addresses, has the machines of the tree as its nodes, and stores their state for `juju
//! status`. The pure `report` decides the content of the stored state.

pub mod report;

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

use self::report::{node_records, node_rules};
use crate::fleet::manager::report::FailedUnits;
use crate::fleet::manager::{Leadership, Manager, NodeRules};
use crate::model::OperatorName;
use crate::runtime::reconcile::{Due, Ended, Leased, Passed, Reconciler, Schedule};
use crate::runtime::reconcile::{run_leased, run_passes};
use crate::runtime::service::stopped;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::Watched;
use crate::store::dependencies::dependencies;
use crate::store::fleet::{self, NodeRecords};
use crate::store::lease::{LEASE, Lease, LeaseKey};
use crate::store::operators::operator_names;
use crate::store::tree::{self, Feed as _, Tree};

/// The leader reads everything again after this time, because events get lost.
const RESYNC: Duration = Duration::from_secs(30);

/// A standby reads the address of the leader again after this time.
const READ_AGAIN: Duration = Duration::from_secs(30);

/// A manager, and the store of its environment.
#[derive(Debug)]
pub struct EnvironmentManager<T> {
    tree: T,
    roles: Roles,
    manager: Manager,
    /// The addresses at which agents and operators reach this manager.
    addresses: Vec<String>,
    /// Identifies this process as a candidate for the lease.
    token: String,
}

impl<T: Tree> EnvironmentManager<T> {
    /// # Errors
    /// If the system provides no random numbers.
    pub fn new(tree: T, roles: Roles, manager: Manager, addresses: Vec<String>) -> Result<Self, Error> {
        Ok(Self { tree, roles, manager, addresses, token: Lease::token()? })
    }

    /// Leads, or waits for the lease, until `stop` is set. Then every job ends with `cancelled`.
    ///
    /// # Errors
    /// Failures that do not pass, for example wrong credentials.
    pub async fn run(&mut self, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        let ended = run_leased(self, &mut stop).await;
        self.manager.stop();
        ended
    }

    /// Keeps the address of the leader, for the errors of this standby. Runs until it is dropped.
    async fn follow_leader(&self) -> Error {
        let follow = async {
            let mut feed = Watched::ManagerAddress.feed(&self.tree).await?;
            loop {
                // A list that cannot be read names no leader.
                let leader = match fleet::addresses(&self.tree).await {
                    Ok(list) => list.into_iter().next(),
                    Err(error) if error.is_transient() => return Err(error),
                    Err(_) => None,
                };
                self.manager.set_leadership(Leadership::Standby { leader });
                if let Ok(event) = timeout(READ_AGAIN, feed.next()).await {
                    event?;
                }
            }
        };
        let Err::<std::convert::Infallible, Error>(error) = follow.await;
        error
    }
}

impl<T: Tree> Leased for EnvironmentManager<T> {
    type Lease = Lease;
    type Error = Error;

    async fn acquire(&mut self, stop: &mut watch::Receiver<bool>) -> Result<Option<Lease>, Error> {
        fleet::prepare(&self.tree, &self.roles).await?;
        let (key, acl) = (LeaseKey::fleet(), self.roles.controllers());
        tokio::select! {
            lease = Lease::acquire(&self.tree, &key, &acl, &self.token) => lease.map(Some),
            error = self.follow_leader() => Err(error),
            () = stopped(stop) => Ok(None),
        }
    }

    async fn hold(&mut self, lease: Lease, stop: &mut watch::Receiver<bool>) -> Result<Ended, Error> {
        info!(addresses = ?self.addresses, "manager leads");
        // Nodes that are offline keep the time at which an earlier leader saw them last.
        let before = fleet::nodes(&self.tree).await?.unwrap_or_default();
        let rules = NodeRules::new();
        let failed = watch::Sender::new(FailedUnits::new());
        let mut leading = Leading {
            machines: Watched::Machines.feed(&self.tree).await?,
            operators: Watched::Operators.feed(&self.tree).await?,
            dependencies: Watched::Dependencies.feed(&self.tree).await?,
            changes: self.manager.changes(),
            failed: failed.subscribe(),
            of: self,
            lease: lease.clone(),
            rules,
            before,
        };
        // Agents may register only after the nodes are known, and only while the lease is held.
        match timeout_at(lease.may_act_until(), leading.read_nodes()).await {
            Ok(read) => read?,
            Err(_) => return Ok(Ended::Replaced),
        }
        self.manager.set_leadership(Leadership::Leading);
        let schedule = Schedule::new(Instant::now(), RESYNC, LEASE / 3);
        let ended = tokio::select! {
            ended = run_passes(&mut leading, schedule, stop) => ended,
            () = self.manager.follow_failed_units(&failed) => Ok(Ended::Replaced),
        };
        if matches!(ended, Ok(Ended::Stopped)) {
            self.manager.stop();
            leading.lease.release(&self.tree).await;
        }
        ended
    }

    fn released(&mut self) {
        self.manager.set_leadership(Leadership::Standby { leader: None });
    }

    fn store_lost(&mut self) {}

    fn is_transient(error: &Error) -> bool {
        error.is_transient()
    }
}

/// The state of a leader.
struct Leading<'a, T: Tree> {
    of: &'a EnvironmentManager<T>,
    lease: Lease,
    machines: T::Feed,
    operators: T::Feed,
    dependencies: T::Feed,
    changes: watch::Receiver<u64>,
    failed: watch::Receiver<FailedUnits>,
    /// The nodes as they were read last.
    rules: NodeRules,
    /// The state that was stored last.
    before: NodeRecords,
}

impl<T: Tree> Leading<'_, T> {
    /// Reads the machines and the operators.
    async fn read_nodes(&mut self) -> Result<(), Error> {
        let EnvironmentManager { tree, manager, .. } = self.of;
        let dependencies = dependencies(tree).await?;
        if let Err(problem) = &dependencies {
            warn!(problem, "the permitted dependencies cannot be read");
        }
        let names = fleet::node_names(tree).await?;
        let (rules, unreadable) = node_rules(&names, dependencies.as_ref().ok(), &self.rules);
        for (machine, problem) in unreadable {
            warn!(%machine, problem, "the name of a node cannot be read");
        }
        if rules != self.rules {
            manager.set_nodes(rules.clone());
            self.rules = rules;
        }
        let operators: BTreeSet<OperatorName> = operator_names(tree).await?.into_iter().collect();
        manager.set_operators(operators);
        Ok(())
    }

    async fn write_records(&mut self) -> Result<(), Error> {
        let EnvironmentManager { tree, roles, manager, .. } = self.of;
        let records = node_records(&self.rules, &manager.reports(), &self.failed.borrow(), &self.before);
        if records != self.before {
            fleet::write_nodes(tree, roles, &self.lease, &records).await?;
            self.before = records;
        }
        Ok(())
    }
}

impl<T: Tree> Reconciler for Leading<'_, T> {
    type Error = Error;

    async fn changed(&mut self) -> Result<(), Error> {
        tokio::select! {
            event = self.machines.next() => drop(event?),
            event = self.operators.next() => drop(event?),
            event = self.dependencies.next() => drop(event?),
            // The senders live as long as this leader.
            _ = self.changes.changed() => {}
            _ = self.failed.changed() => {}
        }
        Ok(())
    }

    fn retry_at(&self) -> Option<Instant> {
        None
    }

    /// Another manager may lead after the deadline, so without an answer this one leads no more.
    async fn confirm(&mut self) -> Result<bool, Error> {
        let deadline = self.lease.may_act_until();
        match timeout_at(deadline, self.lease.confirm(&self.of.tree)).await {
            Ok(confirmed) => confirmed,
            Err(_) => Ok(false),
        }
    }

    async fn pass(&mut self, due: Due) -> Result<Passed, Error> {
        let everything = due == Due::Everything;
        let deadline = self.lease.may_act_until();
        let work = async {
            fleet::write_addresses(&self.of.tree, &self.lease, &self.of.addresses).await?;
            self.read_nodes().await?;
            self.write_records().await
        };
        match timeout_at(deadline, work).await {
            Ok(Ok(())) => Ok(Passed::Looked { everything, unconfirmed: false }),
            Ok(Err(Error::Tree(error))) if self.lease.was_replaced(&error) => Ok(Passed::Replaced),
            Ok(Err(Error::Tree(tree::Error::BadVersion(_) | tree::Error::NodeExists(_)))) => {
                Ok(Passed::Conflict)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(Passed::Replaced),
        }
    }
}

#[cfg(test)]
#[path = "environment_tests.rs"]
mod tests;
