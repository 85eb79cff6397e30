//! The nftables driver: the firewall of this machine, in the Linux kernel. Portcullis has its own
//! table, whose content is replaced in one transaction, so that rules are never applied in part and
//! established connections continue. Other tables are neither read nor changed, and the table
//! remains when the program stops.
//!
//! A packet has to pass every table: an accept in this table does not override a drop in another
//! one, and an accept in another table does not override a reject here.
//!
//! This file combines the parts: `render` and `parse` are pure, `run` starts the `nft` program.

mod parse;
mod render;
mod run;
mod table;

use crate::error::{Error, Subject};
use crate::provider::{Applied, Firewall, GroupId, MachineNumber, MachineRules, Seen};
use crate::rule::{Change, RuleSet};
use parse::ParsedTable;
use run::Nft;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
pub use table::{InvalidTableName, Mode, TableName, TableSettings};
use tokio::time::Instant;

/// Time limit of `nft`, longer than the largest table takes on a busy machine.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Nftables {
    machine: MachineNumber,
    settings: TableSettings,
    nft: Nft,
}

impl Nftables {
    pub fn new(machine: MachineNumber, settings: TableSettings) -> Self {
        let nft = Nft::new(vec!["nft".to_owned()], DEFAULT_TIME_LIMIT, Subject::Machine(machine));
        Self { machine, settings, nft }
    }

    /// Runs `command` instead of `nft`, for example to enter another network namespace. nft's
    /// arguments are appended. The program is killed after `time_limit`.
    #[must_use]
    pub fn with_command(mut self, command: Vec<String>, time_limit: Duration) -> Self {
        self.nft = Nft::new(command, time_limit, Subject::Machine(self.machine));
        self
    }

    /// Deletes the table. Returns whether it existed; a table that Portcullis did not make is an
    /// error, and stays.
    pub async fn remove_table(&self) -> Result<bool, Error> {
        if self.nft.list(&self.settings.table).await?.is_none() {
            return Ok(false);
        }
        self.read().await?;
        self.nft.load(&render::delete(&self.settings.table)).await?;
        Ok(true)
    }

    async fn read(&self) -> Result<ParsedTable, Error> {
        let Some(listing) = self.nft.list(&self.settings.table).await? else {
            return Ok(ParsedTable::no_table());
        };
        let refused = |reason| Error::Unusable { what: Subject::Machine(self.machine), reason };
        let found = parse::parse(&listing, &self.settings).map_err(|error| refused(error.to_string()))?;
        if found.foreign {
            let what = Subject::Group(self.group());
            let reason = "none of the rules in it has our mark; it is left alone".to_owned();
            return Err(Error::Foreign { what, reason });
        }
        Ok(found)
    }

    async fn replace(&self, machine: MachineNumber, change: &Change, until: Instant) -> Result<(), Error> {
        if machine != self.machine {
            return Err(Error::NotFound { what: Subject::Machine(machine) });
        }
        let found = self.read().await?;
        let closed: RuleSet = change.close.iter().collect();
        let next = found.rules.minus(&closed).union(&change.open.iter().collect());
        if next == found.rules && found.drift.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(Error::NotBegun { what: machine.into() });
        }
        self.nft.load(&render::render(&self.settings, &next, &found.start_for(&next))).await
    }

    fn group(&self) -> GroupId {
        GroupId::new(format!("inet {}", self.settings.table))
    }
}

impl Firewall for Nftables {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        let mut all: BTreeMap<_, _> = machines.iter().map(|&machine| (machine, Seen::Absent)).collect();
        if let Some(here) = all.get_mut(&self.machine) {
            let found = self.read().await?;
            *here = Seen::Present(MachineRules {
                group: self.group(),
                owned: found.rules.rules().collect(),
                foreign: Vec::new(),
                ipv6: true,
                drift: found.drift,
            });
        }
        Ok(all)
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        Applied::as_one(self.replace(machine, change, until).await)
    }

    fn is_atomic(&self) -> bool {
        true
    }

    fn rules_per_family(&self) -> Option<usize> {
        None
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        self.nft.started()
    }
}
