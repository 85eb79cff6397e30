//! `portcullis install`: writes one systemd unit file per role. The files start this program and
//! set the directories of a system service. Files that another program wrote are not replaced.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum;

use crate::cli::args::hook_user;
use crate::cli::error::{Usage, parse_arg};
use crate::cli::file;
use crate::cli::output;
use crate::cli::portcullis::controller::Provider;
use crate::machine::systemd_unit::{SystemdUnit, units_dir, units_dir_of_up};
use crate::model::EnvironmentName;
use crate::runtime::trusted_file;

/// First line of every file that this command writes.
const MARK: &str = "# Written by `portcullis install`; a second run replaces it.\n";
const MAX_BYTES: usize = 64 * 1024;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Roles to install
    #[arg(required = true, value_enum, value_name = "ROLE")]
    roles: Vec<Role>,
    /// Environment of the services
    #[arg(
        short,
        long,
        value_name = "ENV",
        env = "JUJU_ENV",
        default_value = "local",
        hide_env_values = true
    )]
    environment: String,
    /// User that runs the hooks of units: see `portcullis machine --help`
    #[arg(long, value_name = "USER", default_value = hook_user::USUAL)]
    hook_user: String,
    /// Provider of the controller
    #[arg(long, value_enum, value_name = "PROVIDER", default_value = "ec2")]
    provider: Provider,
    /// EC2 settings file of the controller: see `portcullis controller --help`
    #[arg(long, value_name = "FILE")]
    ec2_settings: Option<PathBuf>,
    /// Directory for the unit files
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system")]
    directory: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// A whole environment in one process
    Up,
    /// Only the store
    Keeper,
    /// The firewall controller of an environment
    Controller,
    /// The heartbeat tracker of an environment
    Heartbeat,
    /// The agent of machine N: portcullis-machine@N
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

    /// Name for `systemctl enable`.
    fn instance(self) -> &'static str {
        match self {
            Self::Machine => "portcullis-machine@N.service, N being the machine's number",
            other => other.file(),
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let environment: EnvironmentName = parse_arg(&args.environment)?;
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
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
    match trusted_file::read_limited(path, MAX_BYTES)? {
        Some(found) if !found.starts_with(MARK.as_bytes()) => {
            bail!("{} was not written by this command and is not replaced", path.display())
        }
        _ => Ok(()),
    }
}

fn unit_file(
    role: Role,
    program: &Path,
    environment: &EnvironmentName,
    args: &Args,
) -> anyhow::Result<String> {
    let hook_user = args.hook_user.as_str();
    let odd = |c: char| !c.is_ascii_alphanumeric() && !"-_.:+".contains(c);
    if hook_user.is_empty() || hook_user.contains(odd) {
        return Err(Usage::new(format!("invalid user name '{}'", hook_user.escape_debug())).into());
    }
    let hooks = |units_dir: String| format!("--hook-user {hook_user} --units-dir {units_dir}");
    let program = quoted(program)?;
    let (description, arguments) = match role {
        Role::Up => (
            format!("environment {environment}"),
            format!("up -e {environment} {}", hooks(units_dir_of_up(environment))),
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
                hooks(units_dir(environment, "%i"))
            ),
        ),
    };
    let unit = SystemdUnit {
        description,
        command: format!("{program} --log-level info {arguments}"),
        // AWS credentials, where the machine has no role of its own.
        environment_file: (role == Role::Controller && args.provider != Provider::Memory)
            .then_some("/etc/portcullis/aws.env"),
        runs_hooks: matches!(role, Role::Up | Role::Machine),
    };
    Ok(format!("{MARK}{}", unit.render()))
}

fn provider(provider: Provider, settings: Option<&Path>) -> anyhow::Result<String> {
    #[cfg(not(feature = "ec2"))]
    if provider != Provider::Memory {
        return Err(crate::cli::error::Refusal::NoEc2.into());
    }
    let name = provider.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let Some(path) = settings else { return Ok(format!("--provider {name}")) };
    if provider == Provider::Memory {
        return Err(Usage::new("--ec2-settings requires an EC2 provider").into());
    }
    // A service starts in the root directory.
    let path = std::path::absolute(path)
        .with_context(|| format!("cannot make {} an absolute path", path.display()))?;
    Ok(format!("--provider {name} --ec2-settings {}", quoted(&path)?))
}

