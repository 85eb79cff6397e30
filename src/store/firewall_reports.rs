//! The znodes of firewall reports and their change logs: one of each per machine, kept by the
//! controller or by the machine itself. The contents are bytes here; the firewall writes and reads
//! them.

use std::collections::BTreeSet;

use super::acl::{Acl, Roles};
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::tree::{Answer, Error, Node, Read, Tree, Write};
use super::update::ensure;
use crate::model::MachineId;

/// Limits of one fenced write.
const WRITES_AT_ONCE: usize = 200;
const BYTES_AT_ONCE: usize = 500_000;

/// Where reports are kept, and with which rights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReportLocation {
    /// Below the controller's znode.
    Controller(Roles),
    /// Below the machine that they are about.
    Machine(Acl),
}

/// A change of one znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Unchanged,
    /// Without a version, the znode is created.
    Put(Vec<u8>, Option<i32>),
    /// Deletes it at this version.
    Delete(i32),
}

/// The change of one machine's report and log. Never split over two writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    pub machine: MachineId,
    pub report: Content,
    pub log: Content,
}

/// The machines that the controller has reports of. Those that are not in the tree were terminated.
pub async fn reported_on<T: Tree>(tree: &T) -> Result<BTreeSet<MachineId>, Error> {
    let list = Read::Children(paths::firewall_reports());
    let names = tree.read_many(vec![list]).await?.into_iter().find_map(Answer::into_children);
    Ok(names.unwrap_or_default().iter().filter_map(|name| MachineId::from_key(name).ok()).collect())
}

/// The change logs of these machines, with their znodes; or why a log may not be read.
pub async fn logs<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<Vec<(MachineId, NodePath, Result<Option<Node>, String>)>, Error> {
    let of = |&id: &MachineId| [(id, paths::firewall_log(id)), (id, paths::machine_firewall_log(id))];
    let logs: Vec<_> = machines.iter().flat_map(of).collect();
    let nodes = tree.data_of_each(logs.iter().map(|(_, path)| path.clone()).collect()).await?;
    Ok(logs.into_iter().zip(nodes).map(|((id, path), node)| (id, path, node)).collect())
}

impl ReportLocation {
    pub fn report_path(&self, machine: MachineId) -> NodePath {
        match self {
            Self::Controller(_) => paths::firewall_report(machine),
            Self::Machine(_) => paths::machine_firewall(machine),
        }
    }

    pub fn log_path(&self, machine: MachineId) -> NodePath {
        match self {
            Self::Controller(_) => paths::firewall_log(machine),
            Self::Machine(_) => paths::machine_firewall_log(machine),
        }
    }

    fn acl(&self) -> Acl {
        match self {
            Self::Controller(roles) => roles.controllers(),
            Self::Machine(acl) => acl.clone(),
        }
    }

    /// Creates the container of the controller's reports.
    pub async fn prepare<T: Tree>(&self, tree: &T) -> Result<(), Error> {
        match self {
            Self::Controller(roles) => ensure(tree, &paths::firewall_reports(), &roles.controllers()).await,
            Self::Machine(_) => Ok(()),
        }
    }

    /// The machines that the controller has reports of.
    pub async fn listed<T: Tree>(&self, tree: &T) -> Result<BTreeSet<MachineId>, Error> {
        match self {
            Self::Controller(_) => reported_on(tree).await,
            Self::Machine(_) => Ok(BTreeSet::new()),
        }
    }

    /// The reports of some machines, in order.
    pub async fn reports<T: Tree>(
        &self,
        tree: &T,
        machines: impl IntoIterator<Item = MachineId>,
    ) -> Result<Vec<(MachineId, Option<Node>)>, Error> {
        read(tree, machines, |machine| self.report_path(machine)).await
    }

    /// The change logs of some machines, in order.
    pub async fn logs<T: Tree>(
        &self,
        tree: &T,
        machines: impl IntoIterator<Item = MachineId>,
    ) -> Result<Vec<(MachineId, Option<Node>)>, Error> {
        read(tree, machines, |machine| self.log_path(machine)).await
    }

    /// Applies updates while `lease` is held, several machines in one request.
    ///
    /// # Errors
    /// The failures of the store; some requests may have been applied.
    pub async fn write<T: Tree>(&self, tree: &T, lease: &Lease, updates: Vec<Update>) -> Result<(), Error> {
        for batch in batches(updates.into_iter().map(|update| self.steps(update)).collect()) {
            let mut fenced = vec![lease.fence()];
            fenced.extend(batch);
            tree.write(fenced).await?;
        }
        Ok(())
    }

    /// The log is a child of the report: created after it, deleted before it.
    fn steps(&self, Update { machine, report, log }: Update) -> Vec<Write> {
        let delete = matches!(report, Content::Delete(_));
        let report = self.step(self.report_path(machine), report);
        let log = self.step(self.log_path(machine), log);
        let (first, second) = if delete { (log, report) } else { (report, log) };
        first.into_iter().chain(second).collect()
    }

    fn step(&self, path: NodePath, content: Content) -> Option<Write> {
        match content {
            Content::Unchanged => None,
            Content::Put(data, Some(version)) => Some(Write::SetIfVersion { path, data, version }),
            Content::Put(data, None) => Some(Write::create(path, data, self.acl())),
            Content::Delete(version) => Some(Write::DeleteIfVersion { path, version }),
        }
    }
}

async fn read<T: Tree>(
    tree: &T,
    machines: impl IntoIterator<Item = MachineId>,
    path: impl Fn(MachineId) -> NodePath,
) -> Result<Vec<(MachineId, Option<Node>)>, Error> {
    let machines: Vec<MachineId> = machines.into_iter().collect();
    let reads = machines.iter().map(|machine| Read::Data(path(*machine))).collect();
    let nodes = tree.read_many(reads).await?.into_iter().map(Answer::into_data);
    Ok(machines.into_iter().zip(nodes).collect())
}

/// Joins the steps of several machines to requests that are neither too long nor too large.
fn batches(steps: Vec<Vec<Write>>) -> Vec<Vec<Write>> {
    let size = |step: &[Write]| -> usize {
        step.iter()
            .map(|write| match write {
                Write::Create { data, .. } | Write::SetIfVersion { data, .. } => data.len() + 400,
                Write::DeleteIfVersion { .. } | Write::Delete { .. } | Write::Check { .. } => 200,
            })
            .sum()
    };
    let mut batches: Vec<Vec<Write>> = Vec::new();
    let mut room = 0;
    for step in steps.into_iter().filter(|step| !step.is_empty()) {
        let bytes = size(&step);
        match batches.last_mut() {
            Some(last) if bytes <= room && last.len() + step.len() <= WRITES_AT_ONCE => last.extend(step),
            _ => {
                batches.push(step);
                room = BYTES_AT_ONCE;
            }
        }
        room = room.saturating_sub(bytes);
    }
    batches
}
