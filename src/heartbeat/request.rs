//! What clients say and what they are answered, word for word as hms-hbtd has it where it has it. Pure: bytes in, a request
//! or a refusal out. Sockets are in `api`.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::fields::{self, Field, Fields};
use super::name::Name;
use super::sent::{Details, Sent, Stamp};
use super::state::says_going_away;

const ROOT: &str = "/hmi/v1";
const HEARTBEAT: &str = "/hmi/v1/heartbeat";
pub const HBSTATES: &str = "/hmi/v1/hbstates";
pub const HEARTBEATS: &str = "/hmi/v1/heartbeats";

/// Bodies with lists of names: ten thousand of the longest are not too many.
pub const LARGE_BODIES: &[(&str, usize)] = &[(HBSTATES, 1024 * 1024), (HEARTBEATS, 1024 * 1024)];

/// Names in one question.
const MAX_NAMES: usize = 50_000;

/// What a client wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Wish<'a> {
    Beats(Vec<Sent>),
    State(&'a str),
    States(Vec<Cow<'a, str>>),
    Params,
    SetParams(Map<String, Value>),
    Health,
    Liveness,
    Readiness,
    /// Changes after this one, for as long as the client stays; without a number, first the newest of each component.
    Events(Option<u64>),
    Metrics,
}

/// Why it does not get it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    pub detail: String,
    pub instance: String,
    pub allow: Option<&'static str>,
}

impl Refusal {
    pub fn new(status: u16, detail: impl Into<String>, instance: &str) -> Self {
        Self { status, detail: detail.into(), instance: instance.to_owned(), allow: None }
    }

    /// RFC 7807.
    pub fn body(&self) -> Vec<u8> {
        let title = match self.status {
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            413 => "Payload Too Large",
            500.. => "Service Unavailable",
            _ => "Invalid Request",
        };
        let Self { status, detail, instance, .. } = self;
        json!({"type": "about:blank", "title": title, "detail": detail, "instance": instance, "status": status})
            .to_string()
            .into_bytes()
    }
}

/// A request, as far as it matters. `body` is the status to answer with if it could not be read.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub query: Option<&'a str>,
    /// What a reader of events has seen last.
    pub last_event: Option<&'a str>,
    pub body: Result<&'a [u8], u16>,
}

/// # Errors
/// With the status and the words to answer.
pub fn read(said: Said<'_>) -> Result<Wish<'_>, Refusal> {
    if said.path == "/metrics" {
        return allowed(said, "GET", "/metrics").map(|()| Wish::Metrics);
    }
    let nowhere = || Refusal::new(404, "No such path", said.path);
    let inside = said.path.strip_prefix(ROOT).and_then(|rest| rest.strip_prefix('/')).ok_or_else(nowhere)?;
    let (route, name) = inside.split_once('/').map_or((inside, None), |(route, name)| (route, Some(name)));
    // `NAME/` is the same as `NAME`.
    let name = name.map(|name| name.strip_suffix('/').unwrap_or(name));
    let name = name.filter(|name| !name.is_empty());
    let instance = &said.path[..ROOT.len() + 1 + route.len()];
    match (route, name) {
        ("heartbeat", None) => {
            allowed(said, "POST", instance)?;
            beat(body(said, instance)?).map(one).map_err(|detail| Refusal::new(400, detail, instance))
        }
        ("heartbeat", Some(name)) => {
            allowed(said, "POST", instance)?;
            named_beat(name, body(said, instance)?)
                .map(one)
                .map_err(|detail| Refusal::new(400, detail, instance))
        }
        ("heartbeats", None) => {
            allowed(said, "POST", instance)?;
            beats(body(said, instance)?).map_err(|detail| Refusal::new(400, detail, instance))
        }
        ("hbstates", None) => {
            allowed(said, "POST", instance)?;
            states(body(said, instance)?).map_err(|detail| Refusal::new(400, detail, instance))
        }
        ("hbstate", Some(name)) => allowed(said, "GET", instance).map(|()| Wish::State(name)),
        ("params", None) if said.method == "PATCH" => {
            params(body(said, instance)?).map_err(|detail| Refusal::new(400, detail, instance))
        }
        ("params", None) => allowed(said, "GET, PATCH", instance).map(|()| Wish::Params),
        ("health", None) => allowed(said, "GET", instance).map(|()| Wish::Health),
        ("liveness", None) => allowed(said, "GET", instance).map(|()| Wish::Liveness),
        ("readiness", None) => allowed(said, "GET", instance).map(|()| Wish::Readiness),
        ("events", None) => {
            allowed(said, "GET", instance)?;
            events(said).map_err(|detail| Refusal::new(400, detail, instance))
        }
        _ => Err(nowhere()),
    }
}

fn allowed(said: Said<'_>, methods: &'static str, instance: &str) -> Result<(), Refusal> {
    if methods.split(", ").any(|method| method == said.method) {
        return Ok(());
    }
    let detail = format!("Only {} operations supported", methods.replace(", ", " and "));
    Err(Refusal { allow: Some(methods), ..Refusal::new(405, detail, instance) })
}

fn body<'a>(said: Said<'a>, instance: &str) -> Result<&'a [u8], Refusal> {
    said.body.map_err(|status| {
        let detail = match status {
            413 => "The body is too large",
            408 => "The body did not come in time",
            503 => "Too many large bodies at the same time",
            _ => "The body was cut off",
        };
        Refusal::new(status, detail, instance)
    })
}

