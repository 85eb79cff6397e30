//! Requests of the operator to the controller: one znode each, in which the controller writes its
//! progress. The operator's client creates the znode, reads it until it is answered, and removes
//! it.

use super::cas_retry::CasRetry;
use super::delete_tree::{deletions, remove};
use super::environment::Environment;
use super::error::Error;
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::records::{MAX_RECORD, corrupt};
use super::tree::{self, Tree, Write};
use serde_json::{Value, json};

/// A task that only a controller can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Take over the provider's groups that have this environment's name and the id of a lost
    /// store.
    AdoptGroups,
    /// Report when the provider has nothing of this environment any more.
    Clear,
}

const ALL: [Request; 2] = [Request::AdoptGroups, Request::Clear];

impl Request {
    fn name(self) -> &'static str {
        match self {
            Self::AdoptGroups => "adopt-groups",
            Self::Clear => "clear",
        }
    }

    fn path(self) -> NodePath {
        paths::request(self.name())
    }
}

pub(super) fn is_request(name: &str) -> bool {
    ALL.iter().any(|request| request.name() == name)
}

/// The progress of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// With the current problem, if there is one.
    Waiting(Option<String>),
    /// With the results, in lines for people.
    Done(Vec<String>),
}

impl Progress {
    fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let wrong = |problem: &str| corrupt(path, problem.to_owned());
        if data.len() > MAX_RECORD {
            return Err(wrong("larger than a request can be"));
        }
        let value: Value = serde_json::from_slice(data).map_err(|_| wrong("not JSON"))?;
        match (value.get("done"), value.get("problem")) {
            (None, problem) => Ok(Self::Waiting(problem.and_then(Value::as_str).map(str::to_owned))),
            (Some(Value::Array(lines)), _) => {
                let lines = lines.iter().map(|line| line.as_str().map(str::to_owned));
                lines
                    .collect::<Option<_>>()
                    .map(Self::Done)
                    .ok_or_else(|| wrong("\"done\" is no list of lines"))
            }
            (Some(_), _) => Err(wrong("\"done\" is no list of lines")),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let value = match self {
            Self::Waiting(None) => json!({}),
            Self::Waiting(Some(problem)) => json!({ "problem": problem }),
            Self::Done(lines) => json!({ "done": lines }),
        };
        value.to_string().into_bytes()
    }
}

/// An unanswered request, as the controller read it.
#[derive(Debug)]
pub struct Pending {
    pub request: Request,
    progress: Option<Progress>,
    version: i32,
}

impl Pending {
    /// Writes the progress while `lease` is held, unless it is written already.
    ///
    /// # Errors
    /// A conflict if the request was withdrawn or the lease was lost, and the failures of the
    /// store.
    pub async fn answer<T: Tree>(
        &self,
        tree: &T,
        lease: &Lease,
        progress: &Progress,
    ) -> Result<(), tree::Error> {
        if self.progress.as_ref() == Some(progress) {
            return Ok(());
        }
        let (path, version) = (self.request.path(), self.version);
        let write = Write::SetIfVersion { path, data: progress.to_bytes(), version };
        tree.write(vec![lease.fence(), write]).await
    }
}

/// All unanswered requests.
pub async fn pending<T: Tree>(tree: &T) -> Result<Vec<Pending>, tree::Error> {
    let mut all = Vec::new();
    let nodes = tree.data_of_each(ALL.map(Request::path).to_vec()).await?;
    for (request, node) in ALL.into_iter().zip(nodes) {
        let Ok(Some(node)) = node else { continue };
        // An unreadable request is answered again.
        let progress = Progress::parse(&request.path(), &node.data).ok();
        if !matches!(progress, Some(Progress::Done(_))) {
            all.push(Pending { request, progress, version: node.version });
        }
    }
    Ok(all)
}

