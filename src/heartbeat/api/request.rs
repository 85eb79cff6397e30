//! Parses requests and makes the bodies of answers, compatible with hms-hbtd where it has the same
//! function. `api` handles connections. Pure.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::heartbeat::api::beat_json::{self, Field, Fields};
use crate::heartbeat::core::beat::{BeatDetails, IncomingBeat, Stamp};
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::state::says_going_away;

const ROOT: &str = "/hmi/v1";
const HEARTBEAT: &str = "/hmi/v1/heartbeat";
pub const HBSTATES: &str = "/hmi/v1/hbstates";
pub const HEARTBEATS: &str = "/hmi/v1/heartbeats";

/// Paths with larger bodies, which contain lists of names: ten thousand of the longest fit.
pub const LARGE_BODIES: &[(&str, usize)] = &[(HBSTATES, 1024 * 1024), (HEARTBEATS, 1024 * 1024)];

/// Names in one request.
const MAX_NAMES: usize = 50_000;

/// A request, parsed.
#[derive(Debug, Clone, PartialEq)]
pub enum ApiCall<'a> {
    Beats(Vec<IncomingBeat>),
    State(&'a str),
    States(Vec<Cow<'a, str>>),
    Params,
    SetParams(Map<String, Value>),
    Health,
    Liveness,
    Readiness,
    /// A stream of changes after this number; without a number, first the newest of each component.
    Events(Option<u64>),
    Metrics,
}

/// An error response (RFC 7807).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub status: u16,
    pub detail: String,
    pub instance: String,
    pub allow: Option<&'static str>,
}

impl Problem {
    pub fn new(status: u16, detail: impl Into<String>, instance: &str) -> Self {
        Self { status, detail: detail.into(), instance: instance.to_owned(), allow: None }
    }

    /// The body in JSON.
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
        json!({
            "type": "about:blank",
            "title": title,
            "detail": detail,
            "instance": instance,
            "status": status
        })
        .to_string()
        .into_bytes()
    }
}

/// The parts of a request that matter. `body` is the status of the answer if the body could not be
/// read.
#[derive(Debug, Clone, Copy)]
pub struct RawRequest<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub query: Option<&'a str>,
    /// The number of the last event that the reader got.
    pub last_event: Option<&'a str>,
    pub body: Result<&'a [u8], u16>,
}

/// # Errors
/// The problem to answer with.
pub fn read(raw: RawRequest<'_>) -> Result<ApiCall<'_>, Problem> {
    if raw.path == "/metrics" {
        return allowed(raw, "GET", "/metrics").map(|()| ApiCall::Metrics);
    }
    let nowhere = || Problem::new(404, "No such path", raw.path);
    let inside = raw.path.strip_prefix(ROOT).and_then(|rest| rest.strip_prefix('/')).ok_or_else(nowhere)?;
    let (route, name) = inside.split_once('/').map_or((inside, None), |(route, name)| (route, Some(name)));
    // `NAME/` is the same as `NAME`.
    let name = name.map(|name| name.strip_suffix('/').unwrap_or(name));
    let name = name.filter(|name| !name.is_empty());
    let instance = &raw.path[..ROOT.len() + 1 + route.len()];
    match (route, name) {
        ("heartbeat", None) => {
            allowed(raw, "POST", instance)?;
            beat(body(raw, instance)?).map(one).map_err(|detail| Problem::new(400, detail, instance))
        }
        ("heartbeat", Some(name)) => {
            allowed(raw, "POST", instance)?;
            named_beat(name, body(raw, instance)?)
                .map(one)
                .map_err(|detail| Problem::new(400, detail, instance))
        }
        ("heartbeats", None) => {
            allowed(raw, "POST", instance)?;
            beats(body(raw, instance)?).map_err(|detail| Problem::new(400, detail, instance))
        }
        ("hbstates", None) => {
            allowed(raw, "POST", instance)?;
            states(body(raw, instance)?).map_err(|detail| Problem::new(400, detail, instance))
        }
        ("hbstate", Some(name)) => allowed(raw, "GET", instance).map(|()| ApiCall::State(name)),
        ("params", None) if raw.method == "PATCH" => {
            params(body(raw, instance)?).map_err(|detail| Problem::new(400, detail, instance))
        }
        ("params", None) => allowed(raw, "GET, PATCH", instance).map(|()| ApiCall::Params),
        ("health", None) => allowed(raw, "GET", instance).map(|()| ApiCall::Health),
        ("liveness", None) => allowed(raw, "GET", instance).map(|()| ApiCall::Liveness),
        ("readiness", None) => allowed(raw, "GET", instance).map(|()| ApiCall::Readiness),
        ("events", None) => {
            allowed(raw, "GET", instance)?;
            events(raw).map_err(|detail| Problem::new(400, detail, instance))
        }
        _ => Err(nowhere()),
    }
}

fn allowed(raw: RawRequest<'_>, methods: &'static str, instance: &str) -> Result<(), Problem> {
    if methods.split(", ").any(|method| method == raw.method) {
        return Ok(());
    }
    let detail = format!("Only {} operations supported", methods.replace(", ", " and "));
    Err(Problem { allow: Some(methods), ..Problem::new(405, detail, instance) })
}

fn body<'a>(raw: RawRequest<'a>, instance: &str) -> Result<&'a [u8], Problem> {
    raw.body.map_err(|status| {
        let detail = match status {
            413 => "The body is too large",
            408 => "The body did not come in time",
            503 => "Too many large bodies at the same time",
            _ => "The body was cut off",
        };
        Problem::new(status, detail, instance)
    })
}

