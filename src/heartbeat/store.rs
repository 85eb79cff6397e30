//! Reads and writes the heartbeat znodes as values. It makes no decisions: `tracker`, `judge` and
//! the operator's commands decide what is written, and when.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value};
use tracing::warn;

use crate::heartbeat::core::journal::{self, page_from_bytes};
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::params::{InvalidParams, Params};
use crate::heartbeat::core::record::{Batch, Hold, Record, bucket_from_bytes, bucket_of};
use crate::heartbeat::core::webhook_queue::WebhookProgress;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::heartbeat::{self, Single, page_numbers};
pub use crate::store::heartbeat::{batch_names, replicas, tracker_urls};
use crate::store::paths::{self, NodePath};
use crate::store::tree::{self, Node, Tree};
use crate::store::update::{Change, ensure_with, update};

/// The maximum number of components in maintenance at the same time.
const MAX_MAINTENANCE: usize = 500;

#[derive(Debug, thiserror::Error)]
pub enum ParamsError {
    #[error(transparent)]
    Invalid(#[from] InvalidParams),
    #[error(transparent)]
    Store(#[from] Error),
}

fn corrupt(path: &NodePath, problem: impl Into<String>) -> Error {
    Error::Corrupt { path: path.clone(), problem: problem.into() }
}

/// Creates missing znodes with default values.
pub async fn ensure<T: Tree>(tree: &T, roles: &Roles) -> Result<(), Error> {
    ensure_as(tree, roles, &Params::default(), &HashMap::new()).await
}

/// Creates missing znodes with these parameters and maintenances: a running tracker passes its own,
/// in case the store has lost them.
pub async fn ensure_as<T: Tree>(
    tree: &T,
    roles: &Roles,
    params: &Params,
    maintenance: &HashMap<Name, u64>,
) -> Result<(), Error> {
    let nodes = [
        (paths::heartbeat(), Vec::new()),
        (paths::heartbeat_replicas(), Vec::new()),
        (paths::heartbeat_batches(), Vec::new()),
        (paths::heartbeat_buckets(), Vec::new()),
        (paths::heartbeat_journal(), Vec::new()),
        (paths::heartbeat_params(), Value::Object(params.to_json()).to_string().into_bytes()),
        (paths::heartbeat_maintenance(), maintenance_bytes(maintenance)),
        (paths::heartbeat_release(), b"0".to_vec()),
        (paths::heartbeat_alarm(), b"null".to_vec()),
        (paths::heartbeat_question(), b"0".to_vec()),
        (paths::heartbeat_webhook(), b"0".to_vec()),
        (paths::heartbeat_trackers(), b"[]".to_vec()),
    ];
    for (path, data) in nodes {
        ensure_with(tree, &path, &data, &roles.controllers()).await?;
    }
    Ok(())
}

fn object(path: &NodePath, node: &Node) -> Result<Map<String, Value>, Error> {
    match serde_json::from_slice(&node.data) {
        Ok(Value::Object(object)) => Ok(object),
        _ => Err(corrupt(path, "no JSON object")),
    }
}

/// # Errors
/// [`Error::Corrupt`] and the failures of the store.
pub async fn params<T: Tree>(tree: &T) -> Result<(Params, i32), Error> {
    let node = Single::Params.read(tree).await?;
    Ok((parse_params(&node)?, node.version))
}

fn parse_params(node: &Node) -> Result<Params, Error> {
    let path = paths::heartbeat_params();
    let stored = object(&path, node)?;
    Params::default().patched(&stored).map_err(|problem| corrupt(&path, problem.to_string()))
}

/// Changes the parameters for every replica.
///
/// # Errors
/// [`ParamsError::Invalid`], and the failures of the store.
pub async fn set_params<T: Tree>(tree: &T, change: &Map<String, Value>) -> Result<Params, ParamsError> {
    let path = paths::heartbeat_params();
    update(tree, &path, |node| {
        let params = parse_params(node)?;
        let next = params.patched(change)?;
        if next == params {
            return Ok(Change::Keep(next));
        }
        Ok(Change::Set(Value::Object(next.to_json()).to_string().into_bytes(), next))
    })
    .await
}

/// The components in maintenance, each with the end as wall-clock time.
///
/// # Errors
/// [`Error::Corrupt`] and the failures of the store.
pub async fn maintenance<T: Tree>(tree: &T) -> Result<(HashMap<Name, u64>, i32), Error> {
    let node = Single::Maintenance.read(tree).await?;
    Ok((parse_maintenance(&node)?, node.version))
}

fn parse_maintenance(node: &Node) -> Result<HashMap<Name, u64>, Error> {
    let path = paths::heartbeat_maintenance();
    let entry = |(name, until): (String, Value)| Some((Name::parse(&name).ok()?, until.as_u64()?));
    let entries = object(&path, node)?.into_iter().map(entry);
    entries.collect::<Option<_>>().ok_or_else(|| corrupt(&path, "not names with times"))
}

fn maintenance_bytes(until: &HashMap<Name, u64>) -> Vec<u8> {
    let sorted: BTreeMap<&str, u64> = until.iter().map(|(name, end)| (name.as_str(), *end)).collect();
    serde_json::json!(sorted).to_string().into_bytes()
}

/// Sets a maintenance or, with `None`, ends it. Expired maintenances are removed.
///
/// # Errors
/// [`Error::Contended`] and the failures of the store.
pub async fn set_maintenance<T: Tree>(
    tree: &T,
    name: &Name,
    until: Option<u64>,
    wall: u64,
) -> Result<(), Error> {
    let path = paths::heartbeat_maintenance();
    update(tree, &path, |node| {
        let mut entries = parse_maintenance(node)?;
        entries.retain(|other, end| other != name && *end > wall);
        entries.extend(until.map(|until| (*name, until)));
        if entries.len() > MAX_MAINTENANCE {
            return Err(corrupt(&path, format!("more than {MAX_MAINTENANCE} names in maintenance")));
        }
        Ok(Change::Set(maintenance_bytes(&entries), ()))
    })
    .await
}

/// Releases held deaths: the judge declares them.
pub async fn release<T: Tree>(tree: &T) -> Result<(), Error> {
    let next = |node: &Node| Ok(Change::Set((node.version + 1).to_string().into_bytes(), ()));
    update(tree, &paths::heartbeat_release(), next).await
}

/// How often an operator has released held deaths.
pub async fn releases<T: Tree>(tree: &T) -> Result<i32, Error> {
    Ok(Single::Release.read(tree).await?.version)
}

/// A value that only the judge writes, or why it is unreadable; and the version, with which it can
/// be overwritten in any case.
pub type Stored<V> = (Result<V, Error>, i32);

/// The mass outage; `None` also where no tracker ever ran.
pub async fn alarm<T: Tree>(tree: &T) -> Result<Stored<Option<Hold>>, Error> {
    match Single::Alarm.read(tree).await {
        Ok(node) => {
            let alarm = serde_json::from_slice(&node.data);
            Ok((alarm.map_err(|_| corrupt(&Single::Alarm.path(), "no alarm")), node.version))
        }
        Err(tree::Error::NoNode(_)) => Ok((Ok(None), 0)),
        Err(err) => Err(err.into()),
    }
}

/// The number of the judge's newest request for beats.
pub async fn flush_request<T: Tree>(tree: &T) -> Result<Stored<u64>, Error> {
    let node = Single::Question.read(tree).await?;
    let number = std::str::from_utf8(&node.data).ok().and_then(|text| text.parse().ok());
    Ok((number.ok_or_else(|| corrupt(&Single::Question.path(), "no number")), node.version))
}

/// The progress of the webhook.
pub async fn webhook_progress<T: Tree>(tree: &T) -> Result<Stored<WebhookProgress>, Error> {
    let node = Single::Webhook.read(tree).await?;
    let progress = WebhookProgress::from_bytes(&node.data);
    Ok((progress.ok_or_else(|| corrupt(&Single::Webhook.path(), "no note")), node.version))
}

/// A page of the journal as read.
pub type Page = journal::Read<Error>;

pub async fn newest_page<T: Tree>(tree: &T) -> Result<Option<u64>, Error> {
    Ok(page_numbers(tree).await?.pop())
}

/// The pages of the journal from this one on, oldest first.
///
/// # Errors
/// The failures of the store; a garbled page fails alone.
pub async fn journal<T: Tree>(tree: &T, from: u64) -> Result<Vec<Page>, Error> {
    let page = |(number, Node { data, version, .. })| {
        let path = paths::heartbeat_page(number);
        let changes = page_from_bytes(&data).map_err(|problem| corrupt(&path, problem.to_string()));
        Page { number, version, data, changes }
    };
    Ok(heartbeat::pages(tree, from).await?.into_iter().map(page).collect())
}

/// The number of the last change in the journal; 0 if there is none, `None` if it cannot be read.
pub async fn journal_end<T: Tree>(tree: &T) -> Result<Option<u64>, Error> {
    let Some(newest) = newest_page(tree).await? else { return Ok(Some(0)) };
    let pages = journal(tree, newest).await?;
    Ok(pages.last().and_then(|page| page.changes.as_ref().ok()?.last().map(|change| change.sequence)))
}

/// A bucket: its number, its records or why they are unreadable, and its version.
pub type Bucket = (u16, Result<Vec<Record>, Error>, i32);

/// Missing buckets are left out.
///
/// # Errors
/// The failures of the store; a garbled bucket fails alone.
pub async fn buckets<T: Tree>(
    tree: &T,
    numbers: impl IntoIterator<Item = u16>,
) -> Result<Vec<Bucket>, Error> {
    let bucket = |(number, node): (u16, Node)| {
        let path = paths::heartbeat_bucket(number);
        let records = bucket_from_bytes(&node.data).map_err(|problem| corrupt(&path, problem.to_string()));
        (number, records, node.version)
    };
    let found = heartbeat::buckets(tree, numbers.into_iter().collect()).await?;
    Ok(found.into_iter().map(bucket).collect())
}

/// All buckets.
///
/// # Errors
/// As for [`buckets`].
pub async fn all_buckets<T: Tree>(tree: &T) -> Result<Vec<Bucket>, Error> {
    buckets(tree, heartbeat::bucket_numbers(tree).await?).await
}

/// Batches by name; `None` for a deleted one.
///
/// # Errors
/// The failures of the store; a garbled batch fails alone.
pub async fn batches<T: Tree>(
    tree: &T,
    names: &[String],
) -> Result<Vec<Result<Option<Batch>, Error>>, Error> {
    let parse = |(name, node): (&String, Option<Node>)| {
        let batch = node.map(|node| Batch::from_bytes(&node.data)).transpose();
        batch.map_err(|problem| corrupt(&heartbeat::batch_path(name), problem.to_string()))
    };
    Ok(names.iter().zip(heartbeat::batches(tree, names).await?).map(parse).collect())
}

/// The components, and the problems of those that cannot be read.
#[derive(Debug, Default)]
pub struct Overview {
    pub records: Vec<Record>,
    /// By bucket: an unreadable bucket hides only its own components.
    pub problems: BTreeMap<u16, Error>,
    /// Trackers that lost their session without a final batch and may still accept beats: deaths of
    /// their components are held.
    pub lost_trackers: usize,
    /// Components of unreadable buckets that beat or changed lately, with the wall-clock time of
    /// the newest stored beat, or 0.
    pub unreadable: BTreeMap<Name, u64>,
}

/// All components, for people: each record with the wall-clock time of the newest stored beat,
/// sorted by name.
///
/// # Errors
/// The failures of the store. An environment that no tracker ever ran in has no components.
pub async fn overview<T: Tree>(tree: &T) -> Result<Overview, Error> {
    if !heartbeat::has_buckets(tree).await? {
        return Ok(Overview::default());
    }
    let buckets = all_buckets(tree).await?;
    with_beats(tree, buckets, |_| true).await
}

/// Like [`overview`], for some components, without reading the others.
///
/// # Errors
/// As for [`overview`].
pub async fn overview_of<T: Tree>(tree: &T, names: &BTreeSet<Name>) -> Result<Overview, Error> {
    if names.is_empty() || !heartbeat::has_buckets(tree).await? {
        return Ok(Overview::default());
    }
    let numbers: BTreeSet<u16> = names.iter().map(|name| bucket_of(name.as_str())).collect();
    let buckets = buckets(tree, numbers).await?;
    with_beats(tree, buckets, |name| names.contains(name)).await
}

async fn with_beats<T: Tree>(
    tree: &T,
    buckets: Vec<Bucket>,
    wanted: impl Fn(&Name) -> bool,
) -> Result<Overview, Error> {
    let (mut records, mut problems) = (Vec::new(), BTreeMap::new());
    for (number, bucket, _) in buckets {
        match bucket {
            Ok(bucket) => records.extend(bucket.into_iter().filter(|record| wanted(&record.name))),
            Err(problem) => drop(problems.insert(number, problem)),
        }
    }
    let mut heard: HashMap<Name, u64> = HashMap::new();
    let names = batch_names(tree).await?;
    let present = replicas(tree).await?;
    let mut lost: BTreeSet<&str> = BTreeSet::new();
    // Batches are in the order of their numbers, so the last one of a tracker decides.
    for (name, batch) in names.iter().zip(batches(tree, &names).await?) {
        let batch = match batch {
            Ok(Some(batch)) => batch,
            Ok(None) => continue,
            // The newest beats may be missing; the states are in the buckets.
            Err(problem) => {
                warn!(%problem, "batch unreadable");
                continue;
            }
        };
        if let Some((replica, _)) = paths::heartbeat_batch_of(name).filter(|(id, _)| !present.contains(*id)) {
            let _ = if batch.is_final { lost.remove(replica) } else { lost.insert(replica) };
        }
        for beat in batch.beats.iter().filter(|beat| wanted(&beat.name)) {
            let at = heard.entry(beat.name).or_default();
            *at = (*at).max(batch.at.saturating_sub(beat.age_ms));
        }
    }
    for record in &mut records {
        record.beat_at = record.beat_at.max(heard.get(&record.name).copied().unwrap_or(0));
    }
    records.sort_unstable_by_key(|record| record.name);
    let is_hidden = |name: &Name| problems.contains_key(&bucket_of(name.as_str()));
    let mut unreadable: BTreeMap<Name, u64> = heard.into_iter().filter(|(name, _)| is_hidden(name)).collect();
    if !problems.is_empty() {
        for page in journal(tree, 0).await? {
            let names = page.changes.unwrap_or_default().into_iter().map(|change| change.name);
            for name in names.filter(|name| wanted(name) && is_hidden(name)) {
                unreadable.entry(name).or_default();
            }
        }
    }
    Ok(Overview { records, problems, lost_trackers: lost.len(), unreadable })
}
