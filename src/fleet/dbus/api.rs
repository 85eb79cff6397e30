//! The public D-Bus API as data: the single source of the introspection data, of the reference page
//! and of the checks of calls. Pure.

mod document;
mod interfaces;
mod introspect;

pub use document::document;
pub use interfaces::{INTROSPECTABLE, JOB, MANAGER, MONITOR, NODE, PEER, PROPERTIES};
pub use introspect::introspect;

/// An argument: its name and its signature.
pub type Argument = (&'static str, &'static str);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interface {
    pub name: &'static str,
    /// The object path, with `$` for a variable part.
    pub path: &'static str,
    pub about: &'static str,
    pub methods: &'static [Method],
    pub signals: &'static [Signal],
    pub properties: &'static [Property],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Method {
    pub name: &'static str,
    pub input: &'static [Argument],
    pub output: &'static [Argument],
    /// Further signatures of the input that are accepted, for clients of other versions. They are
    /// not in the introspection data, which has one signature for each name.
    pub also: &'static [&'static str],
    pub effect: MethodEffect,
    pub about: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodEffect {
    /// Every client may call the method.
    Reads,
    /// Only root and members of the group of `--bus-group` may call it, because it changes
    /// something or returns secrets.
    Changes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    pub name: &'static str,
    pub arguments: &'static [Argument],
    pub about: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Property {
    pub name: &'static str,
    pub signature: &'static str,
    /// Whether the property never changes. All others emit `PropertiesChanged`.
    pub is_constant: bool,
    pub about: &'static str,
}

impl Interface {
    pub fn method(&self, name: &str) -> Option<&'static Method> {
        self.methods.iter().find(|method| method.name == name)
    }

    pub fn property(&self, name: &str) -> Option<&'static Property> {
        self.properties.iter().find(|property| property.name == name)
    }
}

impl Method {
    /// Whether a call has one of the accepted signatures. One structure and its fields as separate
    /// arguments have the same encoding, and are accepted alike.
    pub fn accepts(&self, signature: &str) -> bool {
        let given = fields(signature);
        given == fields(&self.input_signature()) || self.also.contains(&given)
    }

    /// Whether an answer has the signature of the output.
    pub fn returns(&self, signature: &str) -> bool {
        let output: String = self.output.iter().map(|(_, signature)| *signature).collect();
        fields(signature) == fields(&output)
    }

    pub fn input_signature(&self) -> String {
        self.input.iter().map(|(_, signature)| *signature).collect()
    }
}

/// Returns the signature of the fields of one structure, or the signature itself.
fn fields(signature: &str) -> &str {
    let inside = signature.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
    inside.unwrap_or(signature)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_accepted_with_each_signature() {
        let unsubscribe = MONITOR.method("Unsubscribe").unwrap();
        for (signature, accepted) in [("u", true), ("ss", true), ("s", false), ("", false)] {
            assert_eq!(unsubscribe.accepts(signature), accepted, "{signature}");
        }
        for (signature, accepted) in [("(sas)", true), ("sas", true), ("s", false)] {
            assert_eq!(MONITOR.method("SubscribeList").unwrap().accepts(signature), accepted);
        }
        assert!(MANAGER.method("ListUnits").unwrap().accepts(""));
        assert!(NODE.method("Missing").is_none());
    }
}
