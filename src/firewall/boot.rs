//! What a launched instance is told at its first start: a script for cloud-init that leaves the machine's credentials in a
//! file of root's own and starts `portcullis machine` now and at every start. Pure.
//!
//! The secret is nowhere else: not in an argument, not in a variable, not in a unit of systemd. User data can be asked for
//! by whoever is on the instance and may talk to its metadata service, so it holds the one machine's credentials and
//! nothing that is worth more. The program itself must be on the image.

use std::fmt::Write as _;

use portcullis_provider::provider::UserData;
use serde_json::json;

use crate::model::{EnvironmentName, MachineId};
use crate::store::acl::Roles;
use crate::store::{Address, Credential};

/// Where the credentials are on an instance.
const DIRECTORY: &str = "/etc/portcullis";
const SERVICE: &str = "/etc/systemd/system/portcullis-machine.service";

/// What all machines of an environment are told.
#[derive(Debug, Clone)]
pub struct Boot {
    environment: EnvironmentName,
    /// The store, as machines reach it.
    store: Address,
    /// Who may read what machines write. Hashes, not secrets.
    roles: Roles,
}

impl Boot {
    pub fn new(environment: EnvironmentName, store: Address, roles: Roles) -> Self {
        Self { environment, store, roles }
    }

    pub fn user_data(&self, machine: MachineId, credential: &Credential) -> UserData {
        let (environment, number) = (&self.environment, machine.number());
        let file = format!("{DIRECTORY}/machine.json");
        let secret = json!({
            "zookeeper": self.store.to_string(),
            "auth": credential.expose(),
            "operator": self.roles.operator.as_str(),
            "controller": self.roles.controller.as_str(),
        });
        // The name of an environment has nothing in it that systemd would read as its own.
        let command = format!(
            "/usr/bin/env portcullis machine --environment {environment} --id {number} --credentials {file}"
        );
        let service = format!(
            "[Unit]\nDescription=Portcullis on machine {number} of {environment}\n\
             Wants=network-online.target\nAfter=network-online.target\n\n\
             [Service]\nExecStart={command}\n\
             Restart=always\nRestartSec=5\n\n[Install]\nWantedBy=multi-user.target\n"
        );
        let mut script = String::from("#!/bin/sh\nset -eu\numask 077\n");
        // Writing to a string cannot fail.
        let _ = writeln!(script, "mkdir -p {DIRECTORY}");
        put(&mut script, &file, &format!("{secret}\n"));
        script.push_str("umask 022\n");
        put(&mut script, SERVICE, &service);
        script.push_str("systemctl daemon-reload\nsystemctl enable --now portcullis-machine.service\n");
        UserData::new(script)
    }
}

/// A file, word for word: nothing in it means anything to the shell.
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
        let boot = Boot::new("prod".parse().unwrap(), store.parse().unwrap(), roles());
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
        let command = "ExecStart=/usr/bin/env portcullis machine --environment prod --id 7 \
                       --credentials /etc/portcullis/machine.json\n";
        assert!(after.contains(command), "{script}");
    }

    /// The script itself, by a real shell, with directories of our own and a `systemctl` that only notes.
    #[test]
    fn a_shell_leaves_what_was_meant() {
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
        assert!(unit.contains("ExecStart=/usr/bin/env portcullis machine "), "{unit}");
        let called = std::fs::read_to_string(home.path().join("called")).unwrap();
        assert_eq!(called, "daemon-reload\nenable --now portcullis-machine.service\n");
        assert!(!home.path().join("pwned").exists());
    }

    #[test]
    fn it_is_far_below_what_ec2_takes() {
        let hosts = vec!["zookeeper-with-a-long-name.example.com:2181"; 32].join(",");
        assert!(script(&hosts).len() < 8 * 1024);
    }
}
