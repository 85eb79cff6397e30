//! The certificate of the environment's authority, and the requests and certificates of machines. A
//! machine writes its request below its own znode and cannot write the answer; the contents of
//! certificates belong to `identity`.

use super::acl::Roles;
use super::credentials::Identity;
use super::environment::Environment;
use super::error::Error;
use super::paths;
use super::records::Machine;
use super::tree::{self, Node, Tree, Write};
use super::update::{Change, ensure_with, put, update};
use crate::model::{MachineId, hex};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Maximum size of a certificate chain or request in the store.
pub const MAX_BYTES: usize = 32 << 10;

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The chain in PEM form: the machine's certificate, then that of the authority.
    Issued(String),
    /// The reason why there is no certificate.
    Refused(String),
}

/// A machine's certificate znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// The hash of the request that was answered; see [`request_hash`].
    pub request: String,
    pub answer: Answer,
}

impl Answered {
    /// Returns `None` for a znode that holds no answer.
    fn parse(data: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(data.get(..data.len().min(2 * MAX_BYTES))?).ok()?;
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let answer = match text("certificate") {
            Some(chain) => Answer::Issued(chain),
            None => Answer::Refused(text("refused")?),
        };
        Some(Self { request: text("request")?, answer })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let (key, text) = match &self.answer {
            Answer::Issued(chain) => ("certificate", chain),
            Answer::Refused(reason) => ("refused", reason),
        };
        json!({"request": self.request, key: text}).to_string().into_bytes()
    }
}

/// The hash that an answer names its request by.
pub fn request_hash(request: &str) -> String {
    hex(&Sha256::digest(request.as_bytes()))
}

/// A machine as the issuer of certificates sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applicant {
    pub id: MachineId,
    pub record: Machine,
    /// The request in PEM form, if the machine has made one and can be answered.
    pub request: Option<String>,
    pub answered: Option<Answered>,
    /// The version of the certificate's znode.
    pub version: i32,
}

/// Reads machines with their requests and certificates. A machine that is gone, or whose znodes
/// cannot be read, is left out.
pub async fn read_applicants<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<Vec<Applicant>, tree::Error> {
    let wanted = machines.iter().flat_map(|&id| {
        [paths::machine(id), paths::machine_certificate_request(id), paths::machine_certificate(id)]
    });
    let found = tree.data_of_each(wanted.collect()).await?;
    let mut applicants = Vec::new();
    for (&id, nodes) in machines.iter().zip(found.chunks(3)) {
        let [Ok(Some(record)), Ok(request), Ok(certificate)] = nodes else { continue };
        let Ok(record) = Machine::parse(&paths::machine(id), &record.data) else { continue };
        let text = |node: &Node| String::from_utf8_lossy(&node.data).into_owned();
        // A request without the znode for its answer is not complete.
        let request = request.as_ref().filter(|_| certificate.is_some()).map(text);
        let answered = certificate.as_ref().and_then(|node| Answered::parse(&node.data));
        let version = certificate.as_ref().map_or(0, |node| node.version);
        applicants.push(Applicant { id, record, request, answered, version });
    }
    Ok(applicants)
}

/// Writes the answer at the version of the certificate's znode that was read. Returns whether it
/// was written: another issuer may have answered in between.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn answer<T: Tree>(
    tree: &T,
    machine: MachineId,
    answered: &Answered,
    version: i32,
) -> Result<bool, tree::Error> {
    let path = paths::machine_certificate(machine);
    let write = Write::SetIfVersion { path, data: answered.to_bytes(), version };
    match tree.write(vec![write]).await {
        Ok(()) => Ok(true),
        Err(tree::Error::BadVersion(_)) => Ok(false),
        Err(err) => Err(err),
    }
}

/// Writes a machine's request. An equal request is not written again.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn put_request<T: Tree>(
    tree: &T,
    roles: &Roles,
    (machine, identity): (MachineId, &Identity),
    request: &str,
) -> Result<(), Error> {
    let answer = paths::machine_certificate(machine);
    ensure_with(tree, &answer, b"", &roles.machine_certificate(identity)).await?;
    let path = paths::machine_certificate_request(machine);
    put(tree, &path, request.as_bytes(), &roles.machine_certificate_request(identity)).await
}

/// Reads a machine's request (PEM), if it has made one.
pub async fn read_request<T: Tree>(tree: &T, machine: MachineId) -> Result<Option<String>, tree::Error> {
    let node = tree.find(&paths::machine_certificate_request(machine)).await?;
    Ok(node.map(|node| String::from_utf8_lossy(&node.data).into_owned()))
}

/// Reads the answer to the machine's request, if there is one.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed or has made no request.
pub async fn read_answer<T: Tree>(tree: &T, machine: MachineId) -> Result<Option<Answered>, tree::Error> {
    Ok(Answered::parse(&tree.get(&paths::machine_certificate(machine)).await?.data))
}

/// Reads the certificate (PEM) of the environment's authority, if it was published.
pub async fn read_authority<T: Tree>(tree: &T) -> Result<Option<String>, tree::Error> {
    let node = tree.find(&paths::authority()).await?;
    Ok(node.map(|node| String::from_utf8_lossy(&node.data).into_owned()))
}

impl<T: Tree> Environment<T> {
    /// Publishes the certificate (PEM) of the authority as the operator, and returns the published
    /// one, which may be another: the first one stays.
    pub async fn publish_authority(&self, certificate: &str) -> Result<String, Error> {
        let path = paths::authority();
        ensure_with(&self.tree, &path, certificate.as_bytes(), &self.info.roles.authority()).await?;
        Ok(String::from_utf8_lossy(&self.tree.get(&path).await?.data).into_owned())
    }

    /// Removes the answer to a machine's request, so that a certificate is issued again. Returns
    /// false if the machine has made no request.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn renew_certificate(&self, machine: MachineId) -> Result<bool, Error> {
        self.machine(machine).await?;
        let clear = |_: &Node| Ok::<_, Error>(Change::Set(Vec::new(), true));
        match update(&self.tree, &paths::machine_certificate(machine), clear).await {
            Err(Error::Tree(tree::Error::NoNode(_))) => Ok(false),
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_the_store_and_other_content_is_none() {
        for answer in [Answer::Issued("PEM\nchain".to_owned()), Answer::Refused("\"no\"".to_owned())] {
            let answered = Answered { request: request_hash("x"), answer };
            assert_eq!(Answered::parse(&answered.to_bytes()), Some(answered));
        }
        for other in [&b""[..], b"{}", b"[1]", b"{\"request\": 1, \"certificate\": \"x\"}", b"\xff"] {
            assert_eq!(Answered::parse(other), None);
        }
    }
}
