//! The agent's reports in the tree: read at the start, written when they say something new, removed with their machines.
//! What a report says is decided by the agent; what it looks like is in `report.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tracing::warn;

use super::journal::{Entry, Journal};
use super::plan::LastGranted;
use super::report::Report;
use crate::model::MachineId;
use crate::model::planted::{Bug, planted};
use crate::store::acl::{Acl, Roles};
use crate::store::election::Leadership;
use crate::store::paths::{self, NodePath};
use crate::store::tree::{self, Answer, Read, Tree, Write};

/// What one fenced write holds at most.
const WRITES_AT_ONCE: usize = 200;
const BYTES_AT_ONCE: usize = 500_000;

/// Entries of a machine's journal that wait for a store that takes them.
const MAX_UNTOLD: usize = 20;

/// Steps together that are neither too many nor too large for one request; no step is torn apart.
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
    for step in steps {
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

/// The machines that the controller has reports of. Those that are not in the tree are on their way out.
///
/// # Errors
/// The failures of the store.
pub async fn reported_on<T: Tree>(tree: &T) -> Result<BTreeSet<MachineId>, tree::Error> {
    let corner = Read::Children(paths::firewall_reports());
    let names = tree.read_many(vec![corner]).await?.into_iter().find_map(Answer::into_children);
    Ok(names.unwrap_or_default().iter().filter_map(|name| MachineId::from_key(name).ok()).collect())
}

/// All reports as the tree has them, with their versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reports {
    place: Place,
    known: BTreeMap<MachineId, (Report, i32)>,
    /// Of machines that went while nobody led: removed with the next write.
    orphans: BTreeSet<MachineId>,
    /// Known as empty because they cannot be read: written anew also if there is nothing to say.
    unreadable: BTreeSet<MachineId>,
    /// What was done and could not be written down yet; the oldest first.
    untold: BTreeMap<MachineId, VecDeque<Entry>>,
}

/// Where reports are, and with which rights.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// In the controller's corner.
    Controller(Roles),
    /// Below the machine that they are about.
    Machine(Acl),
}

impl Reports {
    /// For the controller's agent.
    pub fn new(roles: Roles) -> Self {
        Self {
            place: Place::Controller(roles),
            known: BTreeMap::new(),
            orphans: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            untold: BTreeMap::new(),
        }
    }

    /// For a machine that looks after itself.
    pub fn of_machine(acl: Acl) -> Self {
        Self {
            place: Place::Machine(acl),
            known: BTreeMap::new(),
            orphans: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            untold: BTreeMap::new(),
        }
    }

    fn path(&self, machine: MachineId) -> NodePath {
        match self.place {
            Place::Controller(_) => paths::firewall_report(machine),
            Place::Machine(_) => paths::machine_firewall(machine),
        }
    }

    fn log_path(&self, machine: MachineId) -> NodePath {
        match self.place {
            Place::Controller(_) => paths::firewall_log(machine),
            Place::Machine(_) => paths::machine_firewall_log(machine),
        }
    }

