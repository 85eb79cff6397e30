//! The traits of a provider. There are two, because not every provider can do both: every driver
//! manages rules, but nftables cannot launch machines, and a dry run must not. A controller without
//! a [`Machines`] cannot provision by mistake.
//!
//! Rules for every driver:
//! - Every call is idempotent. Objects without our mark are never changed.
//! - A call ends within the driver's own time limit. Drivers do not retry changes; the caller
//!   decides that with [`Error::retry`].
//! - Calls for different machines may run concurrently; the caller serialises those for one
//!   machine.
//! - Dropping the future of a call is like losing its reply: it may have had its effect.
//!
//! Policy and details of a single driver do not belong here.

use crate::error::Error;
use crate::rule::{Change, Rule, WirePorts};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use tokio::time::Instant;

/// The public number of a machine: the `2` in the group `juju-prod-2`. Never reused.
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
    /// The provider's id of the object that holds a machine's rules: a security group or a table.
    GroupId
);
provider_id!(
    /// The provider's id of a machine.
    InstanceId
);

/// The rules of machines.
pub trait Firewall: Send + Sync {
    /// Reads the rules of all `machines`, with as few calls as the provider allows. The result
    /// contains every requested machine; if one cannot be read, the whole call fails.
    fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> impl Future<Output = Result<BTreeMap<MachineNumber, Seen>, Error>> + Send;

    /// Applies a change that was planned from the result of [`Self::observe`]. `close` must name
    /// rules as they were observed; it contains a rule that is to be replaced only if there is no
    /// capacity for both, or the driver is atomic. One request closes and one opens, or a single
    /// one does both. Closing comes first, because it frees capacity; the failure of one half does
    /// not prevent the other.
    ///
    /// No request that changes anything is sent at or after `until`, which is checked immediately
    /// before each request, after any waiting. A half that was not sent is [`Error::NotBegun`].
    ///
    /// An empty change repairs [`MachineRules::drift`].
    fn apply(
        &self,
        machine: MachineNumber,
        change: &Change,
        until: Instant,
    ) -> impl Future<Output = Applied> + Send;

    /// Returns whether both halves of a change are applied atomically.
    fn is_atomic(&self) -> bool {
        false
    }

    /// Returns whether [`Self::apply`] intentionally changes nothing.
    fn is_dry_run(&self) -> bool {
        false
    }

    /// Returns the limit of rules of one address family of a machine, ours and others', if there is
    /// one. A plan uses it to merge or postpone rules before the limit is hit.
    fn rules_per_family(&self) -> Option<usize>;

    /// Returns the number of requests sent so far, by name, for metrics only.
    fn requests(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }
}

/// Instances and groups.
pub trait Machines: Send + Sync {
    /// Lists all instances and groups with our mark. The result is complete, or the call fails.
    fn list(&self) -> impl Future<Output = Result<Inventory, Error>> + Send;

    /// Launches an instance for the machine, in its own group without rules. If the machine already
    /// has an instance, returns that one.
    fn launch(&self, launch: &Launch) -> impl Future<Output = Result<Instance, Error>> + Send;

