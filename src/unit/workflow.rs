//! The workflow of a unit: which hook is due, and what its result means. Maps the unit's state and
//! what is wanted to the next step. The caller writes [`State`] to the tree before a hook starts
//! and after it has ended, so that the next agent finds every started hook, whenever this agent
//! dies. Pure.
//!
//! `exposed` and `unexposed` depend on the current flag only: if a service is exposed and unexposed
//! quickly, either both hooks run or neither does.

use std::fmt;

use serde_json::{Map, Value, json};

/// The most bytes of a state.
pub const MAX_STATE_BYTES: usize = 32 * 1024;

/// The hooks that a charm may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    Install,
    Start,
    Stop,
    Exposed,
    Unexposed,
}

impl Hook {
    pub const ALL: [Self; 5] = [Self::Install, Self::Start, Self::Stop, Self::Exposed, Self::Unexposed];

    /// The name of its file in `hooks/`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Install => "install",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Exposed => "exposed",
            Self::Unexposed => "unexposed",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hook| hook.name() == name)
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The phase of a unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Pending,
    Installed,
    Started,
    Stopped,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Pending, Self::Installed, Self::Started, Self::Stopped];

    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Installed => "installed",
            Self::Started => "started",
            Self::Stopped => "stopped",
        }
    }
}

/// The operator's decision about a failed hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// Run it again.
    Retry,
    /// Continue as if it had succeeded.
    Skip,
}

impl Resolution {
    pub fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Skip => "skip",
        }
    }
}

/// A failed hook, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub hook: Hook,
    /// For example "exit code 1".
    pub reason: String,
    /// The last lines of its output.
    pub output: String,
}

/// A hook that was started. Its number distinguishes it from earlier runs of the same hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub hook: Hook,
    pub number: u64,
}

/// The recorded state of a unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub phase: Phase,
    /// `exposed` ran, and `unexposed` has not run since.
    pub exposed: bool,
    /// How many hooks were started so far.
    pub runs: u64,
    pub running: Option<Run>,
    pub failure: Option<Failure>,
    pub resolved: Option<Resolution>,
}

/// The state of a unit that the operator has requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The service is exposed.
    pub exposed: bool,
    /// The unit was removed.
    pub gone: bool,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do until something changes.
    Wait,
    /// Write this state, run its hook, and pass the result to [`State::ended`].
    Begin(State),
    /// A hook was started: find its result, or run it if it has none.
    Resume(Run),
    /// Write this state, and ask for the next step again.
    Settle(State),
}

/// The result of a hook. A missing hook counts as one that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    Well,
    Badly {
        reason: String,
        output: String,
    },
    /// The hook was due, but did not start.
    NotBegun {
        reason: String,
    },
}

impl Ended {
    /// A failure without output.
    pub fn badly(reason: impl Into<String>) -> Self {
        Self::Badly { reason: reason.into(), output: String::new() }
    }
}

impl State {
    /// The label in status: a phase, or a failed hook.
    pub fn label(&self) -> String {
        match &self.failure {
            Some(failure) => format!("{}-error", failure.hook),
            None => self.phase.name().to_owned(),
        }
    }

    pub fn next(&self, wanted: Wanted) -> Step {
        if let Some(run) = self.running {
            return Step::Resume(run);
        }
        match (&self.failure, self.resolved) {
            (None, None) => self.due(wanted).map_or(Step::Wait, |hook| Step::Begin(self.begun(hook))),
            // No failure is left to resolve.
            (None, Some(_)) => Step::Settle(Self { resolved: None, ..self.clone() }),
            // A removed unit has no failure to resolve.
            (Some(failure), None) if wanted.gone && failure.hook != Hook::Stop => {
                Step::Settle(Self { failure: None, ..self.clone() })
            }
            (Some(_), None) => Step::Wait,
            (Some(failure), Some(resolution)) => Step::Settle(self.after(failure.hook, resolution, wanted)),
        }
    }

    fn due(&self, wanted: Wanted) -> Option<Hook> {
        match self.phase {
            Phase::Started if wanted.gone => Some(Hook::Stop),
            _ if wanted.gone => None,
            Phase::Pending => Some(Hook::Install),
            Phase::Installed => Some(Hook::Start),
            Phase::Started if wanted.exposed && !self.exposed => Some(Hook::Exposed),
            Phase::Started if !wanted.exposed && self.exposed => Some(Hook::Unexposed),
            Phase::Started | Phase::Stopped => None,
        }
    }

    fn begun(&self, hook: Hook) -> Self {
        let runs = self.runs + 1;
        Self { runs, running: Some(Run { hook, number: runs }), ..self.clone() }
    }

    /// The next step after a failed hook and a decision. A failed `exposed` or `unexposed` counts
    /// as run, so a changed flag leads to the other hook; only an unchanged flag leads to a retry.
    fn after(&self, failed: Hook, resolution: Resolution, wanted: Wanted) -> Self {
        let settled = Self { failure: None, resolved: None, ..self.clone() };
        let of_the_pair = matches!(failed, Hook::Exposed | Hook::Unexposed);
        let begun = self.exposed == (failed == Hook::Exposed);
        match resolution {
            // The hook did not start, so only the flag decides, and nothing has to be undone.
            Resolution::Skip if of_the_pair && !begun => Self { exposed: wanted.exposed, ..settled },
            Resolution::Skip => settled.passed(failed),
            Resolution::Retry if of_the_pair && begun => Self { exposed: !wanted.exposed, ..settled },
            Resolution::Retry => settled,
        }
    }

