//! The objects of the public API and their paths. Pure.

use crate::fleet::dbus::api::{Interface, JOB, MANAGER, MONITOR, NODE};
use crate::fleet::dbus::names::MANAGER_PATH;
use crate::fleet::name::{NodeName, escape, unescape};
use zbus::ObjectPath;

/// The object that a path names. The object need not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Object {
    Manager,
    Node(NodeName),
    Monitor(u32),
    Job(u32),
    /// A path that is only the parent of other paths.
    Parent(Parent),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parent {
    /// A path with this one child.
    Of(&'static str),
    Nodes,
    Monitors,
    Jobs,
}

impl Object {
    pub(super) fn at(path: &str) -> Option<Self> {
        let Some(rest) = path.strip_prefix(MANAGER_PATH) else {
            return match path {
                "/" => Some(Self::Parent(Parent::Of("org"))),
                "/org" => Some(Self::Parent(Parent::Of("containers"))),
                "/org/containers" => Some(Self::Parent(Parent::Of("hirte"))),
                _ => None,
            };
        };
        // Only the canonical form of a number is a path.
        let id = |text: &str| text.parse().ok().filter(|id: &u32| id.to_string() == text);
        match rest.split('/').collect::<Vec<_>>()[..] {
            [""] => Some(Self::Manager),
            ["", "node"] => Some(Self::Parent(Parent::Nodes)),
            ["", "monitor"] => Some(Self::Parent(Parent::Monitors)),
            ["", "job"] => Some(Self::Parent(Parent::Jobs)),
            ["", "node", name] => Some(Self::Node(unescape(name)?.parse().ok()?)),
            ["", "monitor", text] => Some(Self::Monitor(id(text)?)),
            ["", "job", text] => Some(Self::Job(id(text)?)),
            _ => None,
        }
    }

    /// The interface of the object, besides those of every object.
    pub(super) fn interface(&self) -> Option<&'static Interface> {
        match self {
            Self::Manager => Some(&MANAGER),
            Self::Node(_) => Some(&NODE),
            Self::Monitor(_) => Some(&MONITOR),
            Self::Job(_) => Some(&JOB),
            Self::Parent(_) => None,
        }
    }
}

fn path(kind: &str, name: &str) -> ObjectPath<'static> {
    // Escaped names and numbers are valid in a path.
    ObjectPath::from_string_unchecked(format!("{MANAGER_PATH}/{kind}/{name}"))
}

pub(super) fn node_path(name: &NodeName) -> ObjectPath<'static> {
    path("node", &escape(name.as_str()))
}

pub(super) fn monitor_path(id: u32) -> ObjectPath<'static> {
    path("monitor", &id.to_string())
}

pub(super) fn job_path(id: u32) -> ObjectPath<'static> {
    path("job", &id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_parsed_as_they_are_written() {
        let name: NodeName = "rack-1.a".parse().unwrap();
        assert_eq!(node_path(&name).as_str(), "/org/containers/hirte/node/rack_2d1_2ea");
        for object in [Object::Node(name), Object::Monitor(7), Object::Job(u32::MAX)] {
            let path = match &object {
                Object::Node(name) => node_path(name),
                Object::Monitor(id) => monitor_path(*id),
                Object::Job(id) => job_path(*id),
                _ => unreachable!(),
            };
            assert_eq!(Object::at(path.as_str()), Some(object));
        }
        assert_eq!(Object::at("/org/containers/hirte"), Some(Object::Manager));
        assert_eq!(Object::at("/org/containers/hirte/job"), Some(Object::Parent(Parent::Jobs)));
        for unknown in [
            "/org/containers/hirte/job/007",
            "/org/containers/hirte/job/x",
            "/org/containers/hirte/node/a_",
            "/org/containers/hirte/node/_61",
            "/org/containers/hirte/node/a_5fb",
            "/org/containers/hirtes",
            "/org/containers/hirte/node/a/b",
            "/com",
        ] {
            assert_eq!(Object::at(unknown), None, "{unknown}");
        }
    }
}
