//! The host of a machine as its agent reports it, and the index of machines by name. Pure.

use serde_json::{Value, json};

use super::{Fields, NodePath, corrupt};
use crate::model::{HostAddress, MachineId};
use crate::store::error::Error;

/// The maximum number of addresses that a machine reports.
pub const MAX_ADDRESSES: usize = 16;
const MAX_HOSTNAME: usize = 253;

/// The data of `/machines/machine-*/host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The host name that the machine has itself.
    pub hostname: String,
    /// The first is the one that is shown.
    pub addresses: Vec<HostAddress>,
}

impl Host {
    /// Makes a report that other programs accept: control characters are left out, and surplus
    /// addresses.
    pub fn new(hostname: &str, addresses: impl IntoIterator<Item = HostAddress>) -> Self {
        let hostname = hostname.chars().filter(|c| !c.is_control()).take(MAX_HOSTNAME).collect();
        Self { hostname, addresses: addresses.into_iter().take(MAX_ADDRESSES).collect() }
    }

    /// # Errors
    /// [`Error::Corrupt`], naming `path`.
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        let hostname = fields.required("hostname", |text| {
            let is_shown = text.chars().count() <= MAX_HOSTNAME && !text.chars().any(char::is_control);
            if is_shown { Ok(text.to_owned()) } else { Err("it is too long or has control characters") }
        })?;
        let addresses = match fields.take("addresses") {
            Some(Value::Array(items)) if items.len() <= MAX_ADDRESSES => items,
            _ => return Err(fields.bad("addresses", "is not a list of at most 16 addresses")),
        };
        let parse = |item: Value| item.as_str().and_then(|text| text.parse().ok());
        let addresses: Option<Vec<HostAddress>> = addresses.into_iter().map(parse).collect();
        let addresses = addresses
            .ok_or_else(|| corrupt(path, "\"addresses\" holds what is not an address".to_owned()))?;
        Ok(Self { hostname, addresses })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let addresses: Vec<&str> = self.addresses.iter().map(HostAddress::as_str).collect();
        json!({"hostname": self.hostname, "addresses": addresses}).to_string().into_bytes()
    }
}

/// An entry of the index of machines by name, as [`NamedService`](super::NamedService).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) struct NamedMachine {
    pub(in crate::store) id: MachineId,
    pub(in crate::store) op: String,
}

impl NamedMachine {
    pub(in crate::store) fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        Ok(Self {
            id: fields.required("id", MachineId::from_key)?,
            op: fields.required("op", |text| Ok::<_, String>(text.to_owned()))?,
        })
    }

    pub(in crate::store) fn to_bytes(&self) -> Vec<u8> {
        json!({"id": self.id.key(), "op": self.op}).to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::paths;

    #[test]
    fn a_report_is_read_back_and_a_malformed_one_is_refused() {
        let path = paths::machine_host(MachineId::new(3));
        let addresses = ["192.0.2.7", "2001:db8::7", "web1.example.com"].map(|text| text.parse().unwrap());
        let host = Host::new("web1\u{1b}", addresses);
        assert_eq!(host.hostname, "web1");
        assert_eq!(Host::parse(&path, &host.to_bytes()).unwrap(), host);
        let many = Host::new("web1", vec![addresses_of("192.0.2.7"); 40]);
        assert_eq!(Host::parse(&path, &many.to_bytes()).unwrap().addresses.len(), MAX_ADDRESSES);
        for bad in [
            r"",
            r"[]",
            r#"{"addresses":[]}"#,
            r#"{"hostname":"a\u001b","addresses":[]}"#,
            r#"{"hostname":"a"}"#,
            r#"{"hostname":"a","addresses":["a b"]}"#,
            r#"{"hostname":"a","addresses":[7]}"#,
        ] {
            let refused = Host::parse(&path, bad.as_bytes()).unwrap_err().to_string();
            assert!(refused.starts_with("/machines/machine-0000000003/host: "), "{bad}: {refused}");
        }
    }

    fn addresses_of(text: &str) -> HostAddress {
        text.parse().unwrap()
    }
}
