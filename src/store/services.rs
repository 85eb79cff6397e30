//! Services: deploying, reading by name, exposing, destroying.

use super::acl::Acl;
use super::cas_retry::CasRetry;
use super::credentials::Credential;
use super::delete_tree::{deletions, remove};
use super::environment::Environment;
use super::error::Error;
use super::paths;
use super::records::{
    CHARM_HASH, MAX_SOURCES, NamedService, NamedUnit, Service, corrupt, counter_to_bytes, exposed_to_bytes,
    parse_credentials, parse_exposed,
};
use super::tree::{self, Node, Read, Stat, Tree, Write};
use super::units::{Counter, MAX_UNITS, NewUnits, Placed};
use crate::model::{CharmUrl, Cidr, MachineId, ServiceId, ServiceName, UnitId, UnitName};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// A service to deploy.
#[derive(Debug, Clone)]
pub struct Deploy {
    pub service: ServiceName,
    pub charm: CharmUrl,
    /// Further keys of the service's record: the charm's metadata.
    pub metadata: Map<String, Value>,
    pub units: u32,
    /// The machine that all units go to; it must exist.
    pub to: Option<MachineId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deployed {
    pub service: ServiceId,
    pub units: Vec<Placed>,
}

/// Whether a command changed a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    Changed,
    AlreadySo,
}

/// The result of exposing a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exposed {
    /// It was not exposed before.
    Now,
    /// It was exposed to the same sources before.
    AsBefore,
    /// It was exposed to these sources before, none for the whole world; `None` if they were
    /// unreadable.
    OtherSources { before: Option<Vec<Cidr>> },
}

/// Whether the service has the flag, whatever sources it is limited to.
pub async fn is_exposed<T: Tree>(tree: &T, service: ServiceId) -> Result<bool, tree::Error> {
    tree.exists(&paths::exposed(service)).await
}

impl<T: Tree> Environment<T> {
    /// # Errors
    /// [`Error::ServiceNotFound`], [`Error::Corrupt`] and the failures of the store.
    pub async fn service(&self, name: &ServiceName) -> Result<(ServiceId, Service), Error> {
        let id = self.service_id(name).await?;
        let path = paths::service(id);
        let node = self.tree.find(&path).await?.ok_or_else(|| Error::ServiceNotFound(name.clone()))?;
        Ok((id, Service::parse(&path, &node.data)?))
    }

    pub(super) async fn service_id(&self, name: &ServiceName) -> Result<ServiceId, Error> {
        let path = paths::service_name(name);
        let node = self.tree.find(&path).await?.ok_or_else(|| Error::ServiceNotFound(name.clone()))?;
        Ok(NamedService::parse(&path, &node.data)?.id)
    }

