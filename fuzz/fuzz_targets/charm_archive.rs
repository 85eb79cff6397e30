//! Charm archives: any bytes are refused or give entries, and these entries make an archive with
//! the same entries again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use portcullis::unit::charm::archive::{pack, unpack};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(entries) = unpack(bytes) {
        let again = unpack(&pack(&entries)).expect("an archive that was made here is valid");
        assert_eq!(again, entries);
    }
});
