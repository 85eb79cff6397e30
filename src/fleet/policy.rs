//! The D-Bus policy file of the system bus: every user may read the state of nodes and units; only
//! root, and the members of one group, may change something. The manager checks callers as well.
//! Pure.

use super::dbus::api::{
    INTROSPECTABLE, Interface, JOB, MANAGER, MONITOR, MethodEffect, NODE, PEER, PROPERTIES,
};
use super::dbus::names::{AGENT_BUS_NAME, BUS_NAME};

const INTERFACES: [&Interface; 7] = [&INTROSPECTABLE, &PEER, &PROPERTIES, &MANAGER, &MONITOR, &NODE, &JOB];

/// Returns the policy file. The name of the group must not need escapes in XML.
pub fn policy(group: Option<&str>) -> String {
    let all = format!("    <allow send_destination=\"{BUS_NAME}\"/>\n");
    let group = group.map(|group| format!("  <policy group=\"{group}\">\n{all}  </policy>\n"));
    let reading = INTERFACES.iter().flat_map(|interface| {
        let reads = interface.methods.iter().filter(|method| method.effect == MethodEffect::Reads);
        reads.map(move |method| {
            format!(
                "    <allow send_destination=\"{BUS_NAME}\" send_interface=\"{}\"\n           \
                 send_member=\"{}\"/>\n",
                interface.name, method.name
            )
        })
    });
    document(BUS_NAME, &reading.collect::<String>(), &group.unwrap_or_default())
}

/// Returns the policy file of an agent: only root may have its name and call it.
pub fn agent_policy() -> String {
    document(AGENT_BUS_NAME, "", "")
}

/// Returns a policy file that reserves a name for root. `reading` are the rules for all users, and
/// `others` further policies.
fn document(name: &str, reading: &str, others: &str) -> String {
    format!(
        "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN\"\n \
         \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n\
         <busconfig>\n  \
         <policy context=\"default\">\n    \
         <deny own=\"{name}\"/>\n    \
         <deny send_destination=\"{name}\"/>\n\
         {reading}  \
         </policy>\n\
         {others}  \
         <policy user=\"root\">\n    \
         <allow own=\"{name}\"/>\n    \
         <allow send_destination=\"{name}\"/>\n  \
         </policy>\n\
         </busconfig>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_group_may_call_everything() {
        let text = policy(Some("fleet"));
        let (default, rest) = text.split_once("</policy>").unwrap();
        for reading in ["ListUnits", "Subscribe", "GetUnitProperties", "GetAll", "Introspect"] {
            assert!(default.contains(&format!("send_member=\"{reading}\"")), "{reading}");
        }
        for changing in ["StartUnit", "KillUnit", "Cancel", "SetLogLevel", "EnableUnitFiles"] {
            assert!(!text.contains(changing), "{changing}");
        }
        let all = "<allow send_destination=\"org.containers.hirte\"/>";
        assert!(!default.contains(all), "{default}");
        let group = rest.split_once("<policy group=\"fleet\">").unwrap().1.split_once("</policy>").unwrap().0;
        assert!(group.contains(all) && !group.contains("own="), "{group}");
        let root = rest.split_once("<policy user=\"root\">").unwrap().1;
        assert!(root.contains(all) && root.contains("<allow own=\"org.containers.hirte\"/>"), "{root}");
        assert!(!policy(None).contains("group"));
    }
}
