//! The request decoder on arbitrary bytes: it returns a request or an error, and never panics or
//! allocates memory for forged lengths. Each file of `fixtures/corpus/jute` holds an operation code
//! and a body; `good-` files must be decoded and `bad-` files refused. Each file is also truncated
//! and modified.

use std::path::Path;

use portcullis::keeper::proto::{decode, decode_connect};
use proptest::prelude::*;

fn decodes(bytes: &[u8]) -> bool {
    // The first frame of a connection has another decoder; both get all inputs.
    let connects = decode_connect(bytes).is_ok();
    match bytes.split_first_chunk::<4>() {
        Some((code, body)) => decode(i32::from_be_bytes(*code), body).is_ok(),
        None => connects,
    }
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/corpus/jute");
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .expect("the corpus")
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read(path).expect("a file"))
        })
        .collect();
    files.sort();
    assert!(files.len() > 40, "the corpus is incomplete");
    files
}

#[test]
fn corpus_files_are_decoded_or_refused_as_named() {
    for (name, bytes) in corpus() {
        assert_eq!(decodes(&bytes), name.starts_with("good-"), "{name}");
    }
}

#[test]
fn truncated_and_modified_corpus_files_do_not_panic() {
    let mut decoded = 0_usize;
    for (_, bytes) in corpus() {
        for length in 0..bytes.len() {
            decoded += usize::from(decodes(&bytes[..length]));
        }
        for at in 0..bytes.len() {
            for value in [0x00, 0x01, 0x7f, 0x80, 0xff, bytes[at] ^ 0x10] {
                let mut changed = bytes.clone();
                changed[at] = value;
                decoded += usize::from(decodes(&changed));
            }
        }
    }
    assert!(decoded > 1_000, "only {decoded} of the modified requests are valid");
}

/// Generates jute fields in any order, which are valid more often than random bytes.
fn almost_jute() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        any::<i32>().prop_map(|value| value.to_be_bytes().to_vec()),
        (-2_i32..20).prop_map(|value| value.to_be_bytes().to_vec()),
        any::<i64>().prop_map(|value| value.to_be_bytes().to_vec()),
        any::<bool>().prop_map(|value| vec![u8::from(value)]),
        "(/[a-z]{0,3}){0,3}".prop_map(|path| {
            let length = i32::try_from(path.len()).expect("a short path");
            [&length.to_be_bytes()[..], path.as_bytes()].concat()
        }),
        prop::collection::vec(any::<u8>(), 0..20),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

const CODES: [i32; 27] = [
    -11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 17, 18, 19, 21, 22, 100, 101, 103, 104, 105, 106, 107,
];

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_body_of_any_operation_panics(code in prop::sample::select(&CODES[..]), body in almost_jute()) {
        let request = decode(code, &body);
        // Decoding is deterministic and reads only the given bytes.
        prop_assert_eq!(format!("{request:?}"), format!("{:?}", decode(code, &body)));
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(decodes(&bytes), decodes(&bytes));
    }
}