fn quoted(path: &Path) -> anyhow::Result<String> {
    match path.to_str().filter(|path| !path.contains(['"', '\\', '%', '$', '\n'])) {
        Some(path) => Ok(format!("\"{path}\"")),
        None => bail!(
            "{} cannot be written in a unit file: it contains a quote, backslash, %, $ or line break",
            path.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(hook_user: &str) -> Args {
        Args {
            roles: vec![Role::Up],
            environment: "local".to_owned(),
            hook_user: hook_user.to_owned(),
            provider: Provider::Ec2,
            ec2_settings: None,
            directory: PathBuf::new(),
        }
    }

    #[test]
    fn the_unit_file_of_a_controller_names_its_provider() {
        let local: EnvironmentName = "prod".parse().unwrap();
        let text = |provider, settings: Option<&str>| {
            let args = Args { provider, ec2_settings: settings.map(PathBuf::from), ..asked("web") };
            unit_file(Role::Controller, Path::new("/portcullis"), &local, &args).map_err(|e| e.to_string())
        };
        let memory = text(Provider::Memory, None).unwrap();
        assert!(memory.contains(" controller -e prod --provider memory\n") && !memory.contains("aws.env"));
        assert!(text(Provider::Memory, Some("/a")).unwrap_err().contains("requires an EC2 provider"));
        let real = text(Provider::Ec2, Some("/etc/a b.yaml"));
        if cfg!(feature = "ec2") {
            let real = real.unwrap();
            let command = " controller -e prod --provider ec2 --ec2-settings \"/etc/a b.yaml\"\n";
            assert!(
                real.contains(command) && real.contains("\nEnvironmentFile=-/etc/portcullis/aws.env\n"),
                "{real}"
            );
            assert!(
                text(Provider::DryRun, Some("/a%b"))
                    .unwrap_err()
                    .contains("cannot be written in a unit file")
            );
        } else {
            assert_eq!(real.unwrap_err(), "this build does not support EC2");
        }
    }

    #[test]
    fn unit_files_keep_processes_of_hooks_running() {
        let local: EnvironmentName = "prod".parse().unwrap();
        let text =
            |role| unit_file(role, Path::new("/usr/bin/portcullis"), &local, &asked("200000+")).unwrap();
        let machine = text(Role::Machine);
        let start = "ExecStart=\"/usr/bin/portcullis\" --log-level info machine -e prod --id %i \
                     --firewall nftables \
                     --hook-user 200000+ --units-dir /var/lib/portcullis-units/prod-%i\n";
        assert!(machine.contains(start) && machine.contains("\nKillMode=process\n"), "{machine}");
        assert!(text(Role::Up).contains("KillMode=process") && !text(Role::Keeper).contains("KillMode"));
        assert!(unit_file(Role::Up, Path::new("/a\"b"), &local, &asked("web")).is_err());
        for user in ["", "a b", "%i", "a\nExecStart=/bin/sh"] {
            assert!(unit_file(Role::Up, Path::new("/a"), &local, &asked(user)).is_err(), "{user}");
        }
    }

    #[test]
    fn unit_files_of_other_programs_are_not_replaced() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("system");
        let typed = Args { directory: directory.clone(), ..asked("web") };
        for _ in 0..2 {
            run(&typed).unwrap();
        }
        let path = directory.join("portcullis.service");
        assert!(fs::read_to_string(&path).unwrap().starts_with(MARK));
        fs::write(&path, "[Unit]\n").unwrap();
        let refused = run(&typed).unwrap_err().to_string();
        assert!(refused.ends_with("was not written by this command and is not replaced"), "{refused}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "[Unit]\n");
    }
}
