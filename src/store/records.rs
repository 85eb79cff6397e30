//! The contents of znodes as values. Pure. Parsing is strict about known keys and keeps unknown
//! ones, so that a record of a later version is written back with all its keys. Corrupt data is an
//! error that names the znode, never an empty value.

mod host;

use super::credentials::{Credential, Identity};
use super::error::Error;
use super::paths::NodePath;
use crate::model::{
    CharmUrl, Cidr, EnvironmentName, InstanceId, MachineId, NodeName, ServiceId, ServiceName, UnitId,
    UnitName,
};
use serde_json::{Map, Value, json};

pub(super) use host::NamedMachine;
pub use host::{Host, MAX_ADDRESSES};

/// The instance id of the local machine in an environment of one machine.
pub const LOCAL_INSTANCE: &str = "local";

/// The key of the charm's hash in the records of services and units.
pub const CHARM_HASH: &str = "charm-hash";

/// The maximum size of a record.
pub const MAX_RECORD: usize = 64 * 1024;

/// A service's record at `/services/service-*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    pub name: ServiceName,
    pub charm: CharmUrl,
    /// Unknown keys, and the charm's metadata.
    pub rest: Map<String, Value>,
}

/// A unit's record at `/units/unit-*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    pub name: UnitName,
    pub service: ServiceId,
    pub machine: Option<MachineId>,
    pub rest: Map<String, Value>,
}

/// A machine's record at `/machines/machine-*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// `None` until the controller has launched it.
    pub instance_id: Option<InstanceId>,
    /// The name that the operator gave to it, if any.
    pub name: Option<NodeName>,
    /// The first is the public one. A machine with addresses and without an instance exists
    /// already: the operator gave its address, and the controller does not launch it.
    pub addresses: Vec<String>,
    /// The instance existed before: it is released, never terminated.
    pub adopted: bool,
    pub rest: Map<String, Value>,
}

impl Machine {
    /// The name that the operator gave to the machine, if any.
    pub fn node_name(&self) -> Option<&str> {
        self.name.as_ref().map(NodeName::as_str)
    }
}

/// The machines of units that the operator did not assign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Everything on machine 0.
    Local,
    /// The lowest machine without units, or a new one.
    Unassigned,
}

/// The record at `/initialized`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Initialized {
    pub environment: EnvironmentName,
    pub cluster_id: String,
    pub placement: Placement,
    pub roles: super::acl::Roles,
}

/// The fields of one znode's JSON object. Parsing removes the known ones; the rest is kept.
struct Fields<'a> {
    path: &'a NodePath,
    map: Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn parse(path: &'a NodePath, data: &[u8]) -> Result<Self, Error> {
        if data.len() > MAX_RECORD {
            return Err(corrupt(
                path,
                format!("{} bytes are more than the {MAX_RECORD} allowed", data.len()),
            ));
        }
        match crate::model::strict_json::parse(data) {
            Ok(Value::Object(map)) => Ok(Self { path, map }),
            Ok(_) => Err(corrupt(path, "not a JSON object".to_owned())),
            Err(e) => Err(corrupt(path, format!("not JSON: {e}"))),
        }
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, problem: &str) -> Error {
        corrupt(self.path, format!("\"{key}\" {problem}"))
    }

    /// A text that `read` accepts; `None` if absent or null.
    fn optional<V, E: std::fmt::Display>(
        &mut self,
        key: &str,
        read: impl FnOnce(&str) -> Result<V, E>,
    ) -> Result<Option<V>, Error> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => {
                read(&text).map(Some).map_err(|e| self.bad(key, &format!("is wrong: {e}")))
            }
            Some(_) => Err(self.bad(key, "is not a text")),
        }
    }

    fn required<V, E: std::fmt::Display>(
        &mut self,
        key: &str,
        read: impl FnOnce(&str) -> Result<V, E>,
    ) -> Result<V, Error> {
        self.optional(key, read)?.ok_or_else(|| self.bad(key, "is missing"))
    }

    fn number(&mut self, key: &str) -> Result<u32, Error> {
        let value = self.take(key).ok_or_else(|| self.bad(key, "is missing"))?;
        value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| self.bad(key, "is not a number of 32 bits"))
    }
}

pub(super) fn corrupt(path: &NodePath, problem: String) -> Error {
    Error::Corrupt { path: path.clone(), problem }
}

