//! `portcullis install`: writes unit files for systemd, one per role. They start this very program, keep its files where a
//! daemon's files belong, and are replaced only if it was this command that wrote them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use super::controller::Provider;
use super::failure::{Usage, typed};
use super::file;
use super::hook_user;
use super::output;
use crate::model::EnvironmentName;

/// The first line of what is ours.
const MARK: &str = "# Written by `portcullis install`; a second run replaces it.\n";
const MAX_BYTES: usize = 64 * 1024;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// What this machine is to do
    #[arg(required = true, value_enum, value_name = "ROLE")]
    roles: Vec<Role>,
    /// Environment to work for
    #[arg(
        short,
        long,
        value_name = "ENV",
        env = "JUJU_ENV",
        default_value = "local",
        hide_env_values = true
    )]
    environment: String,
    /// Who runs the hooks of units: see `portcullis machine --help`
    #[arg(long, value_name = "USER", default_value = hook_user::USUAL)]
    hook_user: String,
    /// Where the controller makes the rules
    #[arg(long, value_enum, value_name = "PROVIDER", default_value = "ec2")]
    provider: Provider,
    /// The controller's settings for EC2: see `portcullis controller --help`
    #[arg(long, value_name = "FILE")]
    ec2_settings: Option<PathBuf>,
    /// Where the files go
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system")]
    directory: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Everything on this machine, in one process
    Up,
    /// The store alone
    Keeper,
    /// The firewalls of an environment
    Controller,
    /// Heartbeats of an environment
    Heartbeat,
    /// One machine, its firewall and its units: portcullis-machine@N
    Machine,
}

impl Role {
    fn file(self) -> &'static str {
        match self {
            Self::Up => "portcullis.service",
            Self::Keeper => "portcullis-keeper.service",
            Self::Controller => "portcullis-controller.service",
            Self::Heartbeat => "portcullis-heartbeat.service",
            Self::Machine => "portcullis-machine@.service",
        }
    }

    /// What is enabled then.
    fn instance(self) -> &'static str {
        match self {
            Self::Machine => "portcullis-machine@N.service, N being the machine's number",
            other => other.file(),
        }
    }
}

pub(super) fn run(args: &Typed) -> anyhow::Result<()> {
    let environment: EnvironmentName = typed(&args.environment)?;
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    for &role in &args.roles {
        let path = args.directory.join(role.file());
        let text = unit_file(role, &program, &environment, args)?;
        refuse_anothers(&path)?;
        fs::create_dir_all(&args.directory)
            .and_then(|()| file::replace(&path, text.as_bytes(), file::Privacy::Plain))
            .with_context(|| format!("cannot write {}", path.display()))?;
        output::message(&format!("{} written", path.display()));
        output::hint(&format!("systemctl daemon-reload && systemctl enable --now {}", role.instance()));
    }
    Ok(())
}

fn refuse_anothers(path: &Path) -> anyhow::Result<()> {
    match file::read_limited(path, MAX_BYTES)? {
        Some(found) if !found.starts_with(MARK.as_bytes()) => {
            bail!("{} was not written by this command, and is left alone", path.display())
        }
        _ => Ok(()),
    }
}

fn unit_file(
    role: Role,
    program: &Path,
    environment: &EnvironmentName,
    args: &Typed,
) -> anyhow::Result<String> {
    let hook_user = args.hook_user.as_str();
    let odd = |c: char| !c.is_ascii_alphanumeric() && !"-_.:+".contains(c);
    if hook_user.is_empty() || hook_user.contains(odd) {
        return Err(Usage::new(format!("no user is called '{}'", hook_user.escape_debug())).into());
    }
    // Not below the service's own data, which is nobody else's to enter.
    let hooks =
        |units: &str| format!("--hook-user {hook_user} --units-dir /var/lib/portcullis-units/{units}");
    let program = quoted(program)?;
    let (what, command) = match role {
        Role::Up => (
            format!("environment {environment}"),
            format!("up -e {environment} {}", hooks(environment.as_str())),
        ),
        Role::Keeper => (
            "store".to_owned(),
            format!("keeper --data-dir /var/lib/portcullis/{environment} --listen 127.0.0.1:2181"),
        ),
        Role::Controller => (
            format!("controller of {environment}"),
            format!("controller -e {environment} {}", provider(args.provider, args.ec2_settings.as_deref())?),
        ),
        Role::Heartbeat => (format!("heartbeats of {environment}"), format!("heartbeat -e {environment}")),
        Role::Machine => (
            format!("machine %i of {environment}"),
            format!(
                "machine -e {environment} --id %i --firewall nftables {}",
                hooks(&format!("{environment}-%i"))
            ),
        ),
    };
    // Processes that hooks started survive a restart of the agent. They are in control groups
    // beside the subgroup in which systemd 254 and later starts the agent, so that the parent group
    // can limit them.
    let hooks = match role {
        Role::Up | Role::Machine => {
            "KillMode=process\nDelegate=yes\nDelegateSubgroup=portcullis-agent\n\
             StateDirectory=portcullis-units\nStateDirectoryMode=0711\n"
        }
        Role::Keeper | Role::Controller | Role::Heartbeat => "",
    };
    // What every AWS program looks for in its environment, where the machine itself does not say it.
    let aws = match role {
        Role::Controller if args.provider != Provider::Memory => "EnvironmentFile=-/etc/portcullis/aws.env\n",
        _ => "",
    };
    Ok(format!(
        "{MARK}[Unit]\n\
         Description=Portcullis: {what}\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         \n\
         [Service]\n\
         ExecStart={program} --log-level info {command}\n\
         Environment=XDG_CONFIG_HOME=/etc XDG_DATA_HOME=/var/lib\n\
         {aws}\
         Restart=always\n\
         RestartSec=1\n\
         {hooks}\
         UMask=0077\n\
         \n\
         [Install]\n\
         WantedBy=multi-user.target\n"
    ))
}

