//! The machine's side: it requests a certificate for its own key through the store, waits for the
//! answer, and saves every certificate that the issuer writes later.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::files::{FilesError, MachineIdentity};
use crate::model::{MachineId, error_chain, number_name};
use crate::net::tls::authority::{Names, Request};
use crate::net::tls::certificate::Certificate;
use crate::net::tls::key::PrivateKey;
use crate::runtime::clock::{utc, wall_ms};
use crate::store::acl::Roles;
use crate::store::certificates::{Answer, Answered, put_request, read_answer, read_request, request_hash};
use crate::store::changes::Watched;
use crate::store::tree::{self, Feed as _, Tree};
use crate::store::{Error, Identity};

/// The certificate is read again after this time, because events get lost.
const READ_AGAIN: Duration = Duration::from_secs(600);

/// Pause after a failure.
const PAUSE: Duration = Duration::from_secs(2);

/// A machine that has credentials for the store.
#[derive(Debug, Clone)]
pub struct Machine {
    pub id: MachineId,
    /// The identity of its credentials.
    pub identity: Identity,
    pub roles: Roles,
}

#[derive(Debug, thiserror::Error)]
pub enum ObtainError {
    #[error("the request for a certificate was refused: {0}")]
    Refused(String),
    #[error("the certificate expired at {until}; `juju machine renew {machine}` issues a new one")]
    Expired { machine: MachineId, until: String },
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Store(#[from] Error),
}

impl From<tree::Error> for ObtainError {
    fn from(error: tree::Error) -> Self {
        Self::Store(error.into())
    }
}

impl Machine {
    /// Requests a certificate for a key and waits for it. Returns the chain in PEM form, the
    /// machine's certificate first and that of the CA last. The caller limits the time: without a
    /// running issuer there is no answer.
    ///
    /// # Errors
    /// If the request is refused, and the failures of the store.
    pub async fn obtain<T: Tree>(&self, tree: &T, key: &PrivateKey) -> Result<String, ObtainError> {
        let request = self.ensure_request(tree, key).await?;
        let mut feed = Watched::MachineCertificate(self.id).feed(tree).await?;
        loop {
            feed.next().await?;
            if let Some(chain) = accepted(read_answer(tree, self.id).await?, &request)? {
                return Ok(chain);
            }
        }
    }

    /// Keeps the machine's certificate: requests one for the key in the files, and saves each new
    /// one. Runs until it is dropped.
    pub async fn keep_certificate<T: Tree>(&self, tree: &T, files: &MachineIdentity) -> Infallible {
        let mut logged = String::new();
        // The first failure is not logged: if the credentials are refused, the agent reports that
        // itself and ends.
        let Err(_) = self.follow(tree, files, &mut logged).await;
        loop {
            sleep(PAUSE).await;
            let Err(error) = self.follow(tree, files, &mut logged).await;
            warn_once(&mut logged, &error);
        }
    }

    async fn follow<T: Tree>(
        &self,
        tree: &T,
        files: &MachineIdentity,
        logged: &mut String,
    ) -> Result<Infallible, ObtainError> {
        let request = self.ensure_request(tree, &files.ensure_key()?).await?;
        let mut feed = Watched::MachineCertificate(self.id).feed(tree).await?;
        loop {
            if let Ok(event) = timeout(READ_AGAIN, feed.next()).await {
                event?;
            }
            match accepted(read_answer(tree, self.id).await?, &request) {
                Ok(Some(chain)) => self.save(files, &chain)?,
                Ok(None) => {}
                // The old certificate stays in use, and the issuer may change its answer.
                Err(refused) => warn_once(logged, &refused),
            }
            if let Some(expired) = self.expired(files)? {
                warn_once(logged, &expired);
            }
        }
    }

    /// Returns the request in the store if it is one for this key, and replaces it otherwise. Two
    /// requests for the same key differ in their signatures, so a new one would be a change.
    async fn ensure_request<T: Tree>(&self, tree: &T, key: &PrivateKey) -> Result<String, ObtainError> {
        let names = Names::of([number_name(self.id)]);
        if let Some(found) = read_request(tree, self.id).await?
            && Request::parse(&found).is_ok_and(|found| found.is_of(key) && *found.names() == names)
        {
            return Ok(found);
        }
        // The issuer adds the other names of the machine's record.
        let request = key.request(&names).map_err(|problem| ObtainError::Refused(problem.to_string()))?;
        put_request(tree, &self.roles, (self.id, &self.identity), &request).await?;
        Ok(request)
    }

    /// Returns the problem of a saved certificate that has expired.
    fn expired(&self, files: &MachineIdentity) -> Result<Option<ObtainError>, FilesError> {
        let until_ms = files.certificate()?.map(|certificate| certificate.validity().until_ms);
        let until_ms = until_ms.filter(|until_ms| *until_ms <= wall_ms());
        Ok(until_ms.map(|until_ms| ObtainError::Expired { machine: self.id, until: utc(until_ms) }))
    }

    fn save(&self, files: &MachineIdentity, chain: &str) -> Result<(), FilesError> {
        if files.install(chain)?
            && let Ok(certificate) = Certificate::parse(chain)
        {
            let until = utc(certificate.validity().until_ms);
            info!(machine = %self.id, names = %certificate.names(), until, "certificate saved");
        }
        Ok(())
    }
}

/// Logs a failure once, not at every retry.
fn warn_once(logged: &mut String, error: &ObtainError) {
    let problem = error_chain(error);
    if problem != *logged {
        warn!(%problem, "no new certificate for this machine");
        *logged = problem;
    }
}

/// Returns the chain of an answer to this request.
fn accepted(answered: Option<Answered>, request: &str) -> Result<Option<String>, ObtainError> {
    match answered.filter(|answered| answered.request == request_hash(request)) {
        None => Ok(None),
        Some(Answered { answer: Answer::Refused(reason), .. }) => Err(ObtainError::Refused(reason)),
        Some(Answered { answer: Answer::Issued(chain), .. }) => Ok(Some(chain)),
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
