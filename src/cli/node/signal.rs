//! The signal of `juju node kill`: a name with or without `SIG`, `RTMIN+N`, or a number. Pure.

use std::str::FromStr;

/// The names of the signals from 1 on, as Linux numbers them.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// The first real-time signal that programs may use.
const RTMIN: i32 = 34;
const LAST: i32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Signal(pub(super) i32);

impl FromStr for Signal {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let number = match name.strip_prefix("RTMIN+").map(str::parse::<i32>) {
            Some(offset) => offset.ok().and_then(|offset| RTMIN.checked_add(offset)),
            None if name == "RTMIN" => Some(RTMIN),
            None => (1..).zip(NAMES).find(|(_, known)| *known == name).map(|(number, _)| number),
        };
        let number = number.or_else(|| text.parse().ok()).filter(|number| (1..=LAST).contains(number));
        number.map(Self).ok_or("expected a name such as TERM or a number from 1 to 64")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in [
            ("TERM", 15),
            ("sigterm", 15),
            ("HUP", 1),
            ("SYS", 31),
            ("9", 9),
            ("64", 64),
            ("RTMIN", 34),
            ("SIGRTMIN+4", 38),
            ("RTMIN+30", 64),
        ] {
            assert_eq!(text.parse(), Ok(Signal(number)), "{text}");
        }
        for text in
            ["", "0", "65", "-1", "SIG", "NOPE", "RTMIN+31", "RTMIN-1", "RTMIN+x", "99999999999", "1 "]
        {
            assert!(text.parse::<Signal>().is_err(), "{text}");
        }
    }
}