const NO_JSON: &str = "Invalid JSON data type";

/// A whole beat, once its fields are there.
fn whole(fields: &Fields<'_>) -> Result<Sent, String> {
    if let Some(problem) = fields.problem(0) {
        return Err(problem);
    }
    let name = component(fields.text(0))?;
    if !is_number(fields.text(2)) {
        return Err("Invalid NID".to_owned());
    }
    Ok(Sent { name, details: details(fields)? })
}

fn details(fields: &Fields<'_>) -> Result<Details, String> {
    let (going_away, stamp) = (says_going_away(fields.text(3)), Stamp::of(fields.text(4)));
    Ok(Details { going_away, interval: fields.interval()?, stamp })
}

/// The name of a component that may beat.
fn component(text: &str) -> Result<Name, String> {
    match Name::parse(text) {
        Ok(name) if name.is_reserved() => Err(format!("The component name {name} is reserved")),
        Ok(name) => Ok(name),
        Err(problem) => Err(problem.to_string()),
    }
}

fn beat(bytes: &[u8]) -> Result<Sent, String> {
    whole(&fields::beat(bytes).ok_or(NO_JSON)?)
}

fn one(beat: Sent) -> Wish<'static> {
    Wish::Beats(vec![beat])
}

/// The beat in a POST, if it is one beat and nothing is wrong with it. Most requests are this; everything else about
/// them, and why one is refused, is in [`read`].
pub fn good_beat(target: &str, body: &[u8]) -> Option<Sent> {
    let rest = target.strip_prefix(HEARTBEAT)?;
    match rest.strip_prefix('/') {
        Some(name) => named_beat(name.strip_suffix('/').unwrap_or(name), body).ok(),
        None if rest.is_empty() => beat(body).ok(),
        None => None,
    }
}

fn beats(bytes: &[u8]) -> Result<Wish<'_>, String> {
    let all = fields::beats(bytes, MAX_NAMES).ok_or(NO_JSON)?;
    let numbered = all.iter().enumerate();
    let whole = numbered.map(|(at, fields)| whole(fields).map_err(|problem| format!("Beat {at}: {problem}")));
    whole.collect::<Result<_, _>>().map(Wish::Beats)
}

fn named_beat(name: &str, bytes: &[u8]) -> Result<Sent, String> {
    let fields = fields::beat(bytes).ok_or(NO_JSON)?;
    if let Some(problem) = fields.problem(3) {
        return Err(problem);
    }
    Ok(Sent { name: component(name)?, details: details(&fields)? })
}

/// What Go's `ParseInt` takes with base 0.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..]),
        [b'0', b'b', ..] => (2, &lower[2..]),
        [b'0', b'o', ..] => (8, &lower[2..]),
        [b'0', _, ..] => (8, &lower[1..]),
        _ => (10, lower.as_str()),
    };
    !digits.starts_with(['+', '-']) && i64::from_str_radix(digits, radix).is_ok()
}

fn states(bytes: &[u8]) -> Result<Wish<'_>, String> {
    match fields::question(bytes).ok_or(NO_JSON)? {
        Field::Missing => Ok(Wish::States(Vec::new())),
        Field::List(names) if names.len() <= MAX_NAMES => Ok(Wish::States(names)),
        Field::List(_) => Err(format!("More than {MAX_NAMES} names")),
        Field::Text(_) | Field::Number(_) | Field::Wrong => {
            Err("Invalid data type in XNames field".to_owned())
        }
    }
}

fn params(bytes: &[u8]) -> Result<Wish<'_>, String> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(change)) => Ok(Wish::SetParams(change)),
        _ => Err(NO_JSON.to_owned()),
    }
}

fn events(said: Said<'_>) -> Result<Wish<'_>, String> {
    let asked = said.query.and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("since=")));
    match said.last_event.or(asked) {
        None => Ok(Wish::Events(None)),
        Some(text) => {
            text.parse().map(|since| Wish::Events(Some(since))).map_err(|_| "Invalid sequence".to_owned())
        }
    }
}

/// The answer to one name, as it was asked for.
pub fn state_body(name: &str, heartbeating: bool) -> Vec<u8> {
    let mut body = Vec::with_capacity(48 + name.len());
    push_state(&mut body, name, heartbeating);
    body
}

pub fn states_body<'a>(states: impl Iterator<Item = (&'a str, bool)>) -> Vec<u8> {
    let mut body = b"{\"HBStates\":[".to_vec();
    for (at, (name, heartbeating)) in states.enumerate() {
        if at > 0 {
            body.push(b',');
        }
        push_state(&mut body, name, heartbeating);
    }
    body.extend_from_slice(b"]}");
    body
}

fn push_state(body: &mut Vec<u8>, name: &str, heartbeating: bool) {
    body.extend_from_slice(b"{\"XName\":");
    // A string is always JSON, and a vector takes everything.
    serde_json::to_writer(&mut *body, name).expect("a string");
    body.extend_from_slice(if heartbeating {
        b",\"Heartbeating\":true}"
    } else {
        b",\"Heartbeating\":false}"
    });
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
