//! The introspection data of an object. Pure.

use super::{INTROSPECTABLE, Interface, PEER, PROPERTIES};

const DOCTYPE: &str = "<!DOCTYPE node PUBLIC \"-//freedesktop//DTD D-BUS Object Introspection 1.0//EN\"\n \
                       \"http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd\">\n";

/// Returns the XML of an object with these interfaces, besides those of every object, and with
/// these children. Names of members and children need no escapes in XML.
pub fn introspect(interfaces: &[&Interface], children: &[String]) -> String {
    let mut xml = format!("{DOCTYPE}<node>\n");
    let standard = [&INTROSPECTABLE, &PEER, &PROPERTIES];
    for interface in interfaces.iter().copied().chain(standard) {
        add(&mut xml, interface);
    }
    for child in children {
        xml += &format!("  <node name=\"{child}\"/>\n");
    }
    xml + "</node>\n"
}

fn add(xml: &mut String, interface: &Interface) {
    *xml += &format!("  <interface name=\"{}\">\n", interface.name);
    for method in interface.methods {
        *xml += &format!("    <method name=\"{}\">\n", method.name);
        for (direction, arguments) in [("in", method.input), ("out", method.output)] {
            for (name, signature) in arguments {
                *xml +=
                    &format!("      <arg name=\"{name}\" type=\"{signature}\" direction=\"{direction}\"/>\n");
            }
        }
        *xml += "    </method>\n";
    }
    for signal in interface.signals {
        *xml += &format!("    <signal name=\"{}\">\n", signal.name);
        for (name, signature) in signal.arguments {
            *xml += &format!("      <arg name=\"{name}\" type=\"{signature}\"/>\n");
        }
        *xml += "    </signal>\n";
    }
    for property in interface.properties {
        let (name, signature) = (property.name, property.signature);
        let changes = if property.is_constant { "const" } else { "true" };
        *xml += &format!(
            "    <property name=\"{name}\" type=\"{signature}\" access=\"read\">\n      <annotation \
             name=\"org.freedesktop.DBus.Property.EmitsChangedSignal\" value=\"{changes}\"/>\n    \
             </property>\n"
        );
    }
    *xml += "  </interface>\n";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::dbus::api::JOB;

    #[test]
    fn every_member_is_in_the_introspection_data() {
        let xml = introspect(&[&JOB], &["_31".to_owned()]);
        for expected in [
            "<interface name=\"org.containers.hirte.Job\">",
            "<method name=\"Cancel\">",
            "<property name=\"State\" type=\"s\" access=\"read\">",
            "<interface name=\"org.freedesktop.DBus.Properties\">",
            "<signal name=\"PropertiesChanged\">",
            "<node name=\"_31\"/>",
        ] {
            assert!(xml.contains(expected), "{expected} in {xml}");
        }
    }
}
