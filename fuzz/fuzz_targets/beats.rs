//! Beats: the fast reader of a POST accepts only what the complete reader accepts, and both read
//! the same beat.

#![no_main]

use libfuzzer_sys::fuzz_target;
use portcullis::heartbeat::api::request::{ApiCall, RawRequest, good_beat, read};

fuzz_target!(|input: &[u8]| {
    // The first line is the target.
    let Some(end) = input.iter().position(|byte| *byte == b'\n') else { return };
    let Ok(target) = std::str::from_utf8(&input[..end]) else { return };
    let body = &input[end + 1..];
    let request = RawRequest { method: "POST", path: target, query: None, last_event: None, body: Ok(body) };
    let complete = read(request);
    if let Some(beat) = good_beat(target, body) {
        match complete {
            Ok(ApiCall::Beats(beats)) => assert_eq!(beats, [beat]),
            other => panic!("only the fast reader accepts it: {other:?}"),
        }
    }
});
