//! Tables of requests and records, and the answers that they get.

use super::*;
use crate::net::tls::authority::{Authority, MACHINE_LIFETIME, Validity};
use crate::net::tls::key::PrivateKey;

const NOW: u64 = 1_800_000_000_000;
const DAY: u64 = 86_400_000;

fn record(json: &str) -> Machine {
    Machine::parse(&crate::store::paths::machine(MachineId::new(3)), json.as_bytes()).unwrap()
}

fn authority() -> Authority {
    Authority::create("prod", &PrivateKey::generate().unwrap(), NOW).unwrap()
}

/// A machine that asks for these names.
fn applicant(key: &PrivateKey, names: &[&str]) -> Applicant {
    Applicant {
        id: MachineId::new(3),
        record: record(r#"{"name": "web1", "addresses": ["10.0.0.3"]}"#),
        request: Some(key.request(&Names::of(names)).unwrap()),
        answered: None,
        version: 7,
    }
}

/// The same machine after the answer was written.
fn answered(applicant: &Applicant, step: &Step, ca: &Authority, now_ms: u64) -> Applicant {
    let answer = match &step.action {
        Action::Refuse(reason) => Answer::Refused(reason.clone()),
        Action::Issue { request, names } => {
            Answer::Issued(ca.issue(request, names, Validity::starting(now_ms, MACHINE_LIFETIME)).unwrap())
        }
    };
    Applicant { answered: Some(Answered { request: step.request.clone(), answer }), ..applicant.clone() }
}

/// Returns the names of the only step, or the reason of its refusal; `None` without a step.
fn outcome(applicant: &Applicant, ca: &Authority, now_ms: u64) -> Option<Result<String, String>> {
    let steps = plan(std::slice::from_ref(applicant), ca.certificate(), now_ms);
    assert!(steps.len() <= 1);
    steps.into_iter().next().map(|step| match step.action {
        Action::Issue { names, .. } => Ok(names.to_string()),
        Action::Refuse(reason) => Err(reason),
    })
}

#[test]
fn a_certificate_has_the_names_of_the_record() {
    let of = |json: &str| permitted_names(MachineId::new(3), &record(json)).to_string();
    for (json, names) in [
        ("{}", "machine-3"),
        (r#"{"name": "web1"}"#, "machine-3, web1"),
        (
            r#"{"addresses": ["203.0.113.7", "ec2-1.example", "a b"]}"#,
            "ec2-1.example, machine-3, 203.0.113.7",
        ),
        (r#"{"name": "machine-4"}"#, "machine-3"),
        (r#"{"name": "operator", "addresses": ["controller", "KEEPER"]}"#, "machine-3"),
        (r#"{"name": "manager", "addresses": ["operator-ann", "tracker", "localhost"]}"#, "machine-3"),
    ] {
        assert_eq!(of(json), names, "{json}");
    }
}

#[test]
fn requests_are_answered_once() {
    let (ca, key) = (authority(), PrivateKey::generate().unwrap());
    let all = "machine-3, web1, 10.0.0.3";
    for (asked, expected) in [
        (&["machine-3"][..], Ok(all)),
        (&["machine-3", "web1", "10.0.0.3"], Ok(all)),
        (&["machine-4"], Err("'machine-4' is not a name of machine 3")),
        (&["machine-3", "operator"], Err("'operator' is not a name of machine 3")),
        (&["machine-3", "10.0.0.4"], Err("'10.0.0.4' is not a name of machine 3")),
    ] {
        let asking = applicant(&key, asked);
        let found = outcome(&asking, &ca, NOW);
        assert_eq!(found, Some(expected.map(str::to_owned).map_err(str::to_owned)));
        let steps = plan(std::slice::from_ref(&asking), ca.certificate(), NOW);
        assert_eq!((steps[0].machine, steps[0].version), (MachineId::new(3), 7));
        assert_eq!(outcome(&answered(&asking, &steps[0], &ca, NOW), &ca, NOW), None, "converged");
    }
    let silent = Applicant { request: None, ..applicant(&key, &[]) };
    assert_eq!(outcome(&silent, &ca, NOW), None);
    let garbage = Applicant { request: Some("hello".to_owned()), ..silent };
    let reason = "not a certificate signing request: it cannot be parsed";
    assert_eq!(outcome(&garbage, &ca, NOW), Some(Err(reason.to_owned())));
}

#[test]
fn certificates_are_issued_again_when_they_no_longer_fit() {
    let (ca, key) = (authority(), PrivateKey::generate().unwrap());
    let asking = applicant(&key, &["machine-3"]);
    let first = plan(std::slice::from_ref(&asking), ca.certificate(), NOW).remove(0);
    let done = answered(&asking, &first, &ca, NOW);
    let again = |applicant: &Applicant, ca: &Authority, now_ms| outcome(applicant, ca, now_ms).is_some();
    assert!(!again(&done, &ca, NOW + 59 * DAY));
    assert!(again(&done, &ca, NOW + 60 * DAY), "two thirds have passed");
    assert!(again(&done, &ca, NOW + 200 * DAY), "it has expired");
    assert!(again(&done, &ca, NOW - DAY), "it is from the future");
    assert!(again(&done, &authority(), NOW), "another CA");
    let renamed = Applicant { record: record(r#"{"name": "web2"}"#), ..done.clone() };
    assert!(again(&renamed, &ca, NOW), "another name");
    let other_key =
        Applicant { request: applicant(&PrivateKey::generate().unwrap(), &[]).request, ..done.clone() };
    assert!(again(&other_key, &ca, NOW), "a new request");
    let emptied = Applicant { answered: None, ..done.clone() };
    assert!(again(&emptied, &ca, NOW), "an operator removed it");
    let mut garbled = done.clone();
    garbled.answered = done.answered.map(|was| Answered { answer: Answer::Issued("PEM".to_owned()), ..was });
    assert!(again(&garbled, &ca, NOW), "garbage");
}
