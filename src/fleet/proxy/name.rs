//! The names of proxy services: `hirte-proxy@NODE_UNIT.service` on the source, and
//! `hirte-dep@UNIT.service` on the target. Pure.

use crate::fleet::name::{BadName, NodeName, check_systemd_unit};

const PROXY: &str = "hirte-proxy@";
const DEP: &str = "hirte-dep@";
const SERVICE: &str = ".service";

/// The reason why the name of a proxy service is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadProxyName {
    #[error("the name of a proxy service has the form hirte-proxy@NODE_UNIT.service")]
    Form,
    #[error("'{0}' is not the name of a node")]
    Node(String),
    #[error(transparent)]
    Unit(#[from] BadName),
}

/// Returns the node and the systemd unit that a proxy service stands for. The instance is split at
/// the first `_`. systemd's escapes of `@` and `\` are decoded; all other text is taken as it is,
/// because `-` and `\x2d` are two different names of units.
///
/// # Errors
/// If the name has another form, or the node or the unit can have no such name.
pub fn target_of(proxy: &str) -> Result<(NodeName, String), BadProxyName> {
    let instance = proxy.strip_prefix(PROXY).and_then(|rest| rest.strip_suffix(SERVICE));
    let (node, unit) = instance.and_then(|text| text.split_once('_')).ok_or(BadProxyName::Form)?;
    if node.is_empty() || unit.is_empty() {
        return Err(BadProxyName::Form);
    }
    let unit = unit.replace("\\x40", "@").replace("\\x5c", "\\");
    let node = node.parse().map_err(|_| BadProxyName::Node(node.chars().take(64).collect()))?;
    let unit = format!("{unit}{SERVICE}");
    check_systemd_unit(&unit)?;
    check_systemd_unit(&dep_of(&unit))?;
    Ok((node, unit))
}

/// Returns the service that keeps a unit needed on its node.
pub fn dep_of(systemd_unit: &str) -> String {
    format!("{DEP}{systemd_unit}")
}

/// Returns the unit that is kept needed by this service; `None` for other services.
pub fn unit_of_dep(systemd_unit: &str) -> Option<&str> {
    systemd_unit.strip_prefix(DEP).filter(|unit| unit.len() > SERVICE.len() && unit.ends_with(SERVICE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_split_at_the_first_underscore() {
        for (proxy, node, unit) in [
            ("hirte-proxy@bar_db.service", "bar", "db.service"),
            ("hirte-proxy@bar_my_db.service", "bar", "my_db.service"),
            ("hirte-proxy@bar_my-db.v1.service", "bar", "my-db.v1.service"),
            ("hirte-proxy@bar_my\\x2ddb.service", "bar", "my\\x2ddb.service"),
            ("hirte-proxy@bar_db\\x40x.service", "bar", "db@x.service"),
            ("hirte-proxy@bar_db@x.service", "bar", "db@x.service"),
            ("hirte-proxy@bar_a\\x5cx2db.service", "bar", "a\\x2db.service"),
            ("hirte-proxy@web-1.example_db.service", "web-1.example", "db.service"),
        ] {
            let expected = (node.parse().unwrap(), unit.to_owned());
            assert_eq!(target_of(proxy), Ok(expected), "{proxy}");
        }
    }

    #[test]
    fn other_names_are_refused_with_the_reason() {
        for (proxy, expected) in [
            ("hirte-proxy@bardb.service", "has the form"),
            ("hirte-proxy@_db.service", "has the form"),
            ("hirte-proxy@bar_.service", "has the form"),
            ("hirte-proxy@bar_db", "has the form"),
            ("need-db.service", "has the form"),
            ("hirte-proxy@a b_db.service", "is not the name of a node"),
            ("hirte-proxy@bar_d/b.service", "invalid systemd unit name"),
        ] {
            let refused = target_of(proxy).unwrap_err().to_string();
            assert!(refused.contains(expected), "{proxy}: {refused}");
        }
        let long = format!("hirte-proxy@b_{}.service", "a".repeat(240));
        assert!(matches!(target_of(&long), Err(BadProxyName::Unit(BadName::LongUnit))));
    }

    #[test]
    fn deps_have_the_name_of_their_unit_as_instance() {
        for unit in ["db.service", "db@x.service", "a\\x2db.service"] {
            assert_eq!(unit_of_dep(&dep_of(unit)), Some(unit));
        }
        for other in ["db.service", "hirte-dep@.service", "hirte-proxy@a_b.service"] {
            assert_eq!(unit_of_dep(other), None, "{other}");
        }
    }
}
