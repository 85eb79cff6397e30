//! Values of systemd's D-Bus interface: properties of units, object paths, and the interface of
//! each type of unit. Pure.

use zbus::{OwnedObjectPath, OwnedVariant, Str};

use crate::fleet::dbus::errors::{CallError, FAILED};
use crate::fleet::dbus::values::Properties;
use crate::fleet::name::{escape, unescape};

use super::UnitState;
use super::unit_cache::Change;

pub(super) const SYSTEMD: &str = "org.freedesktop.systemd1";
pub(super) const SYSTEMD_PATH: &str = "/org/freedesktop/systemd1";
pub(super) const UNIT_INTERFACE: &str = "org.freedesktop.systemd1.Unit";
const UNIT_PREFIX: &str = "/org/freedesktop/systemd1/unit/";
const JOB_PREFIX: &str = "/org/freedesktop/systemd1/job/";

/// Returns the object path of a unit.
pub(super) fn unit_path(unit: &str) -> String {
    format!("{UNIT_PREFIX}{}", escape(unit))
}

/// Returns the name of the unit with this object path.
pub(super) fn unit_of(path: &str) -> Option<String> {
    unescape(path.strip_prefix(UNIT_PREFIX)?)
}

/// Returns the object path of a job.
pub(super) fn job_path(id: u32) -> String {
    format!("{JOB_PREFIX}{id}")
}

/// Returns the id of the job with this object path.
pub(super) fn job_of(path: &str) -> Option<u32> {
    path.strip_prefix(JOB_PREFIX)?.parse().ok()
}

/// Returns the id of the job that a call returned.
pub(super) fn returned_job(path: &OwnedObjectPath) -> Result<u32, CallError> {
    job_of(path.as_str()).ok_or_else(|| CallError::new(FAILED, "systemd returned no path of a job"))
}

/// Returns the interface of a unit's type; `None` if there is no such type.
pub(super) fn type_interface(unit: &str) -> Option<String> {
    let mut letters = unit.rsplit_once('.')?.1.chars();
    let first = letters.next()?.to_ascii_uppercase();
    Some(format!("{SYSTEMD}.{first}{}", letters.as_str()))
}

/// Returns whether units of this type have the property `Result`.
pub(super) fn has_result(unit: &str) -> bool {
    let kind = unit.rsplit_once('.').map_or("", |(_, kind)| kind);
    matches!(kind, "service" | "socket" | "mount" | "automount" | "swap" | "timer" | "path" | "scope")
}

pub(super) fn text_variant(text: &str) -> OwnedVariant {
    // Only file descriptors cannot be copied.
    OwnedVariant::from(Str::from(text.to_owned()))
}

fn text(properties: &Properties, name: &str) -> Option<String> {
    let value = properties.get(name)?;
    <&str>::try_from(&**value).ok().map(str::to_owned)
}

/// Returns the state that the properties of a unit's interface contain, without its result.
pub(super) fn state_of(properties: &Properties) -> UnitState {
    let text = |name| text(properties, name).unwrap_or_default();
    UnitState {
        load: text("LoadState"),
        active: text("ActiveState"),
        sub: text("SubState"),
        file: text("UnitFileState"),
        result: None,
    }
}

/// Returns the observed properties among those that have changed.
pub(super) fn change_of(properties: &Properties) -> Change {
    Change {
        active: text(properties, "ActiveState"),
        sub: text(properties, "SubState"),
        result: text(properties, "Result"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_units_and_jobs() {
        assert_eq!(unit_path("a-b.service"), "/org/freedesktop/systemd1/unit/a_2db_2eservice");
        assert_eq!(unit_of(&unit_path("a@1.service")).as_deref(), Some("a@1.service"));
        assert_eq!((unit_of("/org/freedesktop/systemd1"), unit_of("/x")), (None, None));
        assert_eq!((job_of(&job_path(8)), job_of("/org/freedesktop/systemd1/job/x")), (Some(8), None));
    }

    #[test]
    fn each_type_has_an_interface() {
        assert_eq!(type_interface("a.b.service").as_deref(), Some("org.freedesktop.systemd1.Service"));
        assert_eq!(type_interface("a"), None);
        assert!(has_result("a.timer") && !has_result("a.target") && !has_result("a"));
    }

    #[test]
    fn states_are_properties_and_back() {
        let text = str::to_owned;
        let state = UnitState {
            load: text("loaded"),
            active: text("active"),
            sub: text("running"),
            file: text("enabled"),
            result: Some(text("success")),
        };
        let properties = state.properties();
        assert_eq!(properties.len(), 5);
        assert_eq!(state_of(&properties), UnitState { result: None, ..state.clone() });
        assert_eq!(change_of(&properties).result, state.result);
        assert_eq!(UnitState { result: None, ..state }.properties().len(), 4);
    }
}
