//! The user data of a launched instance: a script for cloud-init that joins the environment with a
//! token and starts `portcullis machine` now and at every boot. Pure.
//!
//! Every process on the instance that can reach the metadata service can read the user data. The
//! token is void once the instance has joined, which is before the first hook runs, so the user
//! data holds no secret then. The program itself must be part of the image.

use std::fmt::Write as _;

use portcullis_provider::provider::UserData;

use crate::machine::join_token::JoinToken;
use crate::machine::systemd_unit::{SystemdUnit, units_dir};
use crate::model::EnvironmentName;
use crate::store::Address;
use crate::store::acl::Roles;
use crate::store::joining::{LaunchOffer, OfferKind};

/// The directory of the machine's files on an instance.
const DIRECTORY: &str = "/etc/portcullis";
const TOKEN: &str = "/etc/portcullis/join-token";
const SERVICE: &str = "/etc/systemd/system/portcullis-machine.service";

/// Attempts to join, ten seconds apart: as long as the token is valid.
const ATTEMPTS: u32 = 360;

/// The settings that all machines of an environment share.
#[derive(Debug, Clone)]
pub struct BootConfig {
    environment: EnvironmentName,
    /// The address of the store for machines.
    store: Address,
    /// The fingerprint of the store's CA certificate; `None` without TLS.
    fingerprint: Option<String>,
    /// The identities that may read a machine's nodes. Hashes, not secrets.
    roles: Roles,
}

impl BootConfig {
    pub fn new(
        environment: EnvironmentName,
        store: Address,
        fingerprint: Option<String>,
        roles: Roles,
    ) -> Self {
        Self { environment, store: store.with_ca(None), fingerprint, roles }
    }

    pub fn roles(&self) -> &Roles {
        &self.roles
    }

