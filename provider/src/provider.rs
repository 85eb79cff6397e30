//! What a provider must do for the firewall agent. Two traits, since not every provider can do both: every driver has
//! rules to look after, but nftables cannot launch a machine, and a dry run must not. An agent that is not given a
//! [`Machines`] cannot provision by mistake.
//!
//! What every driver keeps to:
//! - "Already so" is success, for every call. Nothing that lacks our mark is ever changed.
//! - A call ends within the driver's own time limit. What changes something is not tried again by itself after an error:
//!   when to do that is for the caller to decide, with [`Error::retry`].
//! - Calls for different machines may run at the same time; for one machine the caller sends one after the other.
//! - Dropping a call's future is like losing its answer: it may have had its effect.
//!
//! No policy here, and nothing that only one driver understands.

use crate::error::Error;
use crate::rule::{Change, Rule, WirePorts};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use tokio::time::Instant;

/// The public number of a machine: the `2` in the group `juju-prod-2`. Never used again for another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MachineNumber(u32);

impl MachineNumber {
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for MachineNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! provider_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            pub fn new(id: impl Into<String>) -> Self {
                Self(id.into())
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

provider_id!(
    /// What holds the rules of one machine, as its provider calls it: a security group, a table.
    GroupId
);
provider_id!(
    /// A machine as its provider calls it.
    InstanceId
);

/// The rules of machines.
pub trait Firewall: Send + Sync {
    /// Reads all of `machines`, in as few calls as the provider allows. The answer has every machine that was asked
    /// for, or the whole is an error: what could not be read is never shown as having no rules.
    fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> impl Future<Output = Result<BTreeMap<MachineNumber, Seen>, Error>> + Send;

    /// Carries out a change that was planned from what [`Self::observe`] showed: `close` must name rules as they were
    /// shown; one that is to be replaced only if there is no room for both, or all is one step. One request closes and one
    /// opens, or one does both at once; closing comes first, since it makes room, and the failure of one does not keep the
    /// other from being done.
    ///
    /// No request that changes anything is begun at or after `until`: that is asked right before each, after whatever was
    /// waited for. A half that was not begun is [`Error::NotBegun`].
    ///
    /// With an empty change it puts right what is [`MachineRules::amiss`].
    fn apply(
        &self,
        machine: MachineNumber,
        change: &Change,
        until: Instant,
    ) -> impl Future<Output = Applied> + Send;

    /// Whether both halves of a change are one step, all of it done or nothing.
    fn at_once(&self) -> bool {
        false
    }

    /// Whether [`Self::apply`] changes nothing, on purpose.
    fn is_dry_run(&self) -> bool {
        false
    }

    /// How many rules of one address family a machine can have, ours and others', if there is a limit. Known before
    /// it is hit, so that a plan can merge rules or hold some back in place of trying.
    fn rules_per_family(&self) -> Option<usize>;

    /// How many requests went out so far, by name. For people: nothing is decided by it.
    fn requests(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
}

/// Instances and groups: where machines come from.
pub trait Machines: Send + Sync {
    /// All instances and groups with our mark, whatever machines are known elsewhere. Complete, or an error.
    fn list(&self) -> impl Future<Output = Result<Inventory, Error>> + Send;

    /// An instance for the machine, in a group of its own that holds no rules. If the machine has one already, that one is the answer.
    fn launch(&self, launch: &Launch) -> impl Future<Output = Result<Instance, Error>> + Send;

    /// Marks an instance that somebody else made as the machine's, and does [`Self::ensure_group`].
    fn adopt(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<Instance, Error>> + Send;

    /// Makes the machine's group if it is missing and adds it to the instance, beside the groups that are there.
    fn ensure_group(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<GroupId, Error>> + Send;

    /// Takes our group and mark from an adopted instance, which runs on.
    fn release(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Ends an instance that we launched for this machine; any other is refused as [`Error::Foreign`]. Its
    /// group stays, and is in use until the instance is quite gone.
    fn terminate(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Takes all our rules out of a group of the machine's; those of others stay, and nothing is asked of a group that is gone.
    fn shut(&self, machine: MachineNumber, group: &GroupId)
    -> impl Future<Output = Result<(), Error>> + Send;

    /// Deletes a group of ours. [`Error::StillInUse`] is usual for a minute or more after [`Self::terminate`].
    fn delete_group(&self, group: &GroupId) -> impl Future<Output = Result<(), Error>> + Send;

    /// Marks the groups as ours that carry the environment's name and the id of another store: that store is lost, as the
    /// operator says. A machine's group that is in use stays as it is, since the rules for our machine of that number
    /// would open ports on the instances of another.
    fn adopt_groups(&self) -> impl Future<Output = Result<Vec<OtherGroup>, Error>> + Send;
}

/// One driver for the rules and for the machines: both share what it knows and how much it may ask.
impl<F: Firewall> Firewall for Arc<F> {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        F::observe(self, machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        F::apply(self, machine, change, until).await
    }

    fn at_once(&self) -> bool {
        F::at_once(self)
    }

    fn is_dry_run(&self) -> bool {
        F::is_dry_run(self)
    }

    fn rules_per_family(&self) -> Option<usize> {
        F::rules_per_family(self)
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        F::requests(self)
    }
}

impl<M: Machines> Machines for Arc<M> {
    async fn list(&self) -> Result<Inventory, Error> {
        M::list(self).await
    }

    async fn launch(&self, launch: &Launch) -> Result<Instance, Error> {
        M::launch(self, launch).await
    }

    async fn adopt(&self, machine: MachineNumber, instance: &InstanceId) -> Result<Instance, Error> {
        M::adopt(self, machine, instance).await
    }

    async fn ensure_group(&self, machine: MachineNumber, instance: &InstanceId) -> Result<GroupId, Error> {
        M::ensure_group(self, machine, instance).await
    }

    async fn release(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        M::release(self, machine, instance).await
    }

    async fn terminate(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        M::terminate(self, machine, instance).await
    }

    async fn shut(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        M::shut(self, machine, group).await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        M::delete_group(self, group).await
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        M::adopt_groups(self).await
    }
}

/// One machine, as its provider has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The provider was asked and says that there is nothing to hold rules: no group, or no such machine here.
    Absent,
    Present(MachineRules),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineRules {
    pub group: GroupId,
    /// Rules with our mark, spelled as the provider has them.
    pub owned: BTreeSet<Rule>,
    /// Rules of others. Shown to people; never touched.
    pub foreign: Vec<Foreign>,
    /// Whether IPv6 can reach the machine at all: if not, rules with such sources are not worth their place.
    pub ipv6: bool,
    /// What else is not as the driver would make it, in words. The next [`Firewall::apply`] puts it right, so if there is
    /// any, one is due even with nothing to open or close.
    pub amiss: Vec<String>,
}

/// A rule that is not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// How its provider shows it.
    pub text: String,
    /// The rule of ours that would be the very same to the provider, if there is one.
    pub exact: Option<Rule>,
    /// What it lets through, as far as that can be said in our words.
    pub covers: Vec<Rule>,
}

impl Foreign {
    /// None if it is for other than addresses.
    pub fn family(&self) -> Option<crate::rule::Family> {
        self.exact.iter().chain(&self.covers).next().map(|rule| rule.source.family())
    }

    /// For a rule with one source block.
    pub fn from_wire(ports: WirePorts<'_>, source: crate::rule::Cidr) -> Self {
        let exact = ports.exact().map(|range| Rule::new(range, source));
        let covers: Vec<Rule> = ports.covers().into_iter().map(|range| Rule::new(range, source)).collect();
        let port = |end: Option<i32>| end.map_or_else(|| "all".to_owned(), |port| port.to_string());
        let text = exact.map_or_else(
            || format!("{}-{}/{} from {source}", port(ports.from), port(ports.to), ports.proto),
            |rule| rule.to_string(),
        );
        Self { text, exact, covers }
    }
}

/// What came of a change; its halves fail independently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    pub opened: Result<(), Error>,
    pub closed: Result<(), Error>,
}

impl Applied {
    /// For a driver that does both in one step.
    pub fn as_one(result: Result<(), Error>) -> Self {
        Self { opened: result.clone(), closed: result }
    }

    pub fn is_ok(&self) -> bool {
        self.opened.is_ok() && self.closed.is_ok()
    }

    /// Whether a half of it was not begun, so that the rest of the change is still to be made.
    pub fn is_cut_short(&self) -> bool {
        not_begun(&self.opened) || not_begun(&self.closed)
    }

    /// The halves of `change`, whose outcome this is, that were begun.
    pub fn begun_of(&self, change: &Change) -> Change {
        let half = |outcome, rules: &BTreeSet<Rule>| {
            if not_begun(outcome) { BTreeSet::new() } else { rules.clone() }
        };
        Change { open: half(&self.opened, &change.open), close: half(&self.closed, &change.close) }
    }

    /// Each different error once. What was not begun has not failed.
    pub fn errors(&self) -> impl Iterator<Item = &Error> {
        let failed = |error: &&Error| !matches!(error, Error::NotBegun { .. });
        let opened = self.opened.as_ref().err().filter(failed);
        let closed = self.closed.as_ref().err().filter(failed).filter(|error| opened != Some(error));
        opened.into_iter().chain(closed)
    }
}

fn not_begun(half: &Result<(), Error>) -> bool {
    matches!(half, Err(Error::NotBegun { .. }))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    pub machine: MachineNumber,
    pub user_data: UserData,
}

/// What an instance is told at its first start. It may hold credentials, so it is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct UserData(String);

impl UserData {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// For the driver that sends it on, and nobody else.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for UserData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserData({} bytes)", self.0.len())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    pub instances: Vec<Instance>,
    pub groups: Vec<Group>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    pub id: InstanceId,
    pub machine: MachineNumber,
    pub origin: Origin,
    pub state: InstanceState,
    /// Absent until the provider has given one.
    pub public_address: Option<String>,
    pub private_address: Option<String>,
    /// Those that it is in, ours and others'.
    pub groups: BTreeSet<GroupId>,
}

/// Whether an instance is ours to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Launched,
    Adopted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceState {
    Pending,
    Running,
    Stopped,
    /// Will never run again.
    Terminated,
}

/// A group of the environment's name that carried the id of another store, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherGroup {
    pub id: GroupId,
    pub name: String,
    /// The store that it was marked with.
    pub store: String,
    /// Why it was left as it is; none if it is ours now.
    pub left: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub id: GroupId,
    /// `None` for the group that all machines of the environment share.
    pub machine: Option<MachineNumber>,
    /// Whether it holds rules of ours.
    pub open: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Subject;
    use crate::rule::Cidr;

    fn wire(proto: &str, from: i32, to: i32) -> WirePorts<'_> {
        WirePorts { proto, from: Some(from), to: Some(to) }
    }

    #[test]
    fn foreign_rules_are_shown_as_their_provider_has_them() {
        let all = Foreign::from_wire(WirePorts { proto: "-1", from: None, to: None }, Cidr::WORLD_V4);
        assert_eq!(all.text, "all-all/-1 from 0.0.0.0/0");
        assert_eq!((all.exact, all.covers.len()), (None, 2));
        let named = Foreign::from_wire(wire("6", 80, 80), Cidr::WORLD_V6);
        assert_eq!(named.text, "80/tcp from ::/0");
        assert_eq!(named.covers, Vec::from_iter(named.exact));
    }

    #[test]
    fn user_data_is_not_shown() {
        let launch = Launch { machine: MachineNumber::new(1), user_data: UserData::new("password=hunter2") };
        assert!(!format!("{launch:?}").contains("hunter2"));
        assert_eq!(launch.user_data.reveal(), "password=hunter2");
    }

    #[test]
    fn one_failure_of_both_halves_is_told_once() {
        let throttled = |n| Error::Throttled { what: Subject::Machine(MachineNumber::new(n)) };
        assert_eq!(Applied::as_one(Err(throttled(1))).errors().count(), 1);
        let two = Applied { opened: Err(throttled(1)), closed: Err(throttled(2)) };
        assert_eq!(two.errors().count(), 2);
        assert!(!two.is_ok() && Applied::as_one(Ok(())).is_ok());
        let late = Applied { opened: Err(Error::NotBegun { what: Subject::Provider }), closed: Ok(()) };
        assert!(late.is_cut_short() && !late.is_ok() && late.errors().count() == 0);
    }
}
