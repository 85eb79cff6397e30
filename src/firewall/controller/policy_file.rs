//! The policy file while the agent runs. Each full read includes the file; if the file cannot be
//! used, the last valid policy stays in force and every report shows the reason.

use portcullis_provider::Firewall;
use tracing::{info, warn};

use super::{FirewallController, PolicyReader};
use crate::firewall::report::Report;
use crate::store::tree::Tree;

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Sets a policy that is read again at every full comparison.
    #[must_use]
    pub fn with_policy_reader(mut self, reader: Option<PolicyReader>) -> Self {
        self.policy_reader = reader;
        self
    }

    pub(super) fn read_policy_again(&mut self) {
        let Some(read) = &mut self.policy_reader else { return };
        match read() {
            Ok(policy) => {
                if policy != self.policy {
                    info!("policy changed");
                    self.policy = policy;
                }
                if self.policy_problem.take().is_some() {
                    info!("policy file can be used again");
                }
            }
            Err(problem) => {
                let problem = format!("the policy that was read last stays in force: {problem}");
                if self.policy_problem.as_ref() != Some(&problem) {
                    warn!("{problem}");
                    self.policy_problem = Some(problem);
                }
            }
        }
    }

    pub(super) fn add_policy_problem(&self, report: &mut Report) {
        if let Some(problem) = &self.policy_problem {
            let other = report.problem.take().map_or_else(String::new, |other| format!("; {other}"));
            report.problem = Some(format!("{problem}{other}"));
        }
    }
}