    pub fn user_data(&self, offer: &LaunchOffer) -> UserData {
        let (environment, machine, number) = (&self.environment, offer.machine, offer.machine.number());
        let token = JoinToken {
            environment: environment.clone(),
            machine,
            store: self.store.clone(),
            fingerprint: self.fingerprint.clone(),
            credential: offer.once.clone(),
            expires_ms: offer.expires_ms,
            offer: OfferKind::Launch,
        };
        // The name of an environment contains no character that is special to systemd or a shell.
        let service = SystemdUnit {
            description: format!("machine {number} of {environment}"),
            command: format!(
                "/usr/bin/env portcullis --log-level info machine --environment {environment} --id {number} \
                 --units-dir {}",
                units_dir(environment, number)
            ),
            environment_file: None,
            runs_hooks: true,
        };
        let machine_file = format!("{DIRECTORY}/{environment}-machines/{}.json", machine.key());
        let mut script = String::from("#!/bin/sh\nset -eu\numask 077\n");
        // Writing to a string cannot fail.
        let _ = writeln!(script, "mkdir -p {DIRECTORY}");
        put(&mut script, TOKEN, &format!("{}\n", token.expose()));
        script.push_str("umask 022\n");
        put(&mut script, SERVICE, &service.render());
        // The same directories as in the service.
        let _ = write!(
            script,
            "export XDG_CONFIG_HOME=/etc XDG_DATA_HOME=/var/lib\n\
             attempts=1\n\
             until [ -e {machine_file} ] || portcullis join - < {TOKEN}; do\n\
             \x20   [ $attempts -lt {ATTEMPTS} ] || exit 1\n\
             \x20   attempts=$((attempts + 1))\n\
             \x20   sleep 10\n\
             done\n\
             rm -f {TOKEN}\n"
        );
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
    use crate::model::MachineId;
    use crate::store::Credential;

    fn boot(store: &str) -> BootConfig {
        let identity = |user: &str| Credential::parse(&format!("{user}:secret")).unwrap().identity();
        let roles = Roles { operator: identity("operator"), controller: identity("controller") };
        BootConfig::new("prod".parse().unwrap(), store.parse().unwrap(), None, roles)
    }

    fn script(store: &str) -> String {
        let once = Credential::parse("join-machine-0000000007:hunter2").unwrap();
        let offer = LaunchOffer { machine: MachineId::new(7), once, expires_ms: 1_800_000_000_000 };
        boot(store).user_data(&offer).reveal().to_owned()
    }

    /// The token in the script.
    fn token(script: &str) -> JoinToken {
        let line = script.lines().find(|line| line.starts_with("pj")).expect("a token");
        line.parse().expect("a valid token")
    }

    #[test]
    fn the_token_is_in_a_private_file_and_nowhere_else() {
        let script = script("zk1:2181,zk2:2181/prod");
        let token = token(&script);
        assert_eq!((token.machine, token.offer), (MachineId::new(7), OfferKind::Launch));
        assert_eq!(token.store.to_string(), "zk1:2181,zk2:2181/prod");
        assert_eq!(token.credential.expose(), "join-machine-0000000007:hunter2");
        let (before, after) = script.split_once(&token.expose()).unwrap();
        assert!(before.contains("umask 077") && !before.contains("umask 022") && after.contains("umask 022"));
        assert!(!after.contains("pj1."), "{script}");
        let command = "ExecStart=/usr/bin/env portcullis --log-level info machine --environment prod --id 7 \
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

    /// Runs the script in a real shell, with temporary directories and stubs of `systemctl`,
    /// `sleep` and `portcullis`, whose first attempt to join fails.
    #[test]
    fn the_script_joins_once_and_starts_the_service() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().to_str().unwrap();
        let nasty = "zk:1/$(touch pwned)`id`'\"\\%n".replace(' ', "");
        let text = script(&nasty)
            .replace("/etc/systemd/system", &format!("{root}/units"))
            .replace("/etc/portcullis", &format!("{root}/portcullis"));
        std::fs::create_dir(home.path().join("units")).unwrap();
        let stubs = format!(
            "cd {root}\n\
             systemctl() {{ echo systemctl \"$@\" >> called; }}\n\
             sleep() {{ echo sleep >> called; }}\n\
             portcullis() {{\n\
             \x20   echo portcullis \"$@\" $XDG_CONFIG_HOME $XDG_DATA_HOME >> called\n\
             \x20   [ -e failed ] || {{ touch failed; return 1; }}\n\
             \x20   stat -c %a portcullis/join-token > mode\n\
             \x20   cat > given\n\
             \x20   mkdir -p portcullis/prod-machines\n\
             \x20   touch portcullis/prod-machines/machine-0000000007.json\n\
             }}\n"
        );
        // The second run is a script that was interrupted at the end.
        for _ in 0..2 {
            let run = std::process::Command::new("sh").args(["-c", &format!("{stubs}{text}")]).output();
            let run = run.unwrap();
            assert!(run.status.success(), "{run:?}");
        }
        let read = |name: &str| std::fs::read_to_string(home.path().join(name)).unwrap();
        assert_eq!(read("given").trim().parse::<JoinToken>().unwrap().store.to_string(), nasty);
        assert_eq!(read("mode"), "600\n");
        assert!(!home.path().join("portcullis/join-token").exists());
        let start = "systemctl daemon-reload\nsystemctl enable --now portcullis-machine.service\n";
        let join = "portcullis join - /etc /var/lib\n";
        assert_eq!(read("called"), format!("{join}sleep\n{join}{start}{start}"));
        let unit = read("units/portcullis-machine.service");
        assert!(unit.contains("ExecStart=/usr/bin/env portcullis --log-level info machine "), "{unit}");
        assert!(!home.path().join("pwned").exists());
    }

    #[test]
    fn user_data_is_far_below_the_limit_of_ec2() {
        let hosts = vec!["zookeeper-with-a-long-name.example.com:2181"; 32].join(",");
        assert!(script(&hosts).len() < 8 * 1024);
    }
}
