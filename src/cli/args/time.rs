//! A length of time as an argument: `90s`, `30m`, `2h`, `1d`. Pure.

use std::str::FromStr;

/// A time in milliseconds, at most a year.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) struct Time(pub(in crate::cli) u64);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a time such as 90s, 30m, 2h or 1d");
        let unit = text.chars().last().ok_or_else(wrong)?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3_600,
            'd' => 86_400,
            _ => return Err(wrong()),
        };
        let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
        let ms = number.checked_mul(seconds * 1000).filter(|ms| *ms > 0 && *ms <= 366 * 86_400_000);
        ms.map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, ms) in [("90s", 90_000), ("30m", 1_800_000), ("2h", 7_200_000), ("1d", 86_400_000)] {
            assert_eq!(text.parse(), Ok(Time(ms)));
        }
        for text in ["", "2", "h", "-1h", "0s", "2w", "1é", "99999999999999999d", "367d"] {
            assert!(text.parse::<Time>().is_err(), "{text}");
        }
    }
}