fn to_bytes(known: Value, rest: &Map<String, Value>) -> Vec<u8> {
    let mut map = match known {
        Value::Object(map) => map,
        other => unreachable!("records are objects, not {other}"),
    };
    for (key, value) in rest {
        map.entry(key).or_insert_with(|| value.clone());
    }
    Value::Object(map).to_string().into_bytes()
}

impl Service {
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        Ok(Self {
            name: fields.required("name", str::parse)?,
            charm: fields.required("charm", str::parse)?,
            rest: fields.map,
        })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(json!({"name": self.name.as_str(), "charm": self.charm.to_string()}), &self.rest)
    }
}

impl Unit {
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        Ok(Self {
            name: fields.required("name", str::parse)?,
            service: fields.required("service", ServiceId::from_key)?,
            machine: fields.optional("machine", MachineId::from_key)?,
            rest: fields.map,
        })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let known = json!({
            "name": self.name.to_string(),
            "service": self.service.key(),
            "machine": self.machine.map(MachineId::key),
        });
        to_bytes(known, &self.rest)
    }
}

impl Machine {
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        let instance_id = fields.optional("instance-id", str::parse)?;
        let addresses = match fields.take("addresses") {
            None => Vec::new(),
            Some(Value::Array(items)) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text),
                    _ => Err(fields.bad("addresses", "holds what is not a text")),
                })
                .collect::<Result<_, _>>()?,
            Some(_) => return Err(fields.bad("addresses", "is not a list")),
        };
        let name = fields.optional("name", str::parse)?;
        let adopted = match fields.take("adopted") {
            None => false,
            Some(Value::Bool(adopted)) => adopted,
            Some(_) => return Err(fields.bad("adopted", "is neither true nor false")),
        };
        Ok(Self { instance_id, name, addresses, adopted, rest: fields.map })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut known = json!({
            "instance-id": self.instance_id.as_ref().map(InstanceId::as_str),
            "addresses": self.addresses,
        });
        if let Some(name) = &self.name {
            known["name"] = Value::from(name.as_str());
        }
        if self.adopted {
            known["adopted"] = Value::Bool(true);
        }
        to_bytes(known, &self.rest)
    }
}

impl Initialized {
    const FORMAT: u32 = 1;

    /// # Errors
    /// [`Error::Corrupt`], naming `path`; also for a format that a later version wrote.
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        let format = fields.number("format")?;
        if format != Self::FORMAT {
            return Err(fields.bad("format", &format!("is {format}; this version knows {}", Self::FORMAT)));
        }
        Ok(Self {
            environment: fields.required("environment", str::parse)?,
            cluster_id: fields.required("cluster-id", |text| Ok::<_, String>(text.to_owned()))?,
            placement: fields.required("placement", |text| match text {
                "local" => Ok(Placement::Local),
                "unassigned" => Ok(Placement::Unassigned),
                _ => Err("it is neither local nor unassigned"),
            })?,
            roles: super::acl::Roles {
                operator: fields.required("operator", Identity::parse)?,
                controller: fields.required("controller", Identity::parse)?,
            },
        })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let placement = match self.placement {
            Placement::Local => "local",
            Placement::Unassigned => "unassigned",
        };
        let known = json!({
            "environment": self.environment.as_str(),
            "cluster-id": self.cluster_id,
            "placement": placement,
            "operator": self.roles.operator.as_str(),
            "controller": self.roles.controller.as_str(),
            "format": Self::FORMAT,
        });
        known.to_string().into_bytes()
    }
}

/// The maximum number of sources that a service is exposed to.
pub const MAX_SOURCES: usize = 50;

/// The data of an `exposed` flag: the sources that it is limited to, none for the whole world.
/// Empty data is the flag of the first Juju.
///
/// # Errors
/// [`Error::Corrupt`], naming `path`. An unreadable limit is never treated as no limit.
pub fn parse_exposed(path: &NodePath, data: &[u8]) -> Result<Vec<Cidr>, Error> {
    if data.is_empty() {
        return Ok(Vec::new());
    }
    let mut fields = Fields::parse(path, data)?;
    let sources = match fields.take("to") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) if !items.is_empty() && items.len() <= MAX_SOURCES => items,
        Some(_) => return Err(fields.bad("to", "is not a list of 1 to 50 sources")),
    };
    let parse = |item: Value| item.as_str().and_then(|text| text.parse().ok());
    let sources: Option<Vec<Cidr>> = sources.into_iter().map(parse).collect();
    sources.ok_or_else(|| fields.bad("to", "holds what is not a block of addresses"))
}