impl<T: Tree> Environment<T> {
    /// Asks the controller. An earlier answer is removed, since it may be outdated.
    pub async fn ask(&self, request: Request) -> Result<(), Error> {
        self.withdraw(request).await?;
        let data = Progress::Waiting(None).to_bytes();
        let write = Write::create(request.path(), data, self.info.roles.controllers());
        match self.tree.write(vec![write]).await {
            Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The controller's progress.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn progress(&self, request: Request) -> Result<Progress, Error> {
        let path = request.path();
        let node = self.tree.get(&path).await?;
        Progress::parse(&path, &node.data)
    }

    /// Removes a request, answered or not.
    pub async fn withdraw(&self, request: Request) -> Result<(), Error> {
        match self.tree.write(vec![Write::Delete { path: request.path() }]).await {
            Ok(()) | Err(tree::Error::NoNode(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a controller leads the environment.
    pub async fn has_controller(&self) -> Result<bool, Error> {
        Ok(self.tree.exists(&paths::leader()).await?)
    }

    /// Removes the whole environment from the store. `/initialized` is removed last, so that an
    /// interrupted removal can be repeated.
    pub async fn remove(&self) -> Result<(), Error> {
        let mut names = self.tree.children(&paths::root()).await?;
        names.retain(|name| name != super::environment::STORES_OWN);
        names.sort_unstable_by_key(|name| paths::root().child(name) == paths::initialized());
        for name in names {
            let path = paths::root().child(&name);
            let mut retry = CasRetry::at(path.clone());
            loop {
                let writes = deletions(&self.tree, vec![path.clone()]).await?;
                if writes.is_empty() {
                    break;
                }
                // Running agents may write meanwhile.
                match remove(&self.tree, writes).await {
                    Ok(()) => break,
                    Err(error) => retry.after(error).await?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::lease::LeaseKey;
    use crate::store::records::Placement;
    use crate::store::{Bootstrap, Credential, MemoryStore};

    fn credentials() -> [Credential; 2] {
        ["operator:x", "controller:y"].map(|text| Credential::parse(text).unwrap())
    }

    fn bootstrap([operator, controller]: &[Credential; 2]) -> Bootstrap {
        Bootstrap {
            environment: "prod".parse().unwrap(),
            placement: Placement::Local,
            operator: operator.identity(),
            controller: controller.identity(),
        }
    }

    #[tokio::test]
    async fn a_request_is_answered_once_and_withdrawn() {
        let (store, who) = (MemoryStore::default(), credentials());
        let made = Environment::bootstrap(store.connect(Some(&who[0])), &bootstrap(&who)).await.unwrap();
        let controller = store.connect(Some(&who[1]));
        assert!(pending(&controller).await.unwrap().is_empty());
        let acl = made.info().roles.controllers();
        let lease = Lease::acquire(&controller, &LeaseKey::firewall(), &acl, "a").await.unwrap();
        for _ in 0..2 {
            made.ask(Request::AdoptGroups).await.unwrap();
        }
        assert_eq!(made.progress(Request::AdoptGroups).await.unwrap(), Progress::Waiting(None));
        let denied = Progress::Waiting(Some("denied".to_owned()));
        let done = Progress::Done(vec!["juju-prod (sg-1): adopted".to_owned()]);
        for progress in [&denied, &done] {
            let found = pending(&controller).await.unwrap();
            assert_eq!(found.iter().map(|found| found.request).collect::<Vec<_>>(), [Request::AdoptGroups]);
            found[0].answer(&controller, &lease, progress).await.unwrap();
            assert_eq!(made.progress(Request::AdoptGroups).await.unwrap(), *progress);
            let again = pending(&controller).await.unwrap();
            for found in again {
                found.answer(&controller, &lease, progress).await.unwrap();
                let version = controller.get(&Request::AdoptGroups.path()).await.unwrap().version;
                assert_eq!(version, found.version, "equal progress is not written again");
            }
        }
        assert!(pending(&controller).await.unwrap().is_empty(), "answered");
        made.ask(Request::AdoptGroups).await.unwrap();
        assert_eq!(made.progress(Request::AdoptGroups).await.unwrap(), Progress::Waiting(None), "asked anew");
        for _ in 0..2 {
            made.withdraw(Request::AdoptGroups).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_removed_environment_can_be_bootstrapped_again() {
        let (store, who) = (MemoryStore::default(), credentials());
        let tree = store.connect(Some(&who[0]));
        let made = Environment::bootstrap(tree.clone(), &bootstrap(&who)).await.unwrap();
        made.add_machine(None).await.unwrap();
        made.ask(Request::Clear).await.unwrap();
        let before = made.info().cluster_id.clone();
        made.remove().await.unwrap();
        assert_eq!(tree.children(&paths::root()).await.unwrap(), [super::super::environment::STORES_OWN]);
        assert!(matches!(Environment::open(tree.clone()).await, Err(Error::NotBootstrapped)));
        let anew = Environment::bootstrap(tree, &bootstrap(&who)).await.unwrap();
        assert_ne!(anew.info().cluster_id, before);
    }
}