    /// Creates the service, its name, its units and the machines that they need in one write.
    ///
    /// # Errors
    /// [`Error::ServiceExists`], [`Error::MachineNotFound`], [`Error::TooManyUnits`], the failures
    /// of the store.
    pub async fn deploy(&self, wanted: &Deploy) -> Result<Deployed, Error> {
        if wanted.units > MAX_UNITS {
            return Err(Error::TooManyUnits { given: wanted.units, limit: MAX_UNITS });
        }
        let name_path = paths::service_name(&wanted.service);
        let key = self.key()?;
        let retry = key.retry_at(paths::services());
        let work = async |retry: &mut CasRetry| {
            loop {
                let counter = Counter::read(&self.tree, paths::services()).await?;
                match self.tree.get(&name_path).await {
                    Ok(node) => {
                        let found = NamedService::parse(&name_path, &node.data)?;
                        if found.op != key.as_str() {
                            return Err(Error::ServiceExists(wanted.service.clone()));
                        }
                        let units = self.units_marked(&wanted.service, key.as_str()).await;
                        return Ok(Deployed { service: found.id, units: units? });
                    }
                    Err(tree::Error::NoNode(_)) => {}
                    Err(e) => return Err(e.into()),
                }
                let id = ServiceId::new(counter.next());
                let planned = self.plan_units(wanted).await?;
                let record = Service {
                    name: wanted.service.clone(),
                    charm: wanted.charm.clone(),
                    rest: wanted.metadata.clone(),
                };
                let named = NamedService { id, op: key.as_str().to_owned() };
                let mut writes = vec![
                    counter.take(1)?,
                    Write::create(name_path.clone(), named.to_bytes(), self.info.roles.operators()),
                    Write::create(paths::service(id), record.to_bytes(), self.info.roles.operators()),
                ];
                let (more, units) = planned.writes(self, id, key.as_str())?;
                writes.extend(more);
                writes.extend(self.charm_check(wanted.metadata.get(CHARM_HASH)).await?);
                match self.tree.write(writes).await {
                    Ok(()) => return Ok(Deployed { service: id, units }),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    async fn plan_units(&self, wanted: &Deploy) -> Result<NewUnits, Error> {
        let charm = wanted.metadata.get(CHARM_HASH);
        NewUnits::read(self, &wanted.service, wanted.units, wanted.to, charm).await
    }

    /// The names of all services.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn service_names(&self) -> Result<Vec<ServiceName>, Error> {
        let container = paths::service_names();
        let names = self.tree.children(&container).await?;
        let name = |name: &String| {
            name.parse().map_err(|_| corrupt(&container, format!("'{name}' names no service")))
        };
        names.iter().map(name).collect()
    }

    /// Removes the service with all its units. Very many units are removed in several writes; a
    /// second run finishes a removal that a crash interrupted.
    ///
    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn destroy_service(&self, name: &ServiceName) -> Result<(), Error> {
        let retry = self.key()?.retry_at(paths::service_name(name));
        let work = async |retry: &mut CasRetry| {
            loop {
                let id = match self.service_id(name).await {
                    Err(Error::ServiceNotFound(_)) if retry.unsure => return Ok(()),
                    other => other?,
                };
                let numbers = paths::unit_names_of(name);
                // Read before the units, so that the check below fails if a unit is added after
                // this.
                let counter = Counter::read(&self.tree, numbers.clone()).await?;
                let units = self.units_of(name).await?;
                let last = units.len() <= MAX_UNITS as usize;
                let mut roots = self.unit_roots(&units[..units.len().min(MAX_UNITS as usize)]).await?;
                if last {
                    roots.extend([paths::service(id), paths::service_name(name)]);
                }
                let mut writes = vec![counter.check()];
                writes.extend(deletions(&self.tree, roots).await?);
                match remove(&self.tree, writes).await {
                    Ok(()) if last => return Ok(()),
                    Ok(()) => {}
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    /// The current units of a service, by name.
    pub(super) async fn units_of(&self, name: &ServiceName) -> Result<Vec<(UnitName, UnitId)>, Error> {
        let units = self.named_units_of(name).await?;
        Ok(units.into_iter().map(|(name, unit)| (name, unit.id)).collect())
    }

    pub(super) async fn named_units_of(
        &self,
        name: &ServiceName,
    ) -> Result<Vec<(UnitName, NamedUnit)>, Error> {
        let container = paths::unit_names_of(name);
        let mut names = Vec::new();
        for number in self.tree.children(&container).await? {
            let path = container.child(&number);
            let unit =
                format!("{name}/{number}").parse::<UnitName>().map_err(|e| corrupt(&path, e.to_string()))?;
            names.push(unit);
        }
        let reads = names.iter().map(|unit| Read::Data(paths::unit_name(unit))).collect();
        let answers = self.tree.read_many(reads).await?;
        let mut units = Vec::with_capacity(names.len());
        for (unit, answer) in names.into_iter().zip(answers) {
            // A unit may have been removed since it was listed.
            if let Some(node) = answer.into_data() {
                let named = NamedUnit::parse(&paths::unit_name(&unit), &node.data)?;
                units.push((unit, named));
            }
        }
        Ok(units)
    }

    /// Exposes the service to the whole world, and removes any limit on its sources.
    ///
    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn expose(&self, name: &ServiceName) -> Result<Flag, Error> {
        self.expose_to(name, &[]).await
    }

    /// Exposes the service to `sources` only; to the whole world if there are none. An existing
    /// flag is replaced, also an unreadable one.
    ///
    /// # Errors
    /// [`Error::ServiceNotFound`], [`Error::TooManySources`] and the failures of the store.
    pub async fn expose_to(&self, name: &ServiceName, sources: &[Cidr]) -> Result<Flag, Error> {
        Ok(match self.expose_and_compare(name, sources).await? {
            Exposed::AsBefore => Flag::AlreadySo,
            Exposed::Now | Exposed::OtherSources { .. } => Flag::Changed,
        })
    }

    /// Does the same as [`Self::expose_to`], and returns what the service was exposed to before.
    ///
    /// # Errors
    /// As [`Self::expose_to`].
    pub async fn expose_and_compare(&self, name: &ServiceName, sources: &[Cidr]) -> Result<Exposed, Error> {
        let sources: Vec<Cidr> = BTreeSet::from_iter(sources.iter().copied()).into_iter().collect();
        if sources.len() > MAX_SOURCES {
            return Err(Error::TooManySources { given: sources.len(), limit: MAX_SOURCES });
        }
        let data = exposed_to_bytes(&sources);
        let retry = CasRetry::at(paths::service_name(name));
        let work = async |retry: &mut CasRetry| {
            let mut became = Exposed::Now;
            loop {
                let id = self.service_id(name).await?;
                let path = paths::exposed(id);
                let write = match self.tree.get(&path).await {
                    Ok(flag) if is_exposed_to(&path, &flag.data, &sources) => {
                        // After a lost answer, the flag was most likely written by this command.
                        return Ok(if retry.unsure { became } else { Exposed::AsBefore });
                    }
                    Ok(flag) => {
                        became = Exposed::OtherSources { before: parse_exposed(&path, &flag.data).ok() };
                        Write::SetIfVersion { path, data: data.clone(), version: flag.version }
                    }
                    Err(tree::Error::NoNode(_)) => {
                        became = Exposed::Now;
                        Write::create(path, data.clone(), self.flag_acl(id).await?)
                    }
                    Err(e) => return Err(e.into()),
                };
                let mut writes = vec![write];
                writes.extend(self.log_of_change(name, Some(&sources)).await?);
                match self.tree.write(writes).await {
                    Ok(()) => return Ok(became),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    async fn flag_acl(&self, id: ServiceId) -> Result<Acl, Error> {
        let credential = self.service_credential(id).await?;
        Ok(self.info.roles.exposed(credential.map(|credential| credential.identity()).as_ref()))
    }

    /// The credential that a service's units share. `None` for a service of an older version.
    pub(super) async fn service_credential(&self, id: ServiceId) -> Result<Option<Credential>, Error> {
        let path = paths::service_credentials(id);
        let node = self.tree.find(&path).await?;
        node.map(|node| parse_credentials(&path, &node.data)).transpose()
    }

    /// # Errors
    /// [`Error::ServiceNotFound`] and the failures of the store.
    pub async fn unexpose(&self, name: &ServiceName) -> Result<Flag, Error> {
        let retry = CasRetry::at(paths::service_name(name));
        let work = async |retry: &mut CasRetry| {
            loop {
                let id = self.service_id(name).await?;
                let mut writes = deletions(&self.tree, vec![paths::exposed(id)]).await?;
                if writes.is_empty() {
                    return Ok(if retry.unsure { Flag::Changed } else { Flag::AlreadySo });
                }
                // See `unexposed_by_command`.
                let path = paths::service(id);
                if let Some(Node { data, version, .. }) = self.tree.find(&path).await? {
                    writes.push(Write::SetIfVersion { path, data, version });
                }
                writes.extend(self.log_of_change(name, None).await?);
                match remove(&self.tree, writes).await {
                    Ok(()) => return Ok(Flag::Changed),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }
}

/// Returns whether `juju unexpose` removed the flag of a service that has none, according to the
/// metadata of the service's record: `juju unexpose` also writes the record, in the same
/// transaction. After any other removal, the data of the record is older than its list of children.
/// A record that was never written again may have been restored without its flag.
pub fn unexposed_by_command(record: Stat) -> bool {
    record.version > 0 && record.modified == record.children_modified
}

fn is_exposed_to(path: &paths::NodePath, flag: &[u8], sources: &[Cidr]) -> bool {
    parse_exposed(path, flag).is_ok_and(|mut found| {
        found.sort_unstable();
        found == sources
    })
}

/// The first data of a service name's unit counter.
pub(super) fn first_numbers(environment_acl: Acl, name: &ServiceName, next: u32) -> Write {
    Write::create(paths::unit_names_of(name), counter_to_bytes(next), environment_acl)
}
