//! The controller's reports in the tree: read at the start, written when they change, removed with
//! their machines. The controller decides about the contents; `report.rs` defines the format.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tracing::warn;

use super::change_log::{ChangeLog, Entry};
use super::plan::LastGranted;
use super::report::Report;
use crate::model::MachineId;
use crate::mutant;
use crate::store::acl::{Acl, Roles};
use crate::store::firewall_reports::{Content, ReportLocation, Update};
use crate::store::lease::Lease;
use crate::store::tree::{self, Tree};

/// The maximum number of change log entries per machine that wait to be written.
const MAX_UNWRITTEN: usize = 20;

/// All reports in the tree, with their versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportStore {
    place: ReportLocation,
    known: BTreeMap<MachineId, (Report, i32)>,
    /// Machines that were removed while there was no leader: the next write removes their reports.
    orphans: BTreeSet<MachineId>,
    /// Machines whose reports are unreadable and count as empty: they are written again even if
    /// unchanged.
    unreadable: BTreeSet<MachineId>,
    /// Journal entries that could not be written yet, the oldest first.
    unwritten: BTreeMap<MachineId, VecDeque<Entry>>,
}

impl ReportStore {
    /// For the controller of the environment.
    pub fn new(roles: Roles) -> Self {
        Self {
            place: ReportLocation::Controller(roles),
            known: BTreeMap::new(),
            orphans: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            unwritten: BTreeMap::new(),
        }
    }

    /// For a machine that manages its own firewall.
    pub fn for_machine(acl: Acl) -> Self {
        Self {
            place: ReportLocation::Machine(acl),
            known: BTreeMap::new(),
            orphans: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            unwritten: BTreeMap::new(),
        }
    }

    pub fn get(&self, machine: MachineId) -> Option<&Report> {
        self.known.get(&machine).map(|(report, _)| report)
    }

    pub fn len(&self) -> usize {
        self.known.len()
    }

    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The number of machines with pending rules or a problem.
    pub fn pending(&self) -> usize {
        self.known.values().filter(|(report, _)| report.is_pending()).count()
    }

    /// The rules of each unit of the machine when it was last readable.
    pub fn granted(&self, machine: MachineId) -> LastGranted {
        self.get(machine).map(|report| report.granted.clone()).unwrap_or_default()
    }

    /// The last notes of provisioning about machines.
    pub fn notes(&self) -> BTreeMap<MachineId, String> {
        self.known.iter().filter_map(|(id, (report, _))| Some((*id, report.note.clone()?))).collect()
    }

    /// The last report, with the reason why it cannot be updated.
    pub fn keep(&self, machine: MachineId, problem: String) -> Report {
        Report { problem: Some(problem), ..self.get(machine).cloned().unwrap_or_default() }
    }

    /// Drops all reports and reads those of `machines`.
    ///
    /// # Errors
    /// Failures of the store.
    pub async fn read<T: Tree>(
        &mut self,
        tree: &T,
        machines: impl Iterator<Item = MachineId>,
    ) -> Result<(), tree::Error> {
        let mut ids: Vec<MachineId> = machines.collect();
        self.orphans = self.place.listed(tree).await?;
        ids.iter().for_each(|id| _ = self.orphans.remove(id));
        let none = ids.is_empty();
        ids.extend(&self.orphans);
        // A view without machines is more likely incomplete than an environment without machines.
        if none {
            self.orphans.clear();
        }
        self.known.clear();
        self.unreadable.clear();
        for (id, node) in self.place.reports(tree, ids).await? {
            let Some(node) = node else { continue };
            match Report::parse(&node.data) {
                Ok(report) => drop(self.known.insert(id, (report, node.version))),
                // Without the report, unreadable units keep all rules that exist.
                Err(err) => {
                    warn!(path = %self.place.report_path(id), %err, "invalid report ignored");
                    self.known.insert(id, (Report::default(), node.version));
                    self.unreadable.insert(id);
                }
            }
        }
        Ok(())
    }

