//! The systemd unit file of a role, written by `portcullis install` and by the user data of
//! launched instances. Pure. Writing the file is the caller's task.

use std::fmt::Display;

use crate::model::EnvironmentName;

/// A directory that systemd creates for the files of units, apart from the data directory of the
/// service, which hook users cannot enter.
const UNITS_DIRECTORY: &str = "portcullis-units";

/// The content of a unit file, as far as roles differ in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemdUnit {
    pub description: String,
    /// The program and its arguments, quoted for systemd.
    pub command: String,
    /// An optional file with environment variables.
    pub environment_file: Option<&'static str>,
    /// Whether the role runs hooks.
    pub runs_hooks: bool,
}

impl SystemdUnit {
    pub fn render(&self) -> String {
        let Self { description, command, environment_file, runs_hooks } = self;
        let environment_file =
            environment_file.map_or_else(String::new, |path| format!("EnvironmentFile=-{path}\n"));
        // Processes that hooks started survive a restart of the agent. They are in control groups
        // beside the subgroup in which systemd 254 and later starts the agent, so that the parent
        // group can limit them.
        let hooks = if *runs_hooks {
            format!(
                "KillMode=process\nDelegate=yes\nDelegateSubgroup=portcullis-agent\n\
                 StateDirectory={UNITS_DIRECTORY}\nStateDirectoryMode=0711\n"
            )
        } else {
            String::new()
        };
        format!(
            "[Unit]\n\
             Description=Portcullis: {description}\n\
             Wants=network-online.target\n\
             After=network-online.target\n\
             StartLimitIntervalSec=0\n\
             \n\
             [Service]\n\
             ExecStart={command}\n\
             Environment=XDG_CONFIG_HOME=/etc XDG_DATA_HOME=/var/lib\n\
             {environment_file}\
             Restart=always\n\
             RestartSec=1\n\
             RestartPreventExitStatus=3\n\
             {hooks}\
             UMask=0077\n\
             \n\
             [Install]\n\
             WantedBy=multi-user.target\n"
        )
    }

    /// Returns the unit file for the service manager of a user, which has neither the directories
    /// nor the network targets of the system.
    pub fn render_for_user(&self) -> String {
        let Self { description, command, .. } = self;
        format!(
            "[Unit]\n\
             Description=Portcullis: {description}\n\
             StartLimitIntervalSec=0\n\
             \n\
             [Service]\n\
             ExecStart={command}\n\
             Restart=always\n\
             RestartSec=1\n\
             UMask=0077\n\
             \n\
             [Install]\n\
             WantedBy=default.target\n"
        )
    }
}

/// Returns the directory for the units of one machine. `machine` is its number, or `%i` in a
/// template unit.
pub fn units_dir(environment: &EnvironmentName, machine: impl Display) -> String {
    format!("/var/lib/{UNITS_DIRECTORY}/{environment}-{machine}")
}

/// Returns the directory for the units of `portcullis up`, which has one machine.
pub fn units_dir_of_up(environment: &EnvironmentName) -> String {
    format!("/var/lib/{UNITS_DIRECTORY}/{environment}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(runs_hooks: bool, environment_file: Option<&'static str>) -> String {
        let (description, command) = ("machine 3 of prod".to_owned(), "/bin/portcullis machine".to_owned());
        SystemdUnit { description, command, environment_file, runs_hooks }.render()
    }

    #[test]
    fn only_roles_that_run_hooks_delegate_their_control_group() {
        let (with, without) = (unit(true, None), unit(false, None));
        for line in ["KillMode=process\n", "Delegate=yes\n", "StateDirectoryMode=0711\n"] {
            assert!(with.contains(line) && !without.contains(line), "{line}");
        }
        for text in [with, without] {
            assert!(text.contains("\nEnvironment=XDG_CONFIG_HOME=/etc XDG_DATA_HOME=/var/lib\n"), "{text}");
            assert!(text.contains("\nExecStart=/bin/portcullis machine\n"), "{text}");
        }
    }

    #[test]
    fn units_of_a_user_use_no_directories_or_targets_of_the_system() {
        let (description, command) = ("agent".to_owned(), "/bin/portcullis agent".to_owned());
        let text =
            SystemdUnit { description, command, environment_file: None, runs_hooks: false }.render_for_user();
        assert!(text.contains("\nExecStart=/bin/portcullis agent\n"), "{text}");
        assert!(text.contains("\nWantedBy=default.target\n"), "{text}");
        for absent in ["network-online", "XDG_", "multi-user"] {
            assert!(!text.contains(absent), "{absent} in {text}");
        }
    }

    #[test]
    fn a_missing_environment_file_does_not_keep_the_service_from_starting() {
        assert!(unit(false, Some("/etc/aws.env")).contains("\nEnvironmentFile=-/etc/aws.env\n"));
        assert!(!unit(false, None).contains("EnvironmentFile"));
    }
}