    /// The state after a hook was due and could not start, for example because the disk was full.
    pub fn not_begun(&self, hook: Hook, why: &str) -> Self {
        let failure = Failure { hook, reason: format!("not started: {why}"), output: String::new() };
        Self { failure: Some(failure), ..self.clone() }
    }

    /// The state after a run. A run that this state does not contain changes nothing.
    pub fn ended(&self, run: Run, ended: &Ended) -> Self {
        if self.running != Some(run) {
            return self.clone();
        }
        // A decision from before the hook ended was not about this failure.
        let idle = Self { running: None, failure: None, resolved: None, ..self.clone() };
        match ended {
            Ended::Well => idle.passed(run.hook),
            Ended::Badly { reason, output } => {
                let failure = Failure { hook: run.hook, reason: reason.clone(), output: output.clone() };
                let exposed = match run.hook {
                    Hook::Exposed => true,
                    Hook::Unexposed => false,
                    _ => idle.exposed,
                };
                Self { failure: Some(failure), exposed, ..idle }
            }
            // A unit that was not exposed is not unexposed.
            Ended::NotBegun { reason } => {
                let failure = Failure { hook: run.hook, reason: reason.clone(), output: String::new() };
                Self { failure: Some(failure), ..idle }
            }
        }
    }

    fn passed(self, hook: Hook) -> Self {
        match hook {
            Hook::Install => Self { phase: Phase::Installed, ..self },
            Hook::Start => Self { phase: Phase::Started, ..self },
            Hook::Stop => Self { phase: Phase::Stopped, ..self },
            Hook::Exposed => Self { exposed: true, ..self },
            Hook::Unexposed => Self { exposed: false, ..self },
        }
    }

    /// Returns the JSON that is stored in the tree.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut map = Map::new();
        map.insert("state".to_owned(), self.label().into());
        map.insert("phase".to_owned(), self.phase.name().into());
        map.insert("exposed".to_owned(), self.exposed.into());
        map.insert("runs".to_owned(), self.runs.into());
        if let Some(run) = self.running {
            map.insert("running".to_owned(), json!({"hook": run.hook.name(), "run": run.number}));
        }
        if let Some(Failure { hook, reason, output }) = &self.failure {
            let failure = json!({"hook": hook.name(), "reason": reason, "output": output});
            map.insert("error".to_owned(), failure);
        }
        if let Some(resolution) = self.resolved {
            map.insert("resolved".to_owned(), resolution.name().into());
        }
        Value::Object(map).to_string().into_bytes()
    }

    /// # Errors
    /// The problem with the data. An unreadable state is never treated as that of a new unit, which
    /// would be installed again.
    pub fn parse(data: &[u8]) -> Result<Self, String> {
        if data.len() > MAX_STATE_BYTES {
            return Err(format!("{} bytes are more than the {MAX_STATE_BYTES} allowed", data.len()));
        }
        let value: Value = serde_json::from_slice(data).map_err(|e| format!("not JSON: {e}"))?;
        let map = value.as_object().ok_or("not a JSON object")?;
        let phase = text(map, "phase")?;
        Ok(Self {
            phase: Phase::ALL.into_iter().find(|known| known.name() == phase).ok_or("no such phase")?,
            exposed: map.get("exposed").and_then(Value::as_bool).ok_or("\"exposed\" is not true or false")?,
            runs: number(map, "runs")?,
            running: part(map, "running", |map| Ok(Run { hook: hook(map)?, number: number(map, "run")? }))?,
            failure: part(map, "error", |map| {
                let (reason, output) = (text(map, "reason")?.to_owned(), text(map, "output")?.to_owned());
                Ok(Failure { hook: hook(map)?, reason, output })
            })?,
            resolved: match map.get("resolved") {
                None => None,
                Some(Value::String(word)) if word == "retry" => Some(Resolution::Retry),
                Some(Value::String(word)) if word == "skip" => Some(Resolution::Skip),
                Some(_) => return Err("\"resolved\" is neither retry nor skip".to_owned()),
            },
        })
    }
}

fn text<'a>(map: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    map.get(key).and_then(Value::as_str).ok_or_else(|| format!("\"{key}\" is not a text"))
}

fn number(map: &Map<String, Value>, key: &str) -> Result<u64, String> {
    map.get(key).and_then(Value::as_u64).ok_or_else(|| format!("\"{key}\" is not a number"))
}

fn hook(map: &Map<String, Value>) -> Result<Hook, String> {
    Hook::parse(text(map, "hook")?).ok_or_else(|| "no such hook".to_owned())
}

fn part<V>(
    map: &Map<String, Value>,
    key: &str,
    read: impl FnOnce(&Map<String, Value>) -> Result<V, String>,
) -> Result<Option<V>, String> {
    match map.get(key) {
        None => Ok(None),
        Some(Value::Object(inner)) => read(inner).map(Some).map_err(|e| format!("\"{key}\": {e}")),
        Some(_) => Err(format!("\"{key}\" is not an object")),
    }
}

#[cfg(test)]
#[path = "workflow_tests.rs"]
mod tests;
