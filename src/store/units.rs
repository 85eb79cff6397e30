//! Units: added to a service, placed on machines, removed.

use super::acl::Acl;
use super::cas_retry::CasRetry;
use super::credentials::{Credential, Identity};
use super::delete_tree::{deletions, remove};
use super::environment::{Environment, LOCAL_MACHINE};
use super::error::Error;
use super::machines::machine_writes;
use super::paths::{self, NodePath};
use super::placement::{Assignment, Rule, assign};
use super::records::{
    CHARM_HASH, Machine, NamedUnit, Placement, Service, Unit, corrupt, counter_to_bytes,
    credentials_to_bytes, parse_counter, parse_credentials, parse_service_credential,
    unit_credentials_to_bytes,
};
use super::services::first_numbers;
use super::tree::{self, Read, Tree, Write};
use super::update::write_at;
use crate::model::{MachineId, ServiceId, ServiceName, UnitId, UnitName};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The maximum number of units that one write creates or removes; they fit into one request.
pub const MAX_UNITS: u32 = 200;

/// A new unit and its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub id: UnitId,
    pub name: UnitName,
    pub machine: MachineId,
}

/// A unit as its agent reads it.
#[derive(Debug)]
pub struct UnitRead {
    pub record: Unit,
    pub credential: Credential,
    /// The credential that the units of its service share, if they have one.
    pub shared: Option<Credential>,
    /// The state of its workflow, if it has one yet.
    pub state: Option<tree::Node>,
    /// Whether it is marked as run by an agent.
    pub agent: bool,
}