pub fn exposed_to_bytes(sources: &[Cidr]) -> Vec<u8> {
    let mut flag = json!({});
    if !sources.is_empty() {
        flag["to"] = sources.iter().map(Cidr::to_string).collect();
    }
    flag.to_string().into_bytes()
}

/// The maximum length of a machine's problem in status.
const MAX_PROBLEM_CHARS: usize = 1000;

/// The problem that keeps a machine from running its units, if there is one.
pub fn parse_machine_problem(path: &NodePath, data: &[u8]) -> Result<Option<String>, Error> {
    if data.is_empty() {
        return Ok(None);
    }
    let shown = |text: &str| {
        Ok::<_, String>(text.chars().filter(|c| !c.is_control()).take(MAX_PROBLEM_CHARS).collect())
    };
    Fields::parse(path, data)?.required("problem", shown).map(Some)
}

pub fn machine_problem_to_bytes(problem: Option<&str>) -> Vec<u8> {
    problem.map_or_else(Vec::new, |problem| json!({"problem": problem}).to_string().into_bytes())
}

/// The part of a unit's `state` znode that status shows; only the unit's agent reads the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitState {
    /// For example `started` or `install-error`.
    pub label: String,
    /// The hook that failed and why, and the last lines of its output.
    pub failure: Option<(String, Vec<String>)>,
}

impl UnitState {
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        let any = |text: &str| Ok::<_, String>(text.to_owned());
        let label = fields.required("state", any)?;
        let failure = match fields.take("error") {
            None => None,
            Some(Value::Object(map)) => {
                let mut error = Fields { path, map };
                let (hook, reason) = (error.required("hook", any)?, error.required("reason", any)?);
                let output = error.required("output", any)?;
                Some((format!("{hook} hook: {reason}"), output.lines().map(str::to_owned).collect()))
            }
            Some(_) => return Err(fields.bad("error", "is not an object")),
        };
        Ok(Self { label, failure })
    }
}

/// An entry of the index of names. After a lost answer, the idempotency key `op` shows which
/// command created it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedService {
    pub(super) id: ServiceId,
    pub(super) op: String,
}

impl NamedService {
    pub(super) fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        Ok(Self {
            id: fields.required("id", ServiceId::from_key)?,
            op: fields.required("op", |text| Ok::<_, String>(text.to_owned()))?,
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        json!({"id": self.id.key(), "op": self.op}).to_string().into_bytes()
    }
}

/// As [`NamedService`], for a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedUnit {
    pub(super) id: UnitId,
    pub(super) op: String,
}

impl NamedUnit {
    pub(super) fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields::parse(path, data)?;
        Ok(Self {
            id: fields.required("id", UnitId::from_key)?,
            op: fields.required("op", |text| Ok::<_, String>(text.to_owned()))?,
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        json!({"id": self.id.key(), "op": self.op}).to_string().into_bytes()
    }
}

/// The id in an entry of the index of names, of a service or a unit.
pub fn named_id(path: &NodePath, data: &[u8]) -> Result<String, Error> {
    Fields::parse(path, data)?.required("id", |text| Ok::<_, String>(text.to_owned()))
}

/// The data of a counter: the next unused number.
pub(super) fn parse_counter(path: &NodePath, data: &[u8]) -> Result<u32, Error> {
    Fields::parse(path, data)?.number("next")
}

pub(super) fn counter_to_bytes(next: u32) -> Vec<u8> {
    json!({"next": next}).to_string().into_bytes()
}

/// The secret of its service in a unit's credentials. Units of older versions have none.
pub fn parse_service_credential(path: &NodePath, data: &[u8]) -> Result<Option<Credential>, Error> {
    Fields::parse(path, data)?.optional("service-auth", Credential::parse)
}

/// The data of a `credentials` znode.
pub fn parse_credentials(path: &NodePath, data: &[u8]) -> Result<Credential, Error> {
    Fields::parse(path, data)?.required("auth", Credential::parse)
}

pub(super) fn credentials_to_bytes(credential: &Credential) -> Vec<u8> {
    json!({"auth": credential.expose()}).to_string().into_bytes()
}

pub(super) fn unit_credentials_to_bytes(unit: &Credential, service: &Credential) -> Vec<u8> {
    json!({"auth": unit.expose(), "service-auth": service.expose()}).to_string().into_bytes()
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
