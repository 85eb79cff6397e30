//! Decides which requests of machines are answered, and with which certificate. Pure.

use crate::model::{MachineId, is_reserved_name, number_name};
use crate::net::tls::authority::{Names, Request};
use crate::net::tls::certificate::Certificate;
use crate::store::certificates::{Answer, Answered, Applicant, request_hash};
use crate::store::records::Machine;

/// The names that a machine's certificate has: its number, the name that the operator gave to it,
/// and the addresses in its record. The machine itself cannot write the record.
pub fn permitted_names(id: MachineId, record: &Machine) -> Names {
    let own = number_name(id);
    let named = record.node_name().into_iter().chain(record.addresses.iter().map(String::as_str));
    let named = named.filter(|name| !is_reserved_name(name));
    Names::of(named.chain([own.as_str()])).without_invalid()
}

/// One answer to write.
#[derive(Debug, Clone)]
pub struct Step {
    pub machine: MachineId,
    /// The version of the certificate's znode that is replaced.
    pub version: i32,
    /// The hash of the request.
    pub request: String,
    pub action: Action,
}

#[derive(Debug, Clone)]
pub enum Action {
    Issue { request: Request, names: Names },
    Refuse(String),
}

/// Returns the answers that are missing, wrong or due for renewal. `ca` is the certificate (PEM) of
/// the authority.
pub fn plan(applicants: &[Applicant], ca: &str, now_ms: u64) -> Vec<Step> {
    applicants.iter().filter_map(|applicant| step(applicant, ca, now_ms)).collect()
}

fn step(applicant: &Applicant, ca: &str, now_ms: u64) -> Option<Step> {
    let text = applicant.request.as_ref()?;
    let hash = request_hash(text);
    let answered = applicant.answered.as_ref().filter(|answered| answered.request == hash);
    let action = match verify_request(applicant, text) {
        Ok((request, names)) => {
            let is_current = answered.is_some_and(|found| is_current(found, &request, &names, ca, now_ms));
            (!is_current).then_some(Action::Issue { request, names })
        }
        Err(reason) => {
            let refused = Answer::Refused(reason);
            let is_already_refused = answered.is_some_and(|answered| answered.answer == refused);
            let Answer::Refused(reason) = refused else { return None };
            (!is_already_refused).then_some(Action::Refuse(reason))
        }
    };
    Some(Step { machine: applicant.id, version: applicant.version, request: hash, action: action? })
}

/// Returns the verified request and the names of its certificate, or why it is refused.
fn verify_request(applicant: &Applicant, text: &str) -> Result<(Request, Names), String> {
    let request = Request::parse(text).map_err(|problem| problem.to_string())?;
    let names = permitted_names(applicant.id, &applicant.record);
    match request.names().first_outside(&names) {
        Some(name) => Err(format!("'{name}' is not a name of machine {}", applicant.id)),
        None => Ok((request, names)),
    }
}

/// Whether an answer is a certificate of this authority for this key and these names that is not
/// due for renewal. A certificate from the future was issued with a wrong clock.
fn is_current(answered: &Answered, request: &Request, names: &Names, ca: &str, now_ms: u64) -> bool {
    let Answer::Issued(chain) = &answered.answer else { return false };
    let Ok(certificate) = Certificate::parse(chain) else { return false };
    let validity = certificate.validity();
    chain.ends_with(ca)
        && request.has_key_of(&certificate)
        && certificate.names() == names
        && (validity.from_ms..validity.renew_at_ms()).contains(&now_ms)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
