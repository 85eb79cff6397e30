//! Names and tags of our groups, rules and launches in EC2, and the check of ownership. Pure.
//!
//! Names are for people, and are not unique: machine 2 of `prod` and the environment `prod-2` share
//! one. Ownership is decided by complete tags alone.

use crate::provider::{MachineNumber, Origin};
use aws_sdk_ec2::types::Tag;
use std::fmt;

/// Tag of all our objects; its value says whether they were created or adopted.
pub(super) const MARK: &str = "portcullis";
pub(super) const ENVIRONMENT: &str = "portcullis:environment";
pub(super) const MACHINE: &str = "portcullis:machine";
/// Tag with the id of the store. Two stores may have environments of the same name, and neither may
/// terminate the other's instances.
pub(super) const STORE: &str = "portcullis:store";
/// The description of our rules in a machine's group.
pub(super) const RULE_MARK: &str = "opened by portcullis";

const GROUP: &str = "group";
const LAUNCHED: &str = "launched";
const ADOPTED: &str = "adopted";

/// Longest name, so that `juju-ENV-N` fits into the 255 characters of a group's name.
const NAME_MAX: usize = 200;

/// The name of an environment and the id of its store. Both contain no wildcards of EC2's filters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    name: String,
    store: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {what}: 1 to {NAME_MAX} letters, digits, '-', '_' and '.', got {given:?}")]
pub struct InvalidEnvironment {
    what: &'static str,
    given: String,
}

impl Environment {
    /// `store` is the unique and permanent id of the store.
    ///
    /// # Errors
    /// If one of them is empty, too long, or has other characters.
    pub fn new(name: &str, store: &str) -> Result<Self, InvalidEnvironment> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        for (what, given) in [("name for an environment", name), ("id of a store", store)] {
            if given.is_empty() || given.len() > NAME_MAX || !given.bytes().all(allowed) {
                return Err(InvalidEnvironment { what, given: given.chars().take(NAME_MAX).collect() });
            }
        }
        Ok(Self { name: name.to_owned(), store: store.to_owned() })
    }

    /// Returns the tags of all objects of this environment, without the mark.
    pub(super) fn whose(&self) -> [(&'static str, &str); 2] {
        [(ENVIRONMENT, &self.name), (STORE, &self.store)]
    }

    fn tags(&self, mark: &str, machine: Option<MachineNumber>) -> Vec<Tag> {
        let mut tags = vec![tag(MARK, mark)];
        tags.extend(self.whose().map(|(key, value)| tag(key, value)));
        tags.extend(machine.map(|machine| tag(MACHINE, &machine.to_string())));
        tags
    }

    fn is_ours(&self, tags: &[Tag]) -> bool {
        self.whose().iter().all(|(key, own)| value(tags, key) == Some(own))
    }

    pub(super) fn group_name(&self, machine: Option<MachineNumber>) -> String {
        machine.map_or_else(|| format!("juju-{self}"), |machine| format!("juju-{self}-{machine}"))
    }

    pub(super) fn group_description(&self, machine: Option<MachineNumber>) -> String {
        machine.map_or_else(
            || format!("juju group for {self}"),
            |machine| format!("juju group for {self} machine {machine}"),
        )
    }

    pub(super) fn group_tags(&self, machine: Option<MachineNumber>) -> Vec<Tag> {
        self.tags(GROUP, machine)
    }

    pub(super) fn instance_tags(&self, machine: MachineNumber, origin: Origin) -> Vec<Tag> {
        let mark = match origin {
            Origin::Launched => LAUNCHED,
            Origin::Adopted => ADOPTED,
        };
        self.tags(mark, Some(machine))
    }

    /// Returns the owner of a group by its tags; `None` if it is not ours.
    pub(super) fn group_owner(&self, tags: &[Tag]) -> Option<GroupOwner> {
        if value(tags, MARK) != Some(GROUP) || !self.is_ours(tags) {
            return None;
        }
        match value(tags, MACHINE) {
            None => Some(GroupOwner::Environment),
            Some(number) => machine_number(number).map(GroupOwner::Machine),
        }
    }

    /// Returns the owner and the store of a group of an environment of our name in another store.
    pub(super) fn other_stores_group<'a>(&self, tags: &'a [Tag]) -> Option<(GroupOwner, &'a str)> {
        let store = value(tags, STORE).filter(|store| *store != self.store)?;
        // The group would be ours if we had that store.
        let theirs = Self { name: self.name.clone(), store: store.to_owned() };
        theirs.group_owner(tags).map(|owner| (owner, store))
    }

    /// Returns filters for groups of our environment's name in any store.
    pub(super) fn of_our_name(&self) -> [(&'static str, &str); 2] {
        [(MARK, GROUP), (ENVIRONMENT, &self.name)]
    }

    /// Returns the tag that adopts a group of another store.
    pub(super) fn store_tag(&self) -> Tag {
        tag(STORE, &self.store)
    }

    /// Returns the machine and the origin of an instance; `None` if it is not ours.
    pub(super) fn instance_owner(&self, tags: &[Tag]) -> Option<(MachineNumber, Origin)> {
        let origin = match value(tags, MARK)? {
            LAUNCHED => Origin::Launched,
            ADOPTED => Origin::Adopted,
            _ => return None,
        };
        if !self.is_ours(tags) {
            return None;
        }
        Some((machine_number(value(tags, MACHINE)?)?, origin))
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupOwner {
    Environment,
    Machine(MachineNumber),
}

impl GroupOwner {
    pub(super) fn machine(self) -> Option<MachineNumber> {
        match self {
            Self::Environment => None,
            Self::Machine(machine) => Some(machine),
        }
    }
}

/// Returns the idempotency token of a launch. It depends on the id of the machine's group, which is
/// never reused, and on the number of terminated instances of the machine.
pub(super) fn launch_token(group: &str, ended: usize) -> String {
    format!("portcullis-{group}-{ended}")
}

/// Returns whether the tags carry our mark, in any environment and any store.
pub(super) fn is_marked(tags: &[Tag]) -> bool {
    value(tags, MARK).is_some()
}

fn tag(key: &str, value: &str) -> Tag {
    Tag::builder().key(key).value(value).build()
}

fn value<'a>(tags: &'a [Tag], key: &str) -> Option<&'a str> {
    tags.iter().find(|tag| tag.key() == Some(key)).and_then(Tag::value)
}

