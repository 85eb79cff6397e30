//! Compiles fuzz targets and runs each with some inputs, without cargo-fuzz and libFuzzer.

// The targets name this crate `libfuzzer_sys`.
extern crate self as libfuzzer_sys;

use proptest::collection::vec;
use proptest::prelude::*;

/// Includes the fuzz targets. Each has the attribute `no_main`, which has no effect in a module.
macro_rules! targets {
    ($($name:ident: $file:literal,)+) => {
        $(
            #[path = $file]
            #[allow(unused_attributes)]
            mod $name;
        )+

        const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name::run)),+];
    };
}

targets! {
    beats: "../fuzz/fuzz_targets/beats.rs",
    charm_archive: "../fuzz/fuzz_targets/charm_archive.rs",
    jute: "../fuzz/fuzz_targets/jute.rs",
}

/// Makes a function of a fuzz target. The targets import it, so it is defined below them.
macro_rules! fuzz_target {
    (|$input:ident: &[u8]| $body:block) => {
        pub(crate) fn run($input: &[u8]) {
            $body
        }
    };
}
pub(crate) use fuzz_target;

/// A target that compares with the server of hyper, which the main build does not contain.
const EXCEPT: &str = "http_head";

/// Inputs that at least one target accepts.
const INPUTS: &[&[u8]] = &[
    b"",
    b"/heartbeat\n{\"Component\":\"x0c0s0b0n0\",\"Hostname\":\"\",\"NID\":\"\",\"Status\":\"OK\",\
      \"Timestamp\":\"1\"}",
];

#[test]
fn every_target_is_included() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let entries = std::fs::read_dir(directory).expect("the targets");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").path().file_stem().expect("a name").display().to_string())
        .collect();
    names.sort_unstable();
    names.retain(|name| name != EXCEPT);
    assert_eq!(names, TARGETS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
}

#[test]
fn targets_accept_chosen_inputs() {
    for (_, run) in TARGETS {
        INPUTS.iter().for_each(|input| run(input));
    }
}

proptest! {
    #[test]
    fn targets_accept_random_inputs(input in vec(any::<u8>(), 0..200)) {
        TARGETS.iter().for_each(|(_, run)| run(&input));
    }
}
