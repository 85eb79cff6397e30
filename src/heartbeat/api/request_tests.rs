//! Requests of clients, and the exact error messages.

use proptest::prelude::*;

use super::*;
use crate::heartbeat::api::beat_json::FIELDS;

fn ask<'a>(method: &'a str, path: &'a str, body: &'a str) -> Result<ApiCall<'a>, (u16, String)> {
    let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
    let raw = RawRequest { method, path, query, last_event: None, body: Ok(body.as_bytes()) };
    read(raw).map_err(|problem| (problem.status, problem.detail))
}

fn beat_of(name: &str) -> ApiCall<'static> {
    ApiCall::Beats(vec![sent(name, false, "now")])
}

fn sent(name: &str, going_away: bool, timestamp: &str) -> IncomingBeat {
    let details = BeatDetails { going_away, interval: 0, stamp: Stamp::of(timestamp) };
    IncomingBeat { name: Name::parse(name).unwrap(), details }
}

const GOOD: &str =
    r#"{"Component":"x0c0s0b0n0","Hostname":"nid1","NID":"1","Status":"OK","Timestamp":"now"}"#;

#[test]
fn keys_of_a_beat_are_case_insensitive() {
    assert_eq!(ask("POST", "/hmi/v1/heartbeat", GOOD), Ok(beat_of("x0c0s0b0n0")));
    let lower = GOOD.to_lowercase();
    assert_eq!(ask("POST", "/hmi/v1/heartbeat", &lower), Ok(beat_of("x0c0s0b0n0")));
    let more = GOOD.replace("{\"Comp", "{\"Extra\":[1,{\"a\":null}],\"Comp");
    assert_eq!(ask("POST", "/hmi/v1/heartbeat", &more), Ok(beat_of("x0c0s0b0n0")));
    let bye = GOOD.replace("OK", "Going Away");
    let gone = ApiCall::Beats(vec![sent("x0c0s0b0n0", true, "now")]);
    assert_eq!(ask("POST", "/hmi/v1/heartbeat", &bye), Ok(gone));
    assert_eq!(
        ask("POST", "/hmi/v1/heartbeat/X00c0", r#"{"Status":"OK","Timestamp":"now"}"#),
        Ok(beat_of("x0c0"))
    );
}

#[test]
fn beats_can_contain_their_interval() {
    let with = |interval: &str| GOOD.replace("{\"Comp", &format!("{{\"Interval\":{interval},\"Comp"));
    let interval = |body: &str| match ask("POST", "/hmi/v1/heartbeat", body)? {
        ApiCall::Beats(beats) => Ok::<_, (u16, String)>(beats[0].details.interval),
        other => panic!("{other:?}"),
    };
    for (raw, seconds) in [("60", 60), ("\"60\"", 60), ("28800", 28_800), ("null", 0)] {
        assert_eq!(interval(&with(raw)), Ok(seconds), "{raw}");
    }
    let range = "Invalid Interval: not a number of seconds from 1 to 28800";
    for (raw, detail) in [
        ("0", range),
        ("28801", range),
        ("99999999999", range),
        ("\"\"", range),
        ("\"soon\"", range),
        ("-1", "Invalid data type in Interval field"),
        ("1.5", "Invalid data type in Interval field"),
        ("[]", "Invalid data type in Interval field"),
    ] {
        assert_eq!(interval(&with(raw)), Err((400, detail.to_owned())), "{raw}");
    }
    let named = r#"{"Status":"OK","Timestamp":"t","interval":"9"}"#;
    let Ok(ApiCall::Beats(beats)) = ask("POST", "/hmi/v1/heartbeat/x0/", named) else { panic!("no beat") };
    assert_eq!((beats[0].name.as_str(), beats[0].details.interval), ("x0", 9));
}

#[test]
fn first_invalid_field_is_reported() {
    for (body, detail) in [
        ("", "Invalid JSON data type"),
        ("[]", "Invalid JSON data type"),
        ("nonsense", "Invalid JSON data type"),
        ("{\"Component\":\"a\"} x", "Invalid JSON data type"),
        ("{}", "Missing Component field"),
        (r#"{"Component":""}"#, "Missing Component field"),
        (r#"{"Component":null,"Hostname":"h"}"#, "Missing Component field"),
        (r#"{"Component":"a"}"#, "Missing Hostname field"),
        (r#"{"Component":"a","Hostname":"h"}"#, "Missing NID field"),
        (r#"{"Component":"a","Hostname":"h","NID":"1"}"#, "Missing Status field"),
        (r#"{"Component":"a","Hostname":"h","NID":"1","Status":"s"}"#, "Missing Timestamp field"),
        (r#"{"Component":"a","NID":1}"#, "Invalid data type in NID field"),
        (r#"{"Component":["a"],"NID":1}"#, "Invalid data type in Component field"),
        (r#"{"Timestamp":{"a":1}}"#, "Invalid data type in Timestamp field"),
        (r#"{"Component":"a","Hostname":"h","NID":"x","Status":"s","Timestamp":"t"}"#, "Invalid NID"),
        (
            r#"{"Component":"a/b","Hostname":"h","NID":"x","Status":"s","Timestamp":"t"}"#,
            "Invalid Component Name",
        ),
    ] {
        assert_eq!(ask("POST", "/hmi/v1/heartbeat", body), Err((400, detail.to_owned())), "{body}");
    }
    for (body, detail) in [
        ("{}", "Missing Status field"),
        (r#"{"Status":"s"}"#, "Missing Timestamp field"),
        (r#"{"Status":true,"Timestamp":"t"}"#, "Invalid data type in Status field"),
    ] {
        assert_eq!(ask("POST", "/hmi/v1/heartbeat/a", body), Err((400, detail.to_owned())), "{body}");
    }
    let hostile = ask("POST", "/hmi/v1/heartbeat/..%2f..", r#"{"Status":"s","Timestamp":"t"}"#);
    assert_eq!(hostile, Err((400, "Invalid Component Name".to_owned())));
}

#[test]
fn numbers_are_parsed_as_in_go() {
    for good in ["0", "1", "-7", "+7", "0x1F", "0b11", "0o17", "017", "9223372036854775807"] {
        assert!(is_number(good), "{good}");
    }
    for bad in [
        "",
        "x",
        "1.0",
        "0x",
        "++1",
        "--5",
        "+-5",
        "-+5",
        "0x-5",
        "-0x-5",
        "0-5",
        "9223372036854775808",
        "1 ",
        "08",
    ] {
        assert!(!is_number(bad), "{bad}");
    }
}

#[test]
fn lists_of_beats_are_accepted() {
    let other = GOOD.replace("x0c0s0b0n0", "x0c0s0b0n1");
    let two = ApiCall::Beats(vec![sent("x0c0s0b0n0", false, "now"), sent("x0c0s0b0n1", false, "now")]);
    assert_eq!(ask("POST", "/hmi/v1/heartbeats", &format!("[{GOOD},{other}]")), Ok(two));
    assert_eq!(ask("POST", "/hmi/v1/heartbeats", "[]"), Ok(ApiCall::Beats(Vec::new())));
    let bad = other.replace("\"1\"", "\"one\"");
    let mixed = format!("[{GOOD},{bad}]");
    assert_eq!(ask("POST", "/hmi/v1/heartbeats", &mixed), Err((400, "Beat 1: Invalid NID".to_owned())));
    assert_eq!(ask("POST", "/hmi/v1/heartbeats", GOOD), Err((400, NO_JSON.to_owned())));
}

#[test]
fn states_are_queried_by_name() {
    let names =
        |names: &[&'static str]| ApiCall::States(names.iter().map(|name| Cow::Borrowed(*name)).collect());
    assert_eq!(ask("POST", HBSTATES, r#"{"XNames":["b","a","b"]}"#), Ok(names(&["b", "a", "b"])));
    assert_eq!(ask("POST", HBSTATES, r#"{"xnames":null}"#), Ok(names(&[])));
    assert_eq!(ask("POST", HBSTATES, "{}"), Ok(names(&[])));
    assert_eq!(ask("POST", HBSTATES, r#"{"XNames":["\u0061"],"a":[{}]}"#), Ok(names(&["a"])));
    assert_eq!(ask("POST", HBSTATES, r#"{"XNames":3,"xNAMES":["b"]}"#), Ok(names(&["b"])), "the last counts");
    let many = |count: usize| format!("{{\"XNames\":[\"\"{}]}}", ",\"\"".repeat(count - 1));
    let (most, more) = (many(MAX_NAMES), many(MAX_NAMES + 1));
    assert!(matches!(ask("POST", HBSTATES, &most), Ok(ApiCall::States(names)) if names.len() == MAX_NAMES));
    let refused = ask("POST", HBSTATES, &more).unwrap_err();
    assert_eq!(refused, (400, "More than 50000 names".to_owned()));
    for (body, detail) in [
        ("[]", NO_JSON),
        (r#"{"XNames":"a"}"#, "Invalid data type in XNames field"),
        (r#"{"XNames":[1]}"#, "Invalid data type in XNames field"),
        (r#"{"XNames":["a",null]}"#, "Invalid data type in XNames field"),
        (r#"{"XNames":[["a"]]}"#, "Invalid data type in XNames field"),
        (r#"{"XNames":{"a":1}}"#, "Invalid data type in XNames field"),
        (r#"{"XNames":["a"]} x"#, NO_JSON),
        (r#"{"XNames":["a"}"#, NO_JSON),
    ] {
        assert_eq!(ask("POST", HBSTATES, body), Err((400, detail.to_owned())), "{body}");
    }
    assert_eq!(ask("GET", "/hmi/v1/hbstate/x0", ""), Ok(ApiCall::State("x0")));
    let body = states_body([("b", true), ("a\"", false)].into_iter());
    assert_eq!(
        String::from_utf8(body).unwrap(),
        r#"{"HBStates":[{"XName":"b","Heartbeating":true},{"XName":"a\"","Heartbeating":false}]}"#
    );
    assert_eq!(String::from_utf8(states_body([].into_iter())).unwrap(), r#"{"HBStates":[]}"#);
    assert_eq!(String::from_utf8(state_body("x0", false)).unwrap(), r#"{"XName":"x0","Heartbeating":false}"#);
}

#[test]
fn wrong_method_gets_the_allowed_ones() {
    for (method, path, allow, detail) in [
        ("GET", "/hmi/v1/heartbeat", "POST", "Only POST operations supported"),
        ("PUT", "/hmi/v1/heartbeat/x0", "POST", "Only POST operations supported"),
        ("GET", "/hmi/v1/hbstates", "POST", "Only POST operations supported"),
        ("POST", "/hmi/v1/hbstate/x0", "GET", "Only GET operations supported"),
        ("POST", "/hmi/v1/params", "GET, PATCH", "Only GET and PATCH operations supported"),
        ("POST", "/hmi/v1/health", "GET", "Only GET operations supported"),
    ] {
        let problem =
            read(RawRequest { method, path, query: None, last_event: None, body: Ok(b"") }).unwrap_err();
        assert_eq!(
            (problem.status, problem.allow, problem.detail.as_str()),
            (405, Some(allow), detail),
            "{path}"
        );
    }
}

#[test]
fn other_paths_are_not_found() {
    for path in ["/", "/hmi/v1", "/hmi/v1/", "/hmi/v2/params", "/hmi/v1/hbstate", "/hmi/v1/params/x", "/x/y"]
    {
        assert_eq!(ask("GET", path, ""), Err((404, "No such path".to_owned())), "{path}");
    }
}

#[test]
fn problems_are_documents() {
    let problem = Problem::new(400, "Missing Hostname field", "/hmi/v1/heartbeat");
    assert_eq!(
        String::from_utf8(problem.body()).unwrap(),
        "{\"type\":\"about:blank\",\"title\":\"Invalid Request\",\"detail\":\"Missing Hostname field\",\
         \"instance\":\"/hmi/v1/heartbeat\",\"status\":400}"
    );
}

#[test]
fn unreadable_bodies_get_their_own_status() {
    for (status, detail) in [
        (413, "The body is too large"),
        (408, "The body did not come in time"),
        (400, "The body was cut off"),
        (503, "Too many large bodies at the same time"),
    ] {
        let raw =
            RawRequest { method: "POST", path: HBSTATES, query: None, last_event: None, body: Err(status) };
        let problem = read(raw).unwrap_err();
        assert_eq!((problem.status, problem.detail.as_str()), (status, detail));
    }
}

#[test]
fn events_are_resumed_by_number() {
    let events = |query: Option<&'static str>, last_event: Option<&'static str>| {
        read(RawRequest { method: "GET", path: "/hmi/v1/events", query, last_event, body: Ok(b"") })
    };
    assert_eq!(events(None, None), Ok(ApiCall::Events(None)));
    assert_eq!(events(Some("a=b&since=7"), None), Ok(ApiCall::Events(Some(7))));
    assert_eq!(events(Some("since=7"), Some("9")), Ok(ApiCall::Events(Some(9))));
    assert_eq!(events(Some("since=x"), None).unwrap_err().status, 400);
}

proptest! {
    #[test]
    fn any_bytes_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        for path in ["/hmi/v1/heartbeat", "/hmi/v1/heartbeat/x0", "/hmi/v1/heartbeats", HBSTATES] {
            let raw = RawRequest { method: "POST", path, query: None, last_event: None, body: Ok(&bytes) };
            if let Err(problem) = read(raw) {
                prop_assert_eq!(problem.status, 400);
            }
        }
    }

    #[test]
    fn document_of_strings_is_accepted_or_its_field_named(
        values in proptest::collection::vec("[a-z0-9 ]{0,8}", 5)
    ) {
        let document: Map<String, Value> =
            FIELDS.iter().zip(&values).map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        let body = Value::Object(document).to_string();
        match ask("POST", "/hmi/v1/heartbeat", &body) {
            Ok(call) => {
                let beat = sent(&values[0], says_going_away(&values[3]), &values[4]);
                prop_assert_eq!(call, ApiCall::Beats(vec![beat]));
            }
            Err((status, _)) => {
                prop_assert_eq!(status, 400);
                prop_assert!(
                    values.iter().any(String::is_empty)
                        || Name::parse(&values[0]).is_err()
                        || !is_number(&values[2])
                );
            }
        }
    }
}

/// Bodies that are almost beats.
fn almost_beats() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        Just("\"x0\""),
        Just("\"1\""),
        Just("\"stopping\""),
        Just("1"),
        Just("[\"a\"]"),
        Just("null")
    ];
    let key =
        prop_oneof![Just("component"), Just("Hostname"), Just("NID"), Just("Status"), Just("Timestamp")];
    proptest::collection::vec((key, value), 0..8).prop_map(|pairs| {
        let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        format!("{{{}}}", pairs.join(","))
    })
}

proptest! {
    /// The fast path accepts exactly the requests that the full parser accepts as one beat.
    #[test]
    fn fast_path_agrees_with_the_full_parser(
        path in prop_oneof![
            Just("/hmi/v1/heartbeat"), Just("/hmi/v1/heartbeat/x1"), Just("/hmi/v1/heartbeat/a/b"),
            Just("/hmi/v1/heartbeats"), Just("/hmi/v1/hbstates"),
        ],
        body in prop_oneof![Just(GOOD.to_owned()), almost_beats(), any::<String>()],
    ) {
        let long = match ask("POST", path, &body) {
            Ok(ApiCall::Beats(beats)) if path != HEARTBEATS => Some(beats[0]),
            _ => None,
        };
        prop_assert_eq!(good_beat(path, body.as_bytes()), long);
    }
}