    /// Writes changed `reports` and new change log entries, both in one transaction per machine,
    /// and removes the reports of machines that are `gone`.
    ///
    /// # Errors
    /// Failures of the store. The cached reports may then differ from the tree and must be read
    /// again.
    pub async fn write<T: Tree>(
        &mut self,
        tree: &T,
        reports: BTreeMap<MachineId, Report>,
        done: BTreeMap<MachineId, Entry>,
        gone: &BTreeSet<MachineId>,
        lease: &Lease,
    ) -> Result<(), tree::Error> {
        if mutant!(ReportsNotWritten) {
            return Ok(());
        }
        let mut gone = gone | &std::mem::take(&mut self.orphans);
        gone.retain(|machine| !reports.contains_key(machine));
        for (machine, entry) in done {
            let unwritten = self.unwritten.entry(machine).or_default();
            unwritten.push_back(entry);
            unwritten.drain(..unwritten.len().saturating_sub(MAX_UNWRITTEN));
        }
        self.unwritten.retain(|machine, _| !gone.contains(machine));
        let mut logs = self.log_updates(tree, &gone).await?;
        let mut updates = Vec::new();
        for (machine, report) in reports {
            let report = report.bounded();
            let unreadable = self.unreadable.remove(&machine) && !mutant!(InvalidReportNotReplaced);
            let content = match self.known.get(&machine) {
                Some((old, _)) if *old == report && !unreadable && !mutant!(UnchangedReportsWritten) => {
                    Content::Unchanged
                }
                Some((_, version)) => {
                    let version = *version;
                    self.known.insert(machine, (report.clone(), version + 1));
                    Content::Put(report.to_bytes(), Some(version))
                }
                None => {
                    self.known.insert(machine, (report.clone(), 0));
                    Content::Put(report.to_bytes(), None)
                }
            };
            let log = logs.remove(&machine).unwrap_or(Content::Unchanged);
            updates.push(Update { machine, report: content, log });
        }
        for machine in &gone {
            if let Some((_, version)) =
                self.known.remove(machine).filter(|_| !mutant!(ReportsOfRemovedMachinesKept))
            {
                let log = logs.remove(machine).unwrap_or(Content::Unchanged);
                updates.push(Update { machine: *machine, report: Content::Delete(version), log });
            }
        }
        let alone = |(machine, log)| Update { machine, report: Content::Unchanged, log };
        updates.extend(logs.into_iter().map(alone));
        self.place.write(tree, lease, updates).await?;
        self.unwritten.clear();
        Ok(())
    }

    /// Appends new entries to each machine's change log, and removes the change logs of removed
    /// machines.
    async fn log_updates<T: Tree>(
        &self,
        tree: &T,
        gone: &BTreeSet<MachineId>,
    ) -> Result<BTreeMap<MachineId, Content>, tree::Error> {
        let known_gone = gone.iter().filter(|id| self.known.contains_key(id));
        let ids: BTreeSet<MachineId> = self.unwritten.keys().chain(known_gone).copied().collect();
        let mut updates = BTreeMap::new();
        for (id, node) in self.place.logs(tree, ids).await? {
            let Some(entries) = self.unwritten.get(&id) else {
                if let Some(node) = node {
                    updates.insert(id, Content::Delete(node.version));
                }
                continue;
            };
            let mut change_log = match node.as_ref().map(|node| ChangeLog::parse(&node.data)) {
                None => ChangeLog::default(),
                Some(Ok(change_log)) => change_log,
                Some(Err(err)) => {
                    warn!(path = %self.place.log_path(id), %err, "invalid change log replaced");
                    ChangeLog::default()
                }
            };
            let mut is_new = false;
            entries.iter().for_each(|entry| is_new |= change_log.push(entry.clone()));
            if is_new {
                let version = node.map(|node| node.version);
                updates.insert(id, Content::Put(change_log.to_bytes(), version));
            }
        }
        Ok(updates)
    }

    /// Drops unwritten change log entries: after a change of leader they would be out of order.
    pub fn drop_unwritten(&mut self) {
        self.unwritten.clear();
    }

    /// Creates the container of the reports if it is missing.
    ///
    /// # Errors
    /// Failures of the store.
    pub async fn prepare<T: Tree>(&self, tree: &T) -> Result<(), tree::Error> {
        self.place.prepare(tree).await
    }
}
