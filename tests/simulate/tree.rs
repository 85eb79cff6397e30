//! The store of an agent: every call passes through `interceptor`, and events are lost, duplicated
//! and delayed.

use std::future::Future;
use std::time::Duration;

use portcullis::store::MemoryTree;
use portcullis::store::acl::Acl;
use portcullis::store::memory::{Backup, MemoryFeed};
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Answer, Error as TreeError, Event, Feed, Node, Read, Stat, Tree, Write};
use tokio::time::{Instant, sleep, timeout_at};

use crate::faults::{Fault, Kind, Mishap};
use crate::interceptor::Interceptor;

/// How long a server may lag before its ensemble removes it.
const BEHIND: Duration = Duration::from_secs(3);

/// Makes the server of this session lag, until it catches up by itself.
pub(crate) fn fall_behind(tree: &MemoryTree, past: &Backup) {
    tree.fall_behind(past);
    let tree = tree.clone();
    tokio::spawn(async move {
        sleep(BEHIND).await;
        tree.sync().await
    });
}

#[derive(Clone)]
pub(crate) struct SimTree {
    pub inner: MemoryTree,
    pub interceptor: Interceptor,
    pub agent: usize,
}

impl SimTree {
    async fn call<V: Send>(
        &self,
        kind: Kind,
        effect: impl Future<Output = Result<V, TreeError>> + Send,
    ) -> Result<V, TreeError> {
        self.faulty(kind, effect).await.1
    }

    async fn faulty<V: Send>(
        &self,
        kind: Kind,
        effect: impl Future<Output = Result<V, TreeError>> + Send,
    ) -> (Option<Fault>, Result<V, TreeError>) {
        let lost = || TreeError::Ambiguous { hosts: "simulated".to_owned() };
        let fault = self.interceptor.before(self.agent, kind, None).await;
        match fault {
            Some(Fault::LostBefore) if kind.is_write() => return (fault, Err(lost())),
            Some(Fault::LostBefore) => {
                return (fault, Err(TreeError::Unreachable { hosts: "simulated".to_owned() }));
            }
            Some(Fault::Expired) => {
                self.interceptor.store.expire(&self.inner);
                if kind.is_write() {
                    return (fault, Err(lost()));
                }
            }
            Some(Fault::Stale) => fall_behind(&self.inner, &self.interceptor.store.backup()),
            _ => {}
        }
        let result = effect.await;
        match &result {
            Ok(_) if kind == Kind::WriteLock => self.interceptor.took_lock(self.agent),
            Ok(_) if matches!(kind, Kind::WriteReports | Kind::WriteRecord) => {
                self.interceptor.reported(self.agent);
            }
            Ok(_) => {}
            Err(err) => self.interceptor.lock().log(format_args!("    refused: {err}")),
        }
        self.interceptor.after(self.agent, fault).await;
        (fault, if fault == Some(Fault::LostAfter) { Err(lost()) } else { result })
    }
}

impl Tree for SimTree {
    type Feed = SimFeed;

    async fn get(&self, path: &NodePath) -> Result<Node, TreeError> {
        let found = self.call(Kind::Get, self.inner.get(path)).await;
        if found.is_ok() && *path == paths::leader() {
            self.interceptor.confirmed(self.agent);
        }
        found
    }

    async fn stat(&self, path: &NodePath) -> Result<Option<Stat>, TreeError> {
        self.call(Kind::Get, self.inner.stat(path)).await
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, TreeError> {
        let kind = if *path == paths::machines() { Kind::ReadMachines } else { Kind::ReadMany };
        let (fault, names) = self.faulty(kind, self.inner.children(path)).await;
        if fault == Some(Fault::Empty) { Ok(Vec::new()) } else { names }
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, TreeError>>, TreeError> {
        let lists = matches!(reads.first(), Some(Read::Children(path)) if *path == paths::services());
        let kind = if lists { Kind::ReadLists } else { Kind::ReadMany };
        let on_machines =
            matches!(reads.first(), Some(Read::Children(path)) if path.as_str().ends_with("/units"));
        let (fault, answers) = self.faulty(kind, self.inner.read_each(reads)).await;
        let mut answers = answers?;
        // A read that returns no units returns empty machine lists, too.
        if on_machines && !lists && self.interceptor.lock().lists_were_empty {
            for answer in &mut answers {
                if let Ok(Answer::Children(Some(names))) = answer {
                    names.clear();
                }
            }
        }
        if fault == Some(Fault::Empty) {
            // The lists are services, units and machines, in this order. With an empty list of
            // machines the agent would do nothing.
            for answer in answers.iter_mut().take(2) {
                if let Ok(Answer::Children(Some(names))) = answer {
                    names.clear();
                }
            }
        }
        Ok(answers)
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), TreeError> {
        if writes.iter().any(|write| *write.path() == paths::controller_checkpoint()) {
            self.interceptor.lock().checkpoints += 1;
        }
        self.call(Kind::of_write(&writes), self.inner.write(writes)).await
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), TreeError> {
        self.call(Kind::WriteOwnNodes, self.inner.set_acl(path, acl)).await
    }

    async fn sync(&self) -> Result<(), TreeError> {
        self.interceptor.syncs(self.agent);
        self.call(Kind::Sync, self.inner.sync()).await
    }

    async fn watch(&self, path: &NodePath) -> Result<SimFeed, TreeError> {
        let inner = self.call(Kind::Watch, self.inner.watch(path)).await?;
        Ok(SimFeed { inner, interceptor: self.interceptor.clone(), again: None, late: None })
    }
}

/// A feed that loses, duplicates and reorders events as the record demands.
pub(crate) struct SimFeed {
    inner: MemoryFeed,
    pub interceptor: Interceptor,
    again: Option<Event>,
    late: Option<(Event, Instant)>,
}

impl Feed for SimFeed {
    async fn next(&mut self) -> Result<Event, TreeError> {
        loop {
            if let Some(event) = self.again.take() {
                return Ok(event);
            }
            if let Some((_, until)) = self.late {
                // The next event overtakes the delayed one.
                let other = timeout_at(until, self.inner.next()).await;
                self.again = self.late.take().map(|(event, _)| event);
                if let Ok(other) = other {
                    return other;
                }
                continue;
            }
            let event = self.inner.next().await?;
            if event == Event::Everything {
                return Ok(event);
            }
            match self.interceptor.lock().next_event() {
                None => return Ok(event),
                Some(Mishap::EventDoubled) => {
                    self.again = Some(event.clone());
                    return Ok(event);
                }
                Some(Mishap::EventReordered) => {
                    self.late = Some((event, Instant::now() + Duration::from_millis(30)));
                }
                Some(_) => {}
            }
        }
    }
}
