//! The agent's reports in the tree: read at the start, written when they say something new, removed with their machines.
//! What a report says is decided by the agent; what it looks like is in `report.rs`.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use super::plan::LastGranted;
use super::report::Report;
use crate::model::MachineId;
use crate::store::acl::{Acl, Roles};
use crate::store::election::Leadership;
use crate::store::paths::{self, NodePath};
use crate::store::tree::{self, Read, Tree, Write};

/// Reports in one fenced write.
const REPORTS_A_WRITE: usize = 100;

/// All reports as the tree has them, with their versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reports {
    place: Place,
    known: BTreeMap<MachineId, (Report, i32)>,
    /// Known as empty because they cannot be read: written anew also if there is nothing to say.
    unreadable: BTreeSet<MachineId>,
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
        Self { place: Place::Controller(roles), known: BTreeMap::new(), unreadable: BTreeSet::new() }
    }

    /// For a machine that looks after itself.
    pub fn of_machine(acl: Acl) -> Self {
        Self { place: Place::Machine(acl), known: BTreeMap::new(), unreadable: BTreeSet::new() }
    }

    fn path(&self, machine: MachineId) -> NodePath {
        match self.place {
            Place::Controller(_) => paths::firewall_report(machine),
            Place::Machine(_) => paths::machine_firewall(machine),
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

    /// The last report, with a reason why nothing newer can be said.
    pub fn keep(&self, machine: MachineId, problem: String) -> Report {
        Report { problem: Some(problem), ..self.get(machine).cloned().unwrap_or_default() }
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
        let ids: Vec<MachineId> = machines.collect();
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

    /// Writes those of `reports` that say something new, and removes those of machines that are `gone`.
    ///
    /// # Errors
    /// The failures of the store. What is known is then ahead of the tree, and must be read again.
    pub async fn write<T: Tree>(
        &mut self,
        tree: &T,
        reports: BTreeMap<MachineId, Report>,
        gone: &BTreeSet<MachineId>,
        lead: &Leadership,
    ) -> Result<(), tree::Error> {
        let mut writes = Vec::new();
        for (machine, report) in reports {
            let path = self.path(machine);
            let unreadable = self.unreadable.remove(&machine);
            let write = match self.known.get(&machine) {
                Some((old, _)) if *old == report && !unreadable => continue,
                Some((_, version)) => {
                    let version = *version;
                    self.known.insert(machine, (report.clone(), version + 1));
                    Write::SetIfVersion { path, data: report.to_bytes(), version }
                }
                None => {
                    self.known.insert(machine, (report.clone(), 0));
                    Write::create(path, report.to_bytes(), self.acl())
                }
            };
            writes.push(write);
        }
        for machine in gone {
            if let Some((_, version)) = self.known.remove(machine) {
                writes.push(Write::DeleteIfVersion { path: self.path(*machine), version });
            }
        }
        for batch in writes.chunks(REPORTS_A_WRITE) {
            let mut fenced = vec![lead.fence()];
            fenced.extend_from_slice(batch);
            tree.write(fenced).await?;
        }
        Ok(())
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