fn provider(provider: Provider, settings: Option<&Path>) -> anyhow::Result<String> {
    #[cfg(not(feature = "ec2"))]
    if provider != Provider::Memory {
        return Err(super::failure::Refusal::NoEc2.into());
    }
    let name = provider.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let Some(path) = settings else { return Ok(format!("--provider {name}")) };
    if provider == Provider::Memory {
        return Err(Usage::new("--ec2-settings is for the providers that go to EC2").into());
    }
    // A service starts in the root directory.
    let path =
        std::path::absolute(path).with_context(|| format!("cannot tell where {} is", path.display()))?;
    Ok(format!("--provider {name} --ec2-settings {}", quoted(&path)?))
}

fn quoted(path: &Path) -> anyhow::Result<String> {
    match path.to_str().filter(|path| !path.contains(['"', '\\', '%', '$', '\n'])) {
        Some(path) => Ok(format!("\"{path}\"")),
        None => bail!("{} is no path for a unit file", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(hook_user: &str) -> Typed {
        Typed {
            roles: vec![Role::Up],
            environment: "local".to_owned(),
            hook_user: hook_user.to_owned(),
            provider: Provider::Ec2,
            ec2_settings: None,
            directory: PathBuf::new(),
        }
    }

    #[test]
    fn a_controller_has_the_provider_that_was_asked_for() {
        let local: EnvironmentName = "prod".parse().unwrap();
        let text = |provider, settings: Option<&str>| {
            let args = Typed { provider, ec2_settings: settings.map(PathBuf::from), ..asked("web") };
            unit_file(Role::Controller, Path::new("/portcullis"), &local, &args).map_err(|e| e.to_string())
        };
        let memory = text(Provider::Memory, None).unwrap();
        assert!(memory.contains(" controller -e prod --provider memory\n") && !memory.contains("aws.env"));
        assert!(text(Provider::Memory, Some("/a")).unwrap_err().contains("go to EC2"));
        let real = text(Provider::Ec2, Some("/etc/a b.yaml"));
        if cfg!(feature = "ec2") {
            let real = real.unwrap();
            let command = " controller -e prod --provider ec2 --ec2-settings \"/etc/a b.yaml\"\n";
            assert!(
                real.contains(command) && real.contains("\nEnvironmentFile=-/etc/portcullis/aws.env\n"),
                "{real}"
            );
            assert!(text(Provider::DryRun, Some("/a%b")).unwrap_err().contains("is no path for a unit file"));
        } else {
            assert_eq!(real.unwrap_err(), "this build has no EC2");
        }
    }

    #[test]
    fn what_hooks_started_outlives_the_agent() {
        let local: EnvironmentName = "prod".parse().unwrap();
        let text =
            |role| unit_file(role, Path::new("/usr/bin/portcullis"), &local, &asked("200000+")).unwrap();
        let machine = text(Role::Machine);
        let start = "ExecStart=\"/usr/bin/portcullis\" --log-level info machine -e prod --id %i --firewall nftables \
                     --hook-user 200000+ --units-dir /var/lib/portcullis-units/prod-%i\n";
        assert!(machine.contains(start) && machine.contains("\nKillMode=process\n"), "{machine}");
        assert!(text(Role::Up).contains("KillMode=process") && !text(Role::Keeper).contains("KillMode"));
        assert!(unit_file(Role::Up, Path::new("/a\"b"), &local, &asked("web")).is_err());
        for user in ["", "a b", "%i", "a\nExecStart=/bin/sh"] {
            assert!(unit_file(Role::Up, Path::new("/a"), &local, &asked(user)).is_err(), "{user}");
        }
    }

    #[test]
    fn files_of_others_are_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("system");
        let typed = Typed { directory: directory.clone(), ..asked("web") };
        for _ in 0..2 {
            run(&typed).unwrap();
        }
        let path = directory.join("portcullis.service");
        assert!(fs::read_to_string(&path).unwrap().starts_with(MARK));
        fs::write(&path, "[Unit]\n").unwrap();
        let refused = run(&typed).unwrap_err().to_string();
        assert!(refused.ends_with("was not written by this command, and is left alone"), "{refused}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "[Unit]\n");
    }
}
