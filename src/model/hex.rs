//! Bytes as lower-case hexadecimal digits. Pure.

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