/// Parses the canonical form only: `02` and `+2` are refused.
fn machine_number(text: &str) -> Option<MachineNumber> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(MachineNumber::new(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Environment {
        of_store(name, "6f1c")
    }

    fn of_store(name: &str, store: &str) -> Environment {
        Environment::new(name, store).unwrap()
    }

    const TWO: MachineNumber = MachineNumber::new(2);

    #[test]
    fn group_names_match_the_first_juju() {
        assert_eq!(named("prod").group_name(None), "juju-prod");
        assert_eq!(named("prod").group_name(Some(TWO)), "juju-prod-2");
        assert_eq!(named("prod").group_description(None), "juju group for prod");
        assert_eq!(named("prod").group_description(Some(TWO)), "juju group for prod machine 2");
    }

    #[test]
    fn groups_with_equal_names_have_different_owners() {
        assert_eq!(named("prod").group_name(Some(TWO)), named("prod-2").group_name(None));
        let machine = named("prod").group_tags(Some(TWO));
        let environment = named("prod-2").group_tags(None);
        assert_eq!(named("prod").group_owner(&machine), Some(GroupOwner::Machine(TWO)));
        assert_eq!(named("prod-2").group_owner(&machine), None);
        assert_eq!(named("prod-2").group_owner(&environment), Some(GroupOwner::Environment));
        assert_eq!(named("prod").group_owner(&environment), None);
    }

    #[test]
    fn partial_tags_are_not_ours() {
        let good = named("prod").group_tags(Some(TWO));
        for (key, other) in [
            (MARK, "launched"),
            (MARK, ""),
            (ENVIRONMENT, "prod-2"),
            (ENVIRONMENT, "PROD"),
            (ENVIRONMENT, "pro"),
            (MACHINE, "02"),
            (MACHINE, "+2"),
            (MACHINE, "2 "),
            (MACHINE, ""),
            (MACHINE, "4294967296"),
            (STORE, "6f1c0"),
            (STORE, ""),
        ] {
            let mut tags = good.clone();
            tags.retain(|tag| tag.key() != Some(key));
            tags.push(tag(key, other));
            assert_eq!(named("prod").group_owner(&tags), None, "{key}={other}");
        }
        assert_eq!(named("prod").group_owner(&[]), None);
    }

    #[test]
    fn objects_of_another_store_are_not_ours() {
        let (ours, theirs) = (named("prod"), of_store("prod", "77aa"));
        assert_eq!(ours.group_name(Some(TWO)), theirs.group_name(Some(TWO)));
        assert_eq!(ours.group_owner(&theirs.group_tags(Some(TWO))), None);
        let launched = theirs.instance_tags(TWO, Origin::Launched);
        assert_eq!(ours.instance_owner(&launched), None);
        assert_eq!(theirs.instance_owner(&launched), Some((TWO, Origin::Launched)));
        let unsaid: Vec<Tag> =
            ours.group_tags(Some(TWO)).into_iter().filter(|tag| tag.key() != Some(STORE)).collect();
        assert_eq!(ours.group_owner(&unsaid), None, "a group without a store is not ours");
    }

    #[test]
    fn groups_of_a_lost_store_are_found_by_complete_tags() {
        let (ours, lost) = (named("prod"), of_store("prod", "77aa"));
        let other =
            |tags: &[Tag]| ours.other_stores_group(tags).map(|(owner, store)| (owner, store.to_owned()));
        for (machine, owner) in [(None, GroupOwner::Environment), (Some(TWO), GroupOwner::Machine(TWO))] {
            let tags = lost.group_tags(machine);
            assert_eq!(other(&tags), Some((owner, "77aa".to_owned())));
            let mut taken = tags.clone();
            taken.retain(|tag| tag.key() != Some(STORE));
            assert_eq!(other(&taken), None, "a group of no store");
            taken.push(ours.store_tag());
            assert_eq!((other(&taken), ours.group_owner(&taken)), (None, Some(owner)), "ours already");
        }
        assert_eq!(other(&of_store("prod-2", "77aa").group_tags(None)), None, "another environment's");
        assert_eq!(other(&lost.instance_tags(TWO, Origin::Launched)), None, "an instance's tags");
    }

    #[test]
    fn instance_tags_carry_the_origin() {
        for origin in [Origin::Launched, Origin::Adopted] {
            let tags = named("prod").instance_tags(TWO, origin);
            assert_eq!(named("prod").instance_owner(&tags), Some((TWO, origin)));
            assert_eq!(named("prod-2").instance_owner(&tags), None);
            assert!(is_marked(&tags));
        }
        assert_eq!(named("prod").instance_owner(&named("prod").group_tags(Some(TWO))), None);
        assert!(!is_marked(&[tag("Name", "mine")]));
    }

    #[test]
    fn launch_tokens_fit_and_differ() {
        let token = launch_token("sg-0123456789abcdef0", 1);
        assert!(token.len() <= 64, "EC2 takes 64 characters");
        assert_ne!(token, launch_token("sg-0123456789abcdef0", 2));
    }

    #[test]
    fn wildcards_and_long_names_are_refused() {
        for bad in ["", "a*", "a?b", "a b", "é", "a/b", &"x".repeat(201)] {
            for (name, store, part) in [(bad, "6f1c", "no name for an"), ("prod", bad, "no id of a store")] {
                let error = Environment::new(name, store).unwrap_err().to_string();
                assert!(error.len() < 400 && error.starts_with(part), "{error}");
            }
        }
        assert_eq!(named(&"x".repeat(200)).group_name(Some(MachineNumber::new(u32::MAX))).len(), 216);
    }
}
