//! The states of a component, and the notifications for the steps between them. A table only:
//! `audit` measures the time, `hsm_batches` sends. Pure.

/// The state of a known component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// The first beat was received, and the judge has not decided yet.
    New,
    Ok,
    /// Silent for longer than the warning window: might be dead.
    Warned,
    /// Silent for longer than the second window.
    Dead,
    /// The component announced a planned stop: its silence has no meaning.
    Stopped,
}

/// A notification about a step between two states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Notification {
    Started,
    Restarted,
    MightBeDead,
    DeclaredDead,
}

/// A `Status` of a beat that announces a planned stop, in upper or lower case.
const GOING_AWAY: [&str; 6] =
    ["going away", "going-away", "stopping", "shutdown", "shutting down", "terminating"];

/// Whether a beat's status announces a planned stop. Any other status has no effect.
pub fn says_going_away(status: &str) -> bool {
    let status = status.trim();
    GOING_AWAY.iter().any(|notification| status.eq_ignore_ascii_case(notification))
}

/// The windows of a component, in milliseconds: silence until the warning, and until it is declared
/// dead. A component that says that it beats every `interval` seconds may miss one beat before the
/// warning and two before it is declared dead. Neither window is shorter than the common one.
pub fn windows(warn: u64, err: u64, interval: u16) -> (u64, u64) {
    let beat = u64::from(interval) * 1000;
    (warn.max(2 * beat), err.max(3 * beat))
}

impl State {
    /// The state after a beat, and the notification.
    pub fn on_beat(self, going_away: bool) -> (Self, Option<Notification>) {
        let next = if going_away { Self::Stopped } else { Self::Ok };
        let notification = match self {
            // A component whose first beat announces its stop has not started.
            Self::New => (!going_away).then_some(Notification::Started),
            Self::Warned | Self::Dead => Some(Notification::Restarted),
            // The stop caused no notification, so the return causes none.
            Self::Ok | Self::Stopped => None,
        };
        (next, notification)
    }

    /// The state after a silence of `age`, and the notification.
    pub fn on_silence(self, age: u64, warn: u64, err: u64) -> Option<(Self, Notification)> {
        match self {
            Self::Ok | Self::Warned if age >= err => Some((Self::Dead, Notification::DeclaredDead)),
            Self::Ok if age >= warn => Some((Self::Warned, Notification::MightBeDead)),
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

impl Notification {
    pub const ALL: [Self; 4] = [Self::Started, Self::Restarted, Self::MightBeDead, Self::DeclaredDead];

    /// State and flag for the state manager.
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
        Self::ALL.into_iter().find(|notification| notification.as_str() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beats_move_as_the_table_says() {
        use State::{Dead, New, Ok, Stopped, Warned};
        for (from, to, notification) in [
            (New, Ok, Some(Notification::Started)),
            (Ok, Ok, None),
            (Warned, Ok, Some(Notification::Restarted)),
            (Dead, Ok, Some(Notification::Restarted)),
            (Stopped, Ok, None),
        ] {
            assert_eq!(from.on_beat(false), (to, notification), "{from:?}");
        }
        for (from, notification) in [
            (New, None),
            (Ok, None),
            (Warned, Some(Notification::Restarted)),
            (Dead, Some(Notification::Restarted)),
            (Stopped, None),
        ] {
            assert_eq!(from.on_beat(true), (Stopped, notification), "{from:?}");
        }
    }

    #[test]
    fn silence_moves_as_the_table_says() {
        use State::{Dead, New, Ok, Stopped, Warned};
        let (warning, death) =
            (Some((Warned, Notification::MightBeDead)), Some((Dead, Notification::DeclaredDead)));
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
    fn notifications_have_the_texts_of_hms_hbtd() {
        assert_eq!(Notification::Started.state_and_flag(), ("Ready", "OK"));
        assert_eq!(Notification::Restarted.state_and_flag(), ("Ready", "OK"));
        assert_eq!(Notification::MightBeDead.state_and_flag(), ("Ready", "Warning"));
        assert_eq!(Notification::DeclaredDead.state_and_flag(), ("Standby", "Alert"));
        for notification in Notification::ALL {
            assert_eq!(Notification::parse(notification.as_str()), Some(notification));
        }
    }

    #[test]
    fn only_known_texts_announce_a_stop() {
        for status in ["going away", " Stopping ", "SHUTDOWN", "terminating"] {
            assert!(says_going_away(status), "{status}");
        }
        for status in ["OK", "", "Kernel Oops", "not stopping", "shutdown -h"] {
            assert!(!says_going_away(status), "{status}");
        }
    }
}
