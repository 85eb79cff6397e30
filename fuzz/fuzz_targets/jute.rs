//! The decoder of ZooKeeper's requests: any bytes give a request or an error.
//! `fixtures/corpus/jute` is a good first corpus: an operation code and a body in each file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use portcullis::keeper::proto::{decode, decode_connect};

fuzz_target!(|bytes: &[u8]| {
    let _ = decode_connect(bytes);
    if let Some((code, body)) = bytes.split_first_chunk::<4>() {
        let _ = decode(i32::from_be_bytes(*code), body);
    }
});
