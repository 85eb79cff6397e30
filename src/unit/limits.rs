//! How many processes and how much memory a unit may have: its hooks and everything that they
//! start, together. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kernel's largest number of processes.
const MOST_PROCESSES: u64 = 4_194_304;

/// A shell needs at least this much memory.
const LEAST_BYTES: u64 = 1 << 20;

const UNITS: [(char, u64); 4] = [('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];

/// Limits of one unit. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookLimits {
    /// Processes and threads at once.
    pub pids: Option<u64>,
    pub memory_bytes: Option<u64>,
}

impl Default for HookLimits {
    fn default() -> Self {
        Self { pids: Some(512), memory_bytes: Some(1 << 30) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimits {
    #[error("'{0}' is not pids=N or memory=BYTES")]
    Unknown(String),
    #[error("{0} is given twice")]
    Twice(&'static str),
    #[error("pids={0}: a number from 1 to {MOST_PROCESSES}, or none")]
    Pids(String),
    #[error("memory={0}: bytes with K, M, G or T, at least 1M, or none")]
    Memory(String),
}

/// For example `pids=512,memory=1G`. A limit that is not named has its default; `none` removes it.
impl FromStr for HookLimits {
    type Err = InvalidLimits;

    fn from_str(text: &str) -> Result<Self, InvalidLimits> {
        let (mut pids, mut memory) = (None, None);
        for part in text.split(',') {
            let shown = || part.escape_debug().to_string();
            match part.split_once('=') {
                Some(("pids", _)) if pids.is_some() => return Err(InvalidLimits::Twice("pids")),
                Some(("pids", value)) => {
                    let allowed = |most: &u64| (1..=MOST_PROCESSES).contains(most);
                    let value = limit(value, |value| value.parse().ok().filter(allowed));
                    pids = Some(value.ok_or_else(|| InvalidLimits::Pids(shown()[5..].to_owned()))?);
                }
                Some(("memory", _)) if memory.is_some() => return Err(InvalidLimits::Twice("memory")),
                Some(("memory", value)) => {
                    let value = limit(value, |value| bytes(value).filter(|bytes| *bytes >= LEAST_BYTES));
                    memory = Some(value.ok_or_else(|| InvalidLimits::Memory(shown()[7..].to_owned()))?);
                }
                _ => return Err(InvalidLimits::Unknown(shown())),
            }
        }
        let usual = Self::default();
        Ok(Self { pids: pids.unwrap_or(usual.pids), memory_bytes: memory.unwrap_or(usual.memory_bytes) })
    }
}

fn limit(value: &str, parse: impl FnOnce(&str) -> Option<u64>) -> Option<Option<u64>> {
    if value == "none" { Some(None) } else { parse(value).map(Some) }
}

fn bytes(value: &str) -> Option<u64> {
    let unit = UNITS.iter().find_map(|(name, size)| Some((value.strip_suffix(*name)?, *size)));
    let (number, size) = unit.unwrap_or((value, 1));
    // A sign is not a digit.
    let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| number.parse().ok()).flatten().and_then(|number: u64| number.checked_mul(size))
}

impl fmt::Display for HookLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pids {
            Some(pids) => write!(f, "pids={pids}")?,
            None => f.write_str("pids=none")?,
        }
        let Some(bytes) = self.memory_bytes else { return f.write_str(",memory=none") };
        match UNITS.iter().rev().find(|(_, size)| bytes % size == 0) {
            Some((name, size)) => write!(f, ",memory={}{name}", bytes / size),
            None => write!(f, ",memory={bytes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_parse_as_displayed() {
        let limits = |pids, memory_bytes| HookLimits { pids, memory_bytes };
        for (text, expected, shown) in [
            ("pids=512,memory=1G", limits(Some(512), Some(1 << 30)), "pids=512,memory=1G"),
            ("memory=1536M", limits(Some(512), Some(1536 << 20)), "pids=512,memory=1536M"),
            ("pids=20", limits(Some(20), Some(1 << 30)), "pids=20,memory=1G"),
            ("memory=none,pids=none", limits(None, None), "pids=none,memory=none"),
            ("memory=1048577,pids=1", limits(Some(1), Some(1_048_577)), "pids=1,memory=1048577"),
        ] {
            let read: HookLimits = text.parse().unwrap();
            assert_eq!((read, read.to_string().as_str()), (expected, shown));
            assert_eq!(shown.parse(), Ok(read));
        }
        assert_eq!(HookLimits::default().to_string(), "pids=512,memory=1G");
    }

    #[test]
    fn invalid_limits_are_refused() {
        for (text, part) in [
            ("", "'' is not pids=N"),
            ("pids", "'pids' is not"),
            ("cpu=3", "'cpu=3' is not"),
            ("pids=1,", "'' is not"),
            ("pids=1,pids=2", "pids is given twice"),
            ("memory=1G,memory=1G", "memory is given twice"),
            ("pids=0", "pids=0: a number"),
            ("pids=-1", "pids=-1: a number"),
            ("pids=9999999", "pids=9999999: a number"),
            ("memory=1023K", "memory=1023K: bytes"),
            ("memory=+1G", "memory=+1G: bytes"),
            ("memory=G", "memory=G: bytes"),
            ("memory=1g", "memory=1g: bytes"),
            ("memory=99999999999T", "memory=99999999999T: bytes"),
        ] {
            let refused = text.parse::<HookLimits>().unwrap_err().to_string();
            assert!(refused.starts_with(part), "{text}: {refused}");
        }
    }
}