const NO_JSON: &str = "Invalid JSON data type";

/// The beat with these fields, if they are complete.
fn whole(fields: &Fields<'_>) -> Result<IncomingBeat, String> {
    if let Some(problem) = fields.problem(0) {
        return Err(problem);
    }
    let name = component(fields.text(0))?;
    if !is_number(fields.text(2)) {
        return Err("Invalid NID".to_owned());
    }
    Ok(IncomingBeat { name, details: details(fields)? })
}

fn details(fields: &Fields<'_>) -> Result<BeatDetails, String> {
    let (going_away, stamp) = (says_going_away(fields.text(3)), Stamp::of(fields.text(4)));
    Ok(BeatDetails { going_away, interval: fields.interval()?, stamp })
}

/// The name of a component that may beat.
fn component(text: &str) -> Result<Name, String> {
    match Name::parse(text) {
        Ok(name) if name.is_reserved() => Err(format!("The component name {name} is reserved")),
        Ok(name) => Ok(name),
        Err(problem) => Err(problem.to_string()),
    }
}

fn beat(bytes: &[u8]) -> Result<IncomingBeat, String> {
    whole(&beat_json::beat(bytes).ok_or(NO_JSON)?)
}

fn one(beat: IncomingBeat) -> ApiCall<'static> {
    ApiCall::Beats(vec![beat])
}

/// The beat in a valid POST of one beat: the fast path for most requests. [`read`] handles all
/// others, and tells why one is invalid.
pub fn good_beat(target: &str, body: &[u8]) -> Option<IncomingBeat> {
    let rest = target.strip_prefix(HEARTBEAT)?;
    match rest.strip_prefix('/') {
        Some(name) => named_beat(name.strip_suffix('/').unwrap_or(name), body).ok(),
        None if rest.is_empty() => beat(body).ok(),
        None => None,
    }
}

fn beats(bytes: &[u8]) -> Result<ApiCall<'_>, String> {
    let all = beat_json::beats(bytes, MAX_NAMES).ok_or(NO_JSON)?;
    let numbered = all.iter().enumerate();
    let whole = numbered.map(|(at, fields)| whole(fields).map_err(|problem| format!("Beat {at}: {problem}")));
    whole.collect::<Result<_, _>>().map(ApiCall::Beats)
}

fn named_beat(name: &str, bytes: &[u8]) -> Result<IncomingBeat, String> {
    let fields = beat_json::beat(bytes).ok_or(NO_JSON)?;
    if let Some(problem) = fields.problem(3) {
        return Err(problem);
    }
    Ok(IncomingBeat { name: component(name)?, details: details(&fields)? })
}

/// Whether Go's `ParseInt` with base 0 accepts the text.
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

fn states(bytes: &[u8]) -> Result<ApiCall<'_>, String> {
    match beat_json::state_query(bytes).ok_or(NO_JSON)? {
        Field::Missing => Ok(ApiCall::States(Vec::new())),
        Field::List(names) if names.len() <= MAX_NAMES => Ok(ApiCall::States(names)),
        Field::List(_) => Err(format!("More than {MAX_NAMES} names")),
        Field::Text(_) | Field::Number(_) | Field::Wrong => {
            Err("Invalid data type in XNames field".to_owned())
        }
    }
}

fn params(bytes: &[u8]) -> Result<ApiCall<'_>, String> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(change)) => Ok(ApiCall::SetParams(change)),
        _ => Err(NO_JSON.to_owned()),
    }
}

fn events(raw: RawRequest<'_>) -> Result<ApiCall<'_>, String> {
    let asked = raw.query.and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("since=")));
    match raw.last_event.or(asked) {
        None => Ok(ApiCall::Events(None)),
        Some(text) => {
            text.parse().map(|since| ApiCall::Events(Some(since))).map_err(|_| "Invalid sequence".to_owned())
        }
    }
}

/// The answer about one name.
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
    // Writing a string to a vector does not fail.
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
