//! The policy while the controller runs. Each full read includes the policy file; if the file
//! cannot be used, the last valid policy stays in force and every report shows the reason.

use tracing::{info, warn};

use crate::firewall::policy::Policy;
use crate::firewall::report::Report;

/// Reads the policy again, or returns why it cannot be used.
pub type PolicyReader = Box<dyn FnMut() -> Result<Policy, String> + Send + Sync>;

pub(super) struct PolicyFile {
    /// The last policy that was read successfully.
    current: Policy,
    /// `None` if there is no file.
    reader: Option<PolicyReader>,
    /// Why the policy could not be read again. Shown in the reports of all machines.
    problem: Option<String>,
}

impl PolicyFile {
    pub(super) fn new(current: Policy) -> Self {
        Self { current, reader: None, problem: None }
    }

    pub(super) fn set_reader(&mut self, reader: Option<PolicyReader>) {
        self.reader = reader;
    }

    pub(super) fn current(&self) -> &Policy {
        &self.current
    }

    /// Reads the file again, if there is one.
    pub(super) fn reread(&mut self) {
        let Some(read) = &mut self.reader else { return };
        match read() {
            Ok(policy) => {
                if policy != self.current {
                    info!("policy changed");
                    self.current = policy;
                }
                if self.problem.take().is_some() {
                    info!("policy file can be used again");
                }
            }
            Err(problem) => {
                let problem = format!("the policy that was read last stays in force: {problem}");
                if self.problem.as_ref() != Some(&problem) {
                    warn!(problem, "policy file cannot be used");
                    self.problem = Some(problem);
                }
            }
        }
    }

    /// Adds the problem of the file to a report, before its other problem.
    pub(super) fn add_problem(&self, report: &mut Report) {
        if let Some(problem) = &self.problem {
            let other = report.problem.take().map_or_else(String::new, |other| format!("; {other}"));
            report.problem = Some(format!("{problem}{other}"));
        }
    }
}
