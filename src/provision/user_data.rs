//! The user data of a launched instance: a script for cloud-init that writes the machine's
//! credentials to a file that only root can read, and starts `portcullis machine` now and at every
//! boot. Pure.
//!
//! The secret is only in that file: not in arguments, environment variables or systemd units. Every
//! process on the instance that can reach the metadata service can read the user data, so it holds
//! the credentials of this one machine and no other secrets. The program itself must be part of the
//! image.

use std::fmt::Write as _;

use portcullis_provider::provider::UserData;

use crate::machine::file::MachineFile;
use crate::machine::systemd_unit::{SystemdUnit, units_dir};
use crate::model::{EnvironmentName, MachineId};
use crate::store::acl::Roles;
use crate::store::{Address, Credential};

/// The path of the credentials on an instance.
const DIRECTORY: &str = "/etc/portcullis";
const SERVICE: &str = "/etc/systemd/system/portcullis-machine.service";

/// The settings that all machines of an environment share.
#[derive(Debug, Clone)]
pub struct BootConfig {
    environment: EnvironmentName,
    /// The address of the store for machines.
    store: Address,
    /// The identities that may read a machine's nodes. Hashes, not secrets.
    roles: Roles,
}

impl BootConfig {
    pub fn new(environment: EnvironmentName, store: Address, roles: Roles) -> Self {
        Self { environment, store, roles }
    }

    pub fn user_data(&self, machine: MachineId, credential: &Credential) -> UserData {
        let (environment, number) = (&self.environment, machine.number());
        let path = format!("{DIRECTORY}/machine.json");
        let (address, roles) = (self.store.clone(), self.roles.clone());
        let file = MachineFile { address, credential: credential.clone(), roles };
        // The name of an environment contains no character that is special to systemd.
        let service = SystemdUnit {
            description: format!("machine {number} of {environment}"),
            command: format!(
                "/usr/bin/env portcullis --log-level info machine --environment {environment} --id {number} \
                 --credentials {path} --units-dir {}",
                units_dir(environment, number)
            ),
            environment_file: None,
            runs_hooks: true,
        };
        let mut script = String::from("#!/bin/sh\nset -eu\numask 077\n");
        // Writing to a string cannot fail.
        let _ = writeln!(script, "mkdir -p {DIRECTORY}");
        put(&mut script, &path, &file.render());
        script.push_str("umask 022\n");
        put(&mut script, SERVICE, &service.render());
        script.push_str("systemctl daemon-reload\nsystemctl enable --now portcullis-machine.service\n");
        UserData::new(script)
    }
}

/// Renders a command that writes a file; the shell does not expand anything in its content.
fn put(script: &mut String, path: &str, contents: &str) {
    // Writing to a string cannot fail.
    let _ = write!(script, "cat > '{path}' <<'END-OF-FILE'\n{contents}END-OF-FILE\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles() -> Roles {
        let identity = |user: &str| Credential::parse(&format!("{user}:secret")).unwrap().identity();
        Roles { operator: identity("operator"), controller: identity("controller") }
    }

    fn script(store: &str) -> String {
        let boot = BootConfig::new("prod".parse().unwrap(), store.parse().unwrap(), roles());
        let credential = Credential::parse("machine-0000000007:hunter2").unwrap();
        boot.user_data(MachineId::new(7), &credential).reveal().to_owned()
    }

    #[test]
    fn the_secret_is_in_a_private_file_and_nowhere_else() {
        let script = script("zk1:2181,zk2:2181/prod");
        assert_eq!(script.matches("hunter2").count(), 1);
        let (before, after) = script.split_once("hunter2").unwrap();
        assert!(before.contains("umask 077") && !before.contains("umask 022") && after.contains("umask 022"));
        assert!(before.ends_with("{\"zookeeper\":\"zk1:2181,zk2:2181/prod\",\"auth\":\"machine-0000000007:"));
        let command = "ExecStart=/usr/bin/env portcullis --log-level info machine --environment prod --id 7 \
                       --credentials /etc/portcullis/machine.json \
                       --units-dir /var/lib/portcullis-units/prod-7\n";
        assert!(after.contains(command), "{script}");
    }

    #[test]
    fn the_systemd_unit_has_the_directories_and_control_group_that_the_agent_needs() {
        let script = script("zk1:2181");
        for line in [
            "Environment=XDG_CONFIG_HOME=/etc XDG_DATA_HOME=/var/lib",
            "KillMode=process",
            "Delegate=yes",
            "DelegateSubgroup=portcullis-agent",
            "StateDirectory=portcullis-units",
            "StateDirectoryMode=0711",
            "UMask=0077",
            "Restart=always",
            "WantedBy=multi-user.target",
        ] {
            assert!(script.lines().any(|found| found == line), "no {line} in {script}");
        }
    }

    /// Runs the script in a real shell, with temporary directories and a stub of `systemctl`.
    #[test]
    fn the_script_writes_the_files_unchanged() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().to_str().unwrap();
        let nasty = "zk:1/$(touch pwned)`id`'\"\\%n".replace(' ', "");
        let text = script(&nasty)
            .replace("/etc/systemd/system", &format!("{root}/units"))
            .replace("/etc/portcullis", &format!("{root}/portcullis"));
        std::fs::create_dir(home.path().join("units")).unwrap();
        let run = std::process::Command::new("sh")
            .args(["-c", &format!("systemctl() {{ echo \"$@\" >> {root}/called; }}\n{text}")])
            .current_dir(root)
            .output()
            .unwrap();
        assert!(run.status.success(), "{run:?}");
        let file = home.path().join("portcullis/machine.json");
        let held: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(held["zookeeper"], nasty);
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&file).unwrap().permissions()) & 0o777,
            0o600
        );
        let unit = std::fs::read_to_string(home.path().join("units/portcullis-machine.service")).unwrap();
        assert!(unit.contains("ExecStart=/usr/bin/env portcullis --log-level info machine "), "{unit}");
        let called = std::fs::read_to_string(home.path().join("called")).unwrap();
        assert_eq!(called, "daemon-reload\nenable --now portcullis-machine.service\n");
        assert!(!home.path().join("pwned").exists());
    }

    #[test]
    fn user_data_is_far_below_the_limit_of_ec2() {
        let hosts = vec!["zookeeper-with-a-long-name.example.com:2181"; 32].join(",");
        assert!(script(&hosts).len() < 8 * 1024);
    }
}
