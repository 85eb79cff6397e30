//! A beat as its sender sent it. Pure.

use std::fmt;

use crate::heartbeat::core::name::Name;

/// The longest `Timestamp` that is kept for an event: RFC 3339 with nanoseconds has 35 bytes.
pub const MAX_STAMP: usize = 40;

/// The longest `Interval` of a component, in seconds. Three times that is a day, the age at which a
/// beat is ignored.
pub const MAX_INTERVAL: u16 = 28_800;

/// The `Timestamp` of a beat: any text, because it affects no decision. Longer text is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    bytes: [u8; MAX_STAMP],
    length: u8,
}

impl Stamp {
    /// Empty if the text is too long or has control characters.
    pub fn of(text: &str) -> Self {
        let mut stamp = Self::default();
        if text.len() <= MAX_STAMP && !text.chars().any(char::is_control) {
            stamp.bytes[..text.len()].copy_from_slice(text.as_bytes());
            stamp.length = text.len() as u8;
        }
        stamp
    }

    pub fn as_str(&self) -> &str {
        // The bytes were copied from a whole string.
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// `None` if it is empty.
    pub fn text(&self) -> Option<&str> {
        (!self.is_empty()).then(|| self.as_str())
    }
}

impl Default for Stamp {
    fn default() -> Self {
        Self { bytes: [0; MAX_STAMP], length: 0 }
    }
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// The fields of a beat, without the name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BeatDetails {
    /// The component is about to stop as planned.
    pub going_away: bool,
    /// Seconds between two beats of this component; 0 if the beat does not contain it.
    pub interval: u16,
    pub stamp: Stamp,
}

/// A beat as it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncomingBeat {
    pub name: Name,
    pub details: BeatDetails,
}

/// Converts a name, and whether the component is about to stop.
impl From<(Name, bool)> for IncomingBeat {
    fn from((name, going_away): (Name, bool)) -> Self {
        Self { name, details: BeatDetails { going_away, ..BeatDetails::default() } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_kept_up_to_their_limit() {
        for text in ["", "now", "2026-01-01T00:00:00.123456789+01:00", "ünï", &"x".repeat(MAX_STAMP)] {
            assert_eq!(Stamp::of(text).as_str(), text);
        }
        for text in ["a\nb", "\0", &"x".repeat(MAX_STAMP + 1)] {
            assert_eq!(Stamp::of(text).text(), None, "{text:?}");
        }
    }
}