/// Reads a unit; `None` if it was removed.
///
/// # Errors
/// [`Error::Corrupt`] and the failures of the store.
pub async fn read_unit<T: Tree>(tree: &T, id: UnitId) -> Result<Option<UnitRead>, Error> {
    let secret = paths::unit_credentials(id);
    let nodes = [paths::unit(id), secret.clone(), paths::unit_state(id), paths::unit_agent(id)];
    let mut nodes = match tree.read_many(nodes.map(Read::Data).into()).await {
        Ok(nodes) => nodes.into_iter().map(tree::Answer::into_data),
        // The unit, and with it the permission to read it, was removed during the read.
        Err(tree::Error::NoNode(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut next = || nodes.next().flatten();
    let (Some(record), Some(credentials)) = (next(), next()) else { return Ok(None) };
    Ok(Some(UnitRead {
        record: Unit::parse(&paths::unit(id), &record.data)?,
        credential: parse_credentials(&secret, &credentials.data)?,
        shared: parse_service_credential(&secret, &credentials.data)?,
        state: next(),
        agent: next().is_some(),
    }))
}

/// Whether the unit was not removed.
pub async fn unit_exists<T: Tree>(tree: &T, id: UnitId) -> Result<bool, tree::Error> {
    tree.exists(&paths::unit(id)).await
}

/// Writes the state of a unit's workflow at the version that was read; `None` creates it. Returns
/// whether it was written: another client may have written in between.
///
/// # Errors
/// [`tree::Error::NoNode`] if the unit was removed, and the failures of the store.
pub async fn write_unit_state<T: Tree>(
    tree: &T,
    id: UnitId,
    state: Vec<u8>,
    version: Option<i32>,
    acl: Acl,
) -> Result<bool, tree::Error> {
    write_at(tree, paths::unit_state(id), state, version, acl).await
}

/// A counter as read. Numbers are taken by compare-and-swap in the same write that uses them,
/// because a write cannot contain the name that a sequential create would get.
#[derive(Debug, Clone)]
pub(super) struct Counter {
    path: NodePath,
    next: u32,
    version: i32,
}

impl Counter {
    pub(super) async fn read<T: Tree>(tree: &T, path: NodePath) -> Result<Self, Error> {
        let node = tree.get(&path).await?;
        Ok(Self { next: parse_counter(&path, &node.data)?, version: node.version, path })
    }

    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Takes `count` numbers, beginning with [`Self::next`].
    pub(super) fn take(&self, count: u32) -> Result<Write, Error> {
        let next = self
            .next
            .checked_add(count)
            .ok_or_else(|| corrupt(&self.path, "the numbers are used up".to_owned()))?;
        let data = counter_to_bytes(next);
        Ok(Write::SetIfVersion { path: self.path.clone(), data, version: self.version })
    }

    /// A step that fails if a number was taken since.
    pub(super) fn check(&self) -> Write {
        Write::Check { path: self.path.clone(), version: self.version }
    }
}

/// New units of one service, assigned to machines but not yet written.
#[derive(Debug)]
pub(super) struct NewUnits {
    service: ServiceName,
    units: Counter,
    machines: Counter,
    /// `None` if the service name was never used.
    numbers: Option<Counter>,
    assignments: Vec<Assignment>,
    /// Identities of the existing machines.
    identities: BTreeMap<MachineId, Identity>,
    /// The secret that the service's units share; `None` if it has to be created.
    credential: Option<Credential>,
    /// The hash of the charm in the service's record, copied to its units.
    charm: Option<Value>,
}

impl NewUnits {
    /// Reads the counters before the machines: a unit that another client adds meanwhile takes a
    /// number, so that the write of this plan fails.
    pub(super) async fn read<T: Tree>(
        environment: &Environment<T>,
        service: &ServiceName,
        count: u32,
        to: Option<MachineId>,
        charm: Option<&Value>,
    ) -> Result<Self, Error> {
        let tree = &environment.tree;
        let units = Counter::read(tree, paths::units()).await?;
        let machines = Counter::read(tree, paths::machines()).await?;
        let numbers = match Counter::read(tree, paths::unit_names_of(service)).await {
            Ok(counter) => Some(counter),
            Err(Error::Tree(tree::Error::NoNode(_))) => None,
            Err(e) => return Err(e),
        };
        let credential = match environment.service_id(service).await {
            Ok(id) => environment.service_credential(id).await?,
            Err(Error::ServiceNotFound(_)) => None,
            Err(e) => return Err(e),
        };
        let rule = match (to, environment.info.placement) {
            (Some(machine), _) => Rule::To(machine),
            (None, Placement::Local) => Rule::To(LOCAL_MACHINE),
            (None, Placement::Unassigned) => Rule::Empty,
        };
        let candidates = match rule {
            Rule::To(machine) => vec![machine],
            Rule::Empty => environment.machine_ids().await?,
        };
        let (identities, carried) = look_at(tree, &candidates).await?;
        if let Rule::To(machine) = rule
            && !carried.contains_key(&machine)
        {
            return Err(Error::MachineNotFound(machine));
        }
        let assignments = assign(count, rule, &carried, machines.next())
            .ok_or_else(|| corrupt(&paths::machines(), "the numbers are used up".to_owned()))?;
        let (service, charm) = (service.clone(), charm.cloned());
        Ok(Self { service, units, machines, numbers, assignments, identities, credential, charm })
    }

    /// The writes that create the units and the machines that they need.
    pub(super) fn writes<T: Tree>(
        mut self,
        environment: &Environment<T>,
        service: ServiceId,
        op: &str,
    ) -> Result<(Vec<Write>, Vec<Placed>), Error> {
        let roles = &environment.info.roles;
        let count = u32::try_from(self.assignments.len())
            .map_err(|_| Error::TooManyUnits { given: u32::MAX, limit: MAX_UNITS })?;
        let new_machines = self.assignments.iter().filter(|assignment| assignment.new).count();
        let first_number = self.numbers.as_ref().map_or(0, Counter::next);
        let mut writes = vec![match &self.numbers {
            Some(numbers) => numbers.take(count)?,
            None => first_numbers(roles.operators(), &self.service, count),
        }];
        if count > 0 {
            writes.push(self.units.take(count)?);
        }
        if new_machines > 0 {
            writes.push(self.machines.take(u32::try_from(new_machines).unwrap_or(u32::MAX))?);
        }
        let shared = match self.credential.take() {
            Some(credential) => credential,
            None => {
                let made = Credential::generate(&service.key())?;
                let path = paths::service_credentials(service);
                writes.push(Write::create(path, credentials_to_bytes(&made), roles.service_credentials()));
                made
            }
        };
        let mut placed = Vec::with_capacity(self.assignments.len());
        for (offset, assignment) in (0..count).zip(std::mem::take(&mut self.assignments)) {
            if assignment.new {
                let credential = Credential::generate(&assignment.machine.key())?;
                self.identities.insert(assignment.machine, credential.identity());
                writes.extend(machine_writes(roles, assignment.machine, &Machine::wanted(), &credential));
            }
            let unit = Placed {
                id: UnitId::new(self.units.next() + offset),
                name: UnitName::new(self.service.clone(), first_number + offset),
                machine: assignment.machine,
            };
            let machine =
                self.identities.get(&assignment.machine).ok_or(Error::MachineNotFound(assignment.machine))?;
            let mut record =
                Unit { name: unit.name.clone(), service, machine: Some(unit.machine), rest: Map::new() };
            if let Some(charm) = &self.charm {
                record.rest.insert(CHARM_HASH.to_owned(), charm.clone());
            }
            writes.extend(unit_writes(roles, (unit.id, &record), &shared, machine, op)?);
            placed.push(unit);
        }
        Ok((writes, placed))
    }
}

/// The identities of some machines, and the number of units on each. Removed machines are left out.
async fn look_at<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<(BTreeMap<MachineId, Identity>, BTreeMap<MachineId, usize>), Error> {
    let reads = machines.iter().flat_map(|&machine| {
        [Read::Data(paths::machine_credentials(machine)), Read::Children(paths::machine_units(machine))]
    });
    let mut answers = tree.read_many(reads.collect()).await?.into_iter();
    let (mut identities, mut carried) = (BTreeMap::new(), BTreeMap::new());
    for &machine in machines {
        let credentials = answers.next().and_then(|answer| answer.into_data());
        let units = answers.next().and_then(|answer| answer.into_children());
        if let (Some(node), Some(units)) = (credentials, units) {
            let credential = parse_credentials(&paths::machine_credentials(machine), &node.data)?;
            identities.insert(machine, credential.identity());
            carried.insert(machine, units.len());
        }
    }
    Ok((identities, carried))
}

/// A unit's znodes. All rights are set here and never change, because rights cannot be changed in
/// the same write as anything else; a unit stays on its machine.
fn unit_writes(
    roles: &super::acl::Roles,
    (id, record): (UnitId, &Unit),
    shared: &Credential,
    machine: &Identity,
    op: &str,
) -> Result<Vec<Write>, Error> {
    let credential = Credential::generate(&id.key())?;
    let named = NamedUnit { id, op: op.to_owned() };
    let mut writes = vec![
        Write::create(paths::unit(id), record.to_bytes(), roles.unit(machine)),
        // Created empty: a unit may write it, but a right to create it would be a right to create
        // any znode.
        Write::create(paths::unit_ports(id), Vec::new(), roles.unit_ports(machine, &credential.identity())),
        Write::create(
            paths::unit_credentials(id),
            unit_credentials_to_bytes(&credential, shared),
            roles.unit_credentials(machine),
        ),
        Write::create(paths::unit_name(&record.name), named.to_bytes(), roles.operators()),
    ];
    if let Some(assignment) = record.machine {
        writes.push(Write::create(
            paths::machine_unit(assignment, id),
            Vec::new(),
            roles.machine_units(machine),
        ));
    }
    Ok(writes)
}

impl<T: Tree> Environment<T> {
    /// # Errors
    /// [`Error::ServiceNotFound`], [`Error::MachineNotFound`], [`Error::TooManyUnits`], the
    /// failures of the store.
    pub async fn add_units(
        &self,
        service: &ServiceName,
        count: u32,
        to: Option<MachineId>,
    ) -> Result<Vec<Placed>, Error> {
        if count > MAX_UNITS {
            return Err(Error::TooManyUnits { given: count, limit: MAX_UNITS });
        }
        let key = self.key()?;
        let retry = key.retry_at(paths::units());
        let work = async |retry: &mut CasRetry| {
            loop {
                let id = self.service_id(service).await?;
                if retry.unsure {
                    let made = self.units_marked(service, key.as_str()).await;
                    let made = made?;
                    if !made.is_empty() {
                        return Ok(made);
                    }
                }
                let service_path = paths::service(id);
                let (check, record) = match self.tree.get(&service_path).await {
                    Ok(node) => (
                        Write::Check { path: service_path.clone(), version: node.version },
                        Service::parse(&service_path, &node.data)?,
                    ),
                    Err(tree::Error::NoNode(_)) => return Err(Error::ServiceNotFound(service.clone())),
                    Err(e) => return Err(e.into()),
                };
                let planned = NewUnits::read(self, service, count, to, record.rest.get(CHARM_HASH)).await?;
                let (mut writes, placed) = planned.writes(self, id, key.as_str())?;
                writes.push(check);
                match self.tree.write(writes).await {
                    Ok(()) => return Ok(placed),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    /// The existing units of a service that a command created.
    pub(super) async fn units_marked(&self, service: &ServiceName, mark: &str) -> Result<Vec<Placed>, Error> {
        let mut made = Vec::new();
        for (name, named) in
            self.named_units_of(service).await?.into_iter().filter(|(_, unit)| unit.op == mark)
        {
            let path = paths::unit(named.id);
            let node = self.tree.get(&path).await?;
            // A unit never changes its machine.
            let machine = Unit::parse(&path, &node.data)?
                .machine
                .ok_or_else(|| corrupt(&path, "the unit is on no machine".to_owned()))?;
            made.push(Placed { id: named.id, name, machine });
        }
        made.sort_unstable_by_key(|unit| unit.id);
        Ok(made)
    }

    /// # Errors
    /// [`Error::UnitNotFound`], [`Error::Corrupt`] and the failures of the store.
    pub async fn unit(&self, name: &UnitName) -> Result<(UnitId, Unit), Error> {
        let id = self.unit_id(name).await?;
        let path = paths::unit(id);
        let node = self.tree.find(&path).await?.ok_or_else(|| Error::UnitNotFound(name.clone()))?;
        Ok((id, Unit::parse(&path, &node.data)?))
    }

    async fn unit_id(&self, name: &UnitName) -> Result<UnitId, Error> {
        let path = paths::unit_name(name);
        let node = self.tree.find(&path).await?.ok_or_else(|| Error::UnitNotFound(name.clone()))?;
        Ok(NamedUnit::parse(&path, &node.data)?.id)
    }

    /// # Errors
    /// [`Error::UnitNotFound`] and the failures of the store.
    pub async fn remove_unit(&self, name: &UnitName) -> Result<(), Error> {
        let retry = self.key()?.retry_at(paths::unit_name(name));
        let work = async |retry: &mut CasRetry| {
            loop {
                let id = match self.unit_id(name).await {
                    Err(Error::UnitNotFound(_)) if retry.unsure => return Ok(()),
                    other => other?,
                };
                let roots = self.unit_roots(&[(name.clone(), id)]).await?;
                let writes = deletions(&self.tree, roots).await?;
                match remove(&self.tree, writes).await {
                    Ok(()) => return Ok(()),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    /// All znodes of these units.
    pub(super) async fn unit_roots(&self, units: &[(UnitName, UnitId)]) -> Result<Vec<NodePath>, Error> {
        let reads = units.iter().map(|(_, id)| Read::Data(paths::unit(*id))).collect();
        let answers = self.tree.read_many(reads).await?;
        let (mut roots, mut missing) = (Vec::with_capacity(units.len() * 3), Vec::new());
        for ((name, id), answer) in units.iter().zip(answers) {
            let path = paths::unit(*id);
            if let Some(node) = answer.into_data() {
                let machine = Unit::parse(&path, &node.data)?.machine;
                roots.extend(machine.map(|machine| paths::machine_unit(machine, *id)));
            } else {
                missing.push(*id);
            }
            roots.extend([path, paths::unit_name(name)]);
        }
        roots.extend(self.listed_anywhere(&missing).await?);
        Ok(roots)
    }

    /// The entries of these units on the lists of machines. Only units whose record is missing need
    /// a search.
    async fn listed_anywhere(&self, units: &[UnitId]) -> Result<Vec<NodePath>, Error> {
        if units.is_empty() {
            return Ok(Vec::new());
        }
        let machines = self.machine_ids().await?;
        let lists = machines.iter().map(|id| Read::Children(paths::machine_units(*id))).collect();
        let mut found = Vec::new();
        for (machine, answer) in machines.iter().zip(self.tree.read_many(lists).await?) {
            let names = answer.into_children().unwrap_or_default();
            let listed = units.iter().filter(|id| names.contains(&id.key()));
            found.extend(listed.map(|id| paths::machine_unit(*machine, *id)));
        }
        Ok(found)
    }

    /// The credential of a unit's hooks, for `juju hook-env` and the machine's agent.
    ///
    /// # Errors
    /// [`Error::UnitNotFound`] and the failures of the store.
    pub async fn unit_credential(&self, name: &UnitName) -> Result<Credential, Error> {
        let path = paths::unit_credentials(self.unit_id(name).await?);
        let node = self.tree.find(&path).await?.ok_or_else(|| Error::UnitNotFound(name.clone()))?;
        parse_credentials(&path, &node.data)
    }
}
