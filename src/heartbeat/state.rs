//! The states of a component, and what is told about the steps between them. Pure: a table, nothing else. Who counts the
//! time is `audit`, who is told is `pending`.

/// What is known of a component. One that was never heard of has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Heard for the first time, and not judged yet.
    New,
    Ok,
    /// Silent for longer than the first window: might be dead.
    Warned,
    /// Silent for longer than the second.
    Dead,
    /// It said itself that it goes away: its silence means nothing.
    Stopped,
}

/// What is told about a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Word {
    Started,
    Restarted,
    MightBeDead,
    DeclaredDead,
}

/// Counts as having gone away in order when a beat's `Status` says one of these, in any case.
const GOING_AWAY: [&str; 6] =
    ["going away", "going-away", "stopping", "shutdown", "shutting down", "terminating"];

/// Whether a beat's status announces a planned stop. Any other status is nobody's business but the sender's.
pub fn says_going_away(status: &str) -> bool {
    let status = status.trim();
    GOING_AWAY.iter().any(|word| status.eq_ignore_ascii_case(word))
}

/// The windows of a component, in milliseconds: silence until the warning, and until it is declared
/// dead. A component that says that it beats every `interval` seconds may miss one beat before the
/// warning and two before it is declared dead. Neither window is shorter than the common one.
pub fn windows(warn: u64, err: u64, interval: u16) -> (u64, u64) {
    let beat = u64::from(interval) * 1000;
    (warn.max(2 * beat), err.max(3 * beat))
}

impl State {
    /// What a beat makes of it, and what is told about that.
    pub fn on_beat(self, going_away: bool) -> (Self, Option<Word>) {
        let next = if going_away { Self::Stopped } else { Self::Ok };
        let told = match self {
            // One that only ever said good-bye has not started.
            Self::New => (!going_away).then_some(Word::Started),
            Self::Warned | Self::Dead => Some(Word::Restarted),
            // Nothing was told when it went, so there is nothing to take back.
            Self::Ok | Self::Stopped => None,
        };
        (next, told)
    }

    /// What a silence of `age` makes of it.
    pub fn on_silence(self, age: u64, warn: u64, err: u64) -> Option<(Self, Word)> {
        match self {
            Self::Ok | Self::Warned if age >= err => Some((Self::Dead, Word::DeclaredDead)),
            Self::Ok if age >= warn => Some((Self::Warned, Word::MightBeDead)),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Ok => "ok",
            Self::Warned => "warned",
            Self::Dead => "dead",
            Self::Stopped => "stopped",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::New, Self::Ok, Self::Warned, Self::Dead, Self::Stopped]
            .into_iter()
            .find(|state| state.as_str() == text)
    }
}

impl Word {
    pub const ALL: [Self; 4] = [Self::Started, Self::Restarted, Self::MightBeDead, Self::DeclaredDead];

    /// The state manager's words for it: state and flag.
    pub fn state_and_flag(self) -> (&'static str, &'static str) {
        match self {
            Self::Started | Self::Restarted => ("Ready", "OK"),
            Self::MightBeDead => ("Ready", "Warning"),
            Self::DeclaredDead => ("Standby", "Alert"),
        }
    }

    pub fn message(self) -> &'static str {
        match self {
            Self::Started => "Heartbeat started",
            Self::Restarted => "Heartbeat restarted",
            Self::MightBeDead => "Heartbeat stopped -- might be dead",
            Self::DeclaredDead => "Heartbeat stopped -- declared dead",
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Restarted => "restarted",
            Self::MightBeDead => "might-be-dead",
            Self::DeclaredDead => "declared-dead",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|word| word.as_str() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beats_move_as_the_table_says() {
        use State::{Dead, New, Ok, Stopped, Warned};
        for (from, to, told) in [
            (New, Ok, Some(Word::Started)),
            (Ok, Ok, None),
            (Warned, Ok, Some(Word::Restarted)),
            (Dead, Ok, Some(Word::Restarted)),
            (Stopped, Ok, None),
        ] {
            assert_eq!(from.on_beat(false), (to, told), "{from:?}");
        }
        for (from, told) in [
            (New, None),
            (Ok, None),
            (Warned, Some(Word::Restarted)),
            (Dead, Some(Word::Restarted)),
            (Stopped, None),
        ] {
            assert_eq!(from.on_beat(true), (Stopped, told), "{from:?}");
        }
    }

    #[test]
    fn silence_moves_as_the_table_says() {
        use State::{Dead, New, Ok, Stopped, Warned};
        let (warning, death) = (Some((Warned, Word::MightBeDead)), Some((Dead, Word::DeclaredDead)));
        for (from, age, expected) in [
            (Ok, 9, None),
            (Ok, 10, warning),
            (Ok, 29, warning),
            (Ok, 30, death),
            (Warned, 10, None),
            (Warned, 29, None),
            (Warned, 30, death),
            (Dead, 1000, None),
            (Stopped, 1000, None),
            (New, 1000, None),
        ] {
            assert_eq!(from.on_silence(age, 10, 30), expected, "{from:?} {age}");
        }
    }

    #[test]
    fn slow_components_have_longer_windows() {
        for (interval, expected) in [
            (0, (10_000, 30_000)),
            (5, (10_000, 30_000)),
            (6, (12_000, 30_000)),
            (10, (20_000, 30_000)),
            (60, (120_000, 180_000)),
            (u16::MAX, (131_070_000, 196_605_000)),
        ] {
            assert_eq!(windows(10_000, 30_000, interval), expected, "{interval}");
        }
    }

    #[test]
    fn words_are_the_state_managers() {
        assert_eq!(Word::Started.state_and_flag(), ("Ready", "OK"));
        assert_eq!(Word::Restarted.state_and_flag(), ("Ready", "OK"));
        assert_eq!(Word::MightBeDead.state_and_flag(), ("Ready", "Warning"));
        assert_eq!(Word::DeclaredDead.state_and_flag(), ("Standby", "Alert"));
        for word in Word::ALL {
            assert_eq!(Word::parse(word.as_str()), Some(word));
        }
    }

    #[test]
    fn only_a_farewell_is_one() {
        for status in ["going away", " Stopping ", "SHUTDOWN", "terminating"] {
            assert!(says_going_away(status), "{status}");
        }
        for status in ["OK", "", "Kernel Oops", "not stopping", "shutdown -h"] {
            assert!(!says_going_away(status), "{status}");
        }
    }
}