    /// Marks an existing foreign instance as the machine's, then calls [`Self::ensure_group`].
    fn adopt(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<Instance, Error>> + Send;

    /// Creates the machine's group if it is missing and adds it to the instance's groups.
    fn ensure_group(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<GroupId, Error>> + Send;

    /// Removes our group and mark from an adopted instance, which keeps running.
    fn release(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Terminates an instance that was launched for this machine; any other is refused as
    /// [`Error::Foreign`]. Its group remains, and is in use until the instance has ended.
    fn terminate(
        &self,
        machine: MachineNumber,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Removes all our rules from a group of the machine. Rules of others remain; a missing group
    /// is success.
    fn revoke_all(
        &self,
        machine: MachineNumber,
        group: &GroupId,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Deletes a group of ours. [`Error::StillInUse`] is normal for a minute or more after
    /// [`Self::terminate`].
    fn delete_group(&self, group: &GroupId) -> impl Future<Output = Result<(), Error>> + Send;

    /// Marks groups with the environment's name and the id of another store as ours; the operator
    /// declares that store as lost. A machine's group that is in use is not adopted, because the
    /// rules of our machine with that number would open ports on other instances.
    fn adopt_groups(&self) -> impl Future<Output = Result<Vec<OtherGroup>, Error>> + Send;
}

/// Lets one driver serve rules and machines, with shared caches and rate limits.
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

    fn is_atomic(&self) -> bool {
        F::is_atomic(self)
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

    async fn revoke_all(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        M::revoke_all(self, machine, group).await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        M::delete_group(self, group).await
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        M::adopt_groups(self).await
    }
}

/// The observed state of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The provider reports that the machine has no group.
    Absent,
    Present(MachineRules),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineRules {
    pub group: GroupId,
    /// Rules with our mark, in the provider's spelling.
    pub owned: BTreeSet<Rule>,
    /// Rules of others, which are reported and never changed.
    pub foreign: Vec<Foreign>,
    /// Whether the machine is reachable over IPv6. If not, rules with IPv6 sources are omitted.
    pub ipv6: bool,
    /// Descriptions of other deviations from the state that the driver would create. The next
    /// [`Firewall::apply`] repairs them, so one is due even with nothing to open or close.
    pub drift: Vec<String>,
}

/// A rule that is not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// The rule in the provider's spelling.
    pub text: String,
    /// The rule of ours that the provider would treat as a duplicate, if there is one.
    pub exact: Option<Rule>,
    /// The traffic that it allows, as far as our rules can express it.
    pub covers: Vec<Rule>,
}

impl Foreign {
    /// Returns the address family; `None` if the source is not a block of addresses.
    pub fn family(&self) -> Option<crate::rule::Family> {
        self.exact.iter().chain(&self.covers).next().map(|rule| rule.source.family())
    }

    /// Converts a rule with one source block.
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

/// The outcome of a change, whose halves fail independently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    pub opened: Result<(), Error>,
    pub closed: Result<(), Error>,
}

impl Applied {
    /// Creates the outcome of an atomic change.
    pub fn as_one(result: Result<(), Error>) -> Self {
        Self { opened: result.clone(), closed: result }
    }

    pub fn is_ok(&self) -> bool {
        self.opened.is_ok() && self.closed.is_ok()
    }

    /// Returns whether a half was not begun, so that a part of the change remains.
    pub fn is_cut_short(&self) -> bool {
        not_begun(&self.opened) || not_begun(&self.closed)
    }

    /// Returns the halves of `change` that were begun.
    pub fn begun_of(&self, change: &Change) -> Change {
        let half = |outcome, rules: &BTreeSet<Rule>| {
            if not_begun(outcome) { BTreeSet::new() } else { rules.clone() }
        };
        Change { open: half(&self.opened, &change.open), close: half(&self.closed, &change.close) }
    }

    /// Iterates over the distinct errors. A half that was not begun has not failed.
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

/// The user data of a new instance. It may hold credentials, so `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct UserData(String);

impl UserData {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text; only for the driver that sends it.
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
    /// Absent until the provider has assigned one.
    pub public_address: Option<String>,
    pub private_address: Option<String>,
    /// All groups of the instance, ours and others'.
    pub groups: BTreeSet<GroupId>,
}

/// Whether an instance was launched by us, so that we may terminate it.
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
    /// Never runs again.
    Terminated,
}

/// A group with the environment's name and the id of another store, and the result of its adoption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherGroup {
    pub id: GroupId,
    pub name: String,
    /// The id of the other store.
    pub store: String,
    /// Why it was not adopted; `None` if it was.
    pub left: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub id: GroupId,
    /// `None` for the group that all machines of the environment share.
    pub machine: Option<MachineNumber>,
    /// Whether it contains rules of ours.
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
    fn foreign_rules_keep_their_providers_spelling() {
        let all = Foreign::from_wire(WirePorts { proto: "-1", from: None, to: None }, Cidr::WORLD_V4);
        assert_eq!(all.text, "all-all/-1 from 0.0.0.0/0");
        assert_eq!((all.exact, all.covers.len()), (None, 2));
        let named = Foreign::from_wire(wire("6", 80, 80), Cidr::WORLD_V6);
        assert_eq!(named.text, "80/tcp from ::/0");
        assert_eq!(named.covers, Vec::from_iter(named.exact));
    }

    #[test]
    fn user_data_is_not_printed() {
        let launch = Launch { machine: MachineNumber::new(1), user_data: UserData::new("password=hunter2") };
        assert!(!format!("{launch:?}").contains("hunter2"));
        assert_eq!(launch.user_data.reveal(), "password=hunter2");
    }

    #[test]
    fn common_failure_of_both_halves_is_reported_once() {
        let throttled = |n| Error::Throttled { what: Subject::Machine(MachineNumber::new(n)) };
        assert_eq!(Applied::as_one(Err(throttled(1))).errors().count(), 1);
        let two = Applied { opened: Err(throttled(1)), closed: Err(throttled(2)) };
        assert_eq!(two.errors().count(), 2);
        assert!(!two.is_ok() && Applied::as_one(Ok(())).is_ok());
        let late = Applied { opened: Err(Error::NotBegun { what: Subject::Provider }), closed: Ok(()) };
        assert!(late.is_cut_short() && !late.is_ok() && late.errors().count() == 0);
    }
}
