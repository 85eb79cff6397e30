//! The systemd service of a machine's agent, for `portcullis join --service`. All requirements are
//! checked before the token is used, so that the command can be run again.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};
use rustix::process::geteuid;

use crate::cli::args::{hook_user, units};
use crate::cli::error::{Refusal, Usage};
use crate::cli::output;
use crate::cli::portcullis::install;
use crate::model::{EnvironmentName, MachineId};

/// A directory that exists while systemd is the service manager of the host.
const SYSTEMD: &str = "/run/systemd/system";

pub(super) struct MachineService<'a> {
    pub(super) environment: &'a EnvironmentName,
    pub(super) machine: MachineId,
    pub(super) hook_user: &'a str,
}

impl MachineService<'_> {
    /// Refuses a host on which the service cannot be installed or cannot run.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if !geteuid().is_root() {
            return Err(Refusal::ServiceNeedsRoot.into());
        }
        let version = Command::new("systemctl").arg("--version").output();
        if !Path::new(SYSTEMD).is_dir() || !version.is_ok_and(|output| output.status.success()) {
            return Err(Refusal::NoSystemd.into());
        }
        units::tools()?;
        // Without this file, users can be given by number only.
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        hook_user::parse(self.hook_user, &users).map_err(Usage::new)?;
        install::check_machine_service(self.environment, self.hook_user)
    }

    /// Writes the unit file, and starts the service now and at every boot.
    pub(super) fn start(&self) -> anyhow::Result<()> {
        install::machine_service(self.environment, self.hook_user)?;
        systemctl(&["daemon-reload"])?;
        let service = format!("portcullis-machine@{}.service", self.machine);
        systemctl(&["enable", "--now", &service])?;
        output::message(&format!("{service} is enabled and running"));
        Ok(())
    }
}

fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let line = format!("systemctl {}", arguments.join(" "));
    let status = Command::new("systemctl").args(arguments).status();
    let status = status.with_context(|| format!("cannot run `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}