    fn acl(&self) -> Acl {
        match &self.place {
            Place::Controller(roles) => roles.controllers(),
            Place::Machine(acl) => acl.clone(),
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

    /// Machines that are not yet as they should be.
    pub fn pending(&self) -> usize {
        self.known.values().filter(|(report, _)| report.is_pending()).count()
    }

    /// What each unit of the machine had when it could last be read.
    pub fn granted(&self, machine: MachineId) -> LastGranted {
        self.get(machine).map(|report| report.granted.clone()).unwrap_or_default()
    }

    /// What was last said to be wrong with machines themselves.
    pub fn notes(&self) -> BTreeMap<MachineId, String> {
        self.known.iter().filter_map(|(id, (report, _))| Some((*id, report.note.clone()?))).collect()
    }

    /// The last report, with a reason why nothing newer can be said.
    pub fn keep(&self, machine: MachineId, problem: String) -> Report {
        Report { problem: Some(problem), ..self.get(machine).cloned().unwrap_or_default() }
    }

    /// The machines that the controller's corner has reports of.
    async fn listed<T: Tree>(&self, tree: &T) -> Result<BTreeSet<MachineId>, tree::Error> {
        match self.place {
            Place::Machine(_) => Ok(BTreeSet::new()),
            Place::Controller(_) => reported_on(tree).await,
        }
    }

    /// Forgets all and reads those of `machines`.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn read<T: Tree>(
        &mut self,
        tree: &T,
        machines: impl Iterator<Item = MachineId>,
    ) -> Result<(), tree::Error> {
        let mut ids: Vec<MachineId> = machines.collect();
        self.orphans = self.listed(tree).await?;
        ids.iter().for_each(|id| _ = self.orphans.remove(id));
        let none = ids.is_empty();
        ids.extend(&self.orphans);
        // No machine at all is more likely a view that lacks something than an environment that does.
        if none {
            self.orphans.clear();
        }
        let reads = ids.iter().map(|id| Read::Data(self.path(*id))).collect();
        self.known.clear();
        self.unreadable.clear();
        for (id, answer) in ids.into_iter().zip(tree.read_many(reads).await?) {
            let Some(node) = answer.into_data() else { continue };
            match Report::parse(&node.data) {
                Ok(report) => drop(self.known.insert(id, (report, node.version))),
                // Without the memory, units that cannot be read keep everything that is there.
                Err(err) => {
                    warn!(path = %self.path(id), %err, "report ignored");
                    self.known.insert(id, (Report::default(), node.version));
                    self.unreadable.insert(id);
                }
            }
        }
        Ok(())
    }

    /// Writes those of `reports` that say something new and what was done, both in one step a machine, and removes
    /// those of machines that are `gone`.
    ///
    /// # Errors
    /// The failures of the store. What is known is then ahead of the tree, and must be read again.
    pub async fn write<T: Tree>(
        &mut self,
        tree: &T,
        reports: BTreeMap<MachineId, Report>,
        done: BTreeMap<MachineId, Entry>,
        gone: &BTreeSet<MachineId>,
        lead: &Leadership,
    ) -> Result<(), tree::Error> {
        if planted(Bug::SaysNothing) {
            return Ok(());
        }
        let mut gone = gone | &std::mem::take(&mut self.orphans);
        gone.retain(|machine| !reports.contains_key(machine));
        for (machine, entry) in done {
            let untold = self.untold.entry(machine).or_default();
            untold.push_back(entry);
            untold.drain(..untold.len().saturating_sub(MAX_UNTOLD));
        }
        self.untold.retain(|machine, _| !gone.contains(machine));
        let mut logs = self.log_writes(tree, &gone).await?;
        let mut writes: Vec<Vec<Write>> = Vec::new();
        for (machine, report) in reports {
            let (path, report) = (self.path(machine), report.bounded());
            let unreadable = self.unreadable.remove(&machine) && !planted(Bug::KeepsGarbage);
            let write = match self.known.get(&machine) {
                Some((old, _)) if *old == report && !unreadable && !planted(Bug::RepeatsItself) => None,
                Some((_, version)) => {
                    let version = *version;
                    self.known.insert(machine, (report.clone(), version + 1));
                    Some(Write::SetIfVersion { path, data: report.to_bytes(), version })
                }
                None => {
                    self.known.insert(machine, (report.clone(), 0));
                    Some(Write::create(path, report.to_bytes(), self.acl()))
                }
            };
            writes.push(write.into_iter().chain(logs.remove(&machine)).collect());
        }
        for machine in &gone {
            if let Some((_, version)) = self.known.remove(machine).filter(|_| !planted(Bug::ReportsOnTheGone))
            {
                let report = Write::DeleteIfVersion { path: self.path(*machine), version };
                writes.push(logs.remove(machine).into_iter().chain([report]).collect());
            }
        }
        writes.extend(logs.into_values().map(|log| vec![log]));
        writes.retain(|step| !step.is_empty());
        for batch in batches(writes) {
            let mut fenced = vec![lead.fence()];
            fenced.extend(batch);
            tree.write(fenced).await?;
        }
        self.untold.clear();
        Ok(())
    }

    /// What was done goes to the end of each machine's journal; that of a machine that is gone goes, too.
    async fn log_writes<T: Tree>(
        &self,
        tree: &T,
        gone: &BTreeSet<MachineId>,
    ) -> Result<BTreeMap<MachineId, Write>, tree::Error> {
        let known_gone = gone.iter().filter(|id| self.known.contains_key(id));
        let ids: BTreeSet<MachineId> = self.untold.keys().chain(known_gone).copied().collect();
        let reads = ids.iter().map(|id| Read::Data(self.log_path(*id))).collect();
        let mut writes = BTreeMap::new();
        for (id, answer) in ids.into_iter().zip(tree.read_many(reads).await?) {
            let (path, node) = (self.log_path(id), answer.into_data());
            let Some(entries) = self.untold.get(&id) else {
                if let Some(node) = node {
                    writes.insert(id, Write::DeleteIfVersion { path, version: node.version });
                }
                continue;
            };
            let mut journal = match node.as_ref().map(|node| Journal::parse(&node.data)) {
                None => Journal::default(),
                Some(Ok(journal)) => journal,
                Some(Err(err)) => {
                    warn!(%path, %err, "journal begun anew");
                    Journal::default()
                }
            };
            let mut news = false;
            entries.iter().for_each(|entry| news |= journal.push(entry.clone()));
            if news {
                let data = journal.to_bytes();
                writes.insert(
                    id,
                    match node {
                        Some(node) => Write::SetIfVersion { path, data, version: node.version },
                        None => Write::create(path, data, self.acl()),
                    },
                );
            }
        }
        Ok(writes)
    }

    /// What could not be written down before another may have led is not told out of turn.
    pub fn forget_untold(&mut self) {
        self.untold.clear();
    }

    /// The container of the reports, made once.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn prepare<T: Tree>(&self, tree: &T) -> Result<(), tree::Error> {
        let Place::Controller(roles) = &self.place else { return Ok(()) };
        let container = Write::create(paths::firewall_reports(), Vec::new(), roles.controllers());
        match tree.write(vec![container]).await {
            Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(()),
            Err(err) => Err(err),
        }
    }
}
