//! Lists of all nodes. The rows borrow from the replies of the nodes: there may be tens of
//! thousands.

use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::iter;
use tokio::time::timeout;
use tracing::{debug, warn};
use zbus::message::Header;
use zbus::{Message, ObjectPath};

use super::Manager;
use super::agent::Link;
use super::node_call::call_error;
use super::report::FailedUnits;
use crate::fleet::dbus::errors::CallError;
use crate::fleet::dbus::names;
use crate::fleet::name::NodeName;

/// The time that each node has to list its units for a client. A node that takes longer is left
/// out.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);
/// The time that a node has for a report. A node that takes longer keeps its last report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Nodes that are read at the same time for a report, which no client waits for.
const REPORTS_AT_ONCE: usize = 16;

/// A row of a node's `ListUnits`.
type Row<'a> =
    (&'a str, &'a str, &'a str, &'a str, &'a str, &'a str, ObjectPath<'a>, u32, &'a str, ObjectPath<'a>);

/// Calls a method without arguments of a node. Only the wait for the reply can be cancelled here: a
/// send never waits.
async fn ask(link: Link, method: &'static str, most: Duration) -> zbus::Result<Message> {
    let (path, interface) = (names::INTERNAL_AGENT_PATH, Some(names::INTERNAL_AGENT_INTERFACE));
    let called = link.connection.call_method(None::<()>, path, interface, method, &());
    timeout(most, called).await.unwrap_or_else(|late| Err(io::Error::from(late).into()))
}

impl Manager {
    /// Returns the replies of all online nodes. A node that fails, or is too slow, is left out.
    async fn ask_all(&self, method: &'static str) -> Vec<(NodeName, Message)> {
        let asked = self.links().into_iter();
        let asked = asked.map(async |(name, link)| (name, ask(link, method, LIST_TIMEOUT).await));
        let answered = join_all(asked).await.into_iter();
        answered
            .filter_map(|(name, reply)| Some((reply.map_err(|error| failed(&name, error)).ok()?, name)))
            .map(|(reply, name)| (name, reply))
            .collect()
    }

    /// Returns the reply to a call of `ListUnits`.
    pub(super) async fn list_units(&self, call: &Header<'_>) -> Result<Message, CallError> {
        let replies = self.ask_all("ListUnits").await;
        let bodies: Vec<_> = replies.iter().map(|(name, reply)| (name, reply.body())).collect();
        let mut rows = Vec::new();
        for (name, body) in &bodies {
            match body.deserialize::<Vec<Row<'_>>>() {
                Ok(listed) => rows.extend(listed.into_iter().map(|row| {
                    let (unit, about, load, active, sub, follows, path, job, kind, job_path) = row;
                    (name.as_str(), unit, about, load, active, sub, follows, path, job, kind, job_path)
                })),
                Err(error) => failed(name, error),
            }
        }
        Ok(Message::method_return(call).build(&rows)?)
    }

    /// Returns the reply to a call of `ListUnitFiles`.
    pub(super) async fn list_unit_files(&self, call: &Header<'_>) -> Result<Message, CallError> {
        let replies = self.ask_all("ListUnitFiles").await;
        let bodies: Vec<_> = replies.iter().map(|(name, reply)| (name, reply.body())).collect();
        let mut rows = Vec::new();
        for (name, body) in &bodies {
            match body.deserialize::<Vec<(&str, &str)>>() {
                Ok(listed) => {
                    rows.extend(listed.into_iter().map(|(file, state)| (name.as_str(), file, state)));
                }
                Err(error) => failed(name, error),
            }
        }
        Ok(Message::method_return(call).build(&rows)?)
    }

    /// Returns the failed units of the connected nodes; of those that do not answer, the known
    /// ones.
    pub(super) async fn read_failed_units(&self, known: &FailedUnits) -> FailedUnits {
        let reads = self.links().into_iter().map(async |(name, link)| {
            let reply = ask(link, "ListUnits", REPORT_TIMEOUT).await;
            let read = reply.and_then(|reply| {
                let body = reply.body();
                let rows: Vec<Row<'_>> = body.deserialize()?;
                let failed = rows.into_iter().filter(|row| row.3 == "failed");
                let mut failed: Vec<String> = failed.map(|row| row.0.to_owned()).collect();
                failed.sort_unstable();
                Ok(failed)
            });
            if let Err(error) = &read {
                debug!(node = %name, %error, "cannot list the units of a node");
            }
            let units = read.ok().or_else(|| known.get(&name).cloned());
            units.map(|units| (name, units))
        });
        iter(reads).buffer_unordered(REPORTS_AT_ONCE).filter_map(std::future::ready).collect().await
    }
}

fn failed(node: &NodeName, error: zbus::Error) {
    warn!(%node, error = %call_error(node, error), "cannot list the units of a node");
}
