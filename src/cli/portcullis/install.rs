//! `portcullis install`: writes one systemd unit file per role, and for a manager on the system bus
//! the D-Bus policy. The unit files start this program and set the directories of a service. Files
//! that another program wrote are not replaced.

mod fleet;
pub(super) mod proxy;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum;

use self::fleet::{Options, TlsFiles};
use crate::cli::args::hook_user;
use crate::cli::args::own_firewall::Kind;
use crate::cli::error::{Usage, parse_arg};
use crate::cli::file;
use crate::cli::output;
use crate::cli::portcullis::controller::Provider;
use crate::machine::systemd_unit::{SystemdUnit, units_dir, units_dir_of_up};
use crate::model::EnvironmentName;
use crate::runtime::trusted_file;

/// First line of every file that this command writes.
const MARK: &str = "# Written by `portcullis install`; a second run replaces it.\n";
const POLICY_MARK: &str = "<!-- Written by `portcullis install`; a second run replaces it. -->\n";
const POLICY_FILE: &str = "org.containers.hirte.conf";
const AGENT_POLICY_FILE: &str = "org.containers.hirte.Agent.conf";
const POLICY_HINT: &str = "systemctl reload dbus";
const MAX_BYTES: usize = 64 * 1024;
/// The directory for policies of the system bus.
const DBUS_POLICIES: &str = "/etc/dbus-1/system.d";

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
    /// Address of the store of `up`: see `portcullis up --help`
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Address of the heartbeat tracker of `up`: see `portcullis up --help`
    #[arg(long, value_name = "ADDR")]
    heartbeat: Option<SocketAddr>,
    /// Address of the manager of nodes of `up`: see `portcullis up --help`
    #[arg(long, value_name = "ADDR")]
    fleet: Option<SocketAddr>,
    /// Firewall of the machine of `up`: see `portcullis up --help`
    #[arg(long, value_enum, value_name = "HOW")]
    firewall: Option<Kind>,
    /// Provider of the controller
    #[arg(long, value_enum, value_name = "PROVIDER", default_value = "ec2")]
    provider: Provider,
    /// EC2 settings file of the controller: see `portcullis controller --help`
    #[arg(long, value_name = "FILE")]
    ec2_settings: Option<PathBuf>,
    /// Configuration file of a manager without an environment, or of an agent [default for an
    /// agent: /etc/portcullis/agent.conf, with --user $XDG_CONFIG_HOME/portcullis/agent.conf]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsFiles,
    /// Group whose members may control nodes through the system bus, besides root
    #[arg(long, value_name = "GROUP", conflicts_with = "user")]
    bus_group: Option<String>,
    /// Install a manager or an agent for the user's own systemd and bus
    #[arg(long)]
    user: bool,
    /// Directory for the unit files [default: /etc/systemd/system, or $XDG_CONFIG_HOME/systemd/user
    /// with --user]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Directory for the D-Bus policy of the manager
    #[arg(long, value_name = "DIR", default_value = DBUS_POLICIES)]
    dbus_directory: PathBuf,
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
    /// The manager of an environment's nodes, or with --config of others, with its D-Bus policy
    Manager,
    /// The agent of a node without an environment
    Agent,
}

impl Role {
    fn file(self) -> &'static str {
        match self {
            Self::Up => "portcullis.service",
            Self::Keeper => "portcullis-keeper.service",
            Self::Controller => "portcullis-controller.service",
            Self::Heartbeat => "portcullis-heartbeat.service",
            Self::Machine => "portcullis-machine@.service",
            Self::Manager => "portcullis-manager.service",
            Self::Agent => "portcullis-agent.service",
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
    for ToWrite { path, mark, text, hint } in prepare(args)? {
        let directory = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory)
            .and_then(|()| file::replace(&path, format!("{mark}{text}").as_bytes(), file::Privacy::Plain))
            .with_context(|| format!("cannot write {}", path.display()))?;
        output::message(&format!("{} written", path.display()));
        output::hint(&hint);
    }
    Ok(())
}

/// One file of this command.
struct ToWrite {
    path: PathBuf,
    mark: &'static str,
    text: String,
    /// The command to type next.
    hint: String,
}

/// Returns all files, before the first one is written.
fn prepare(args: &Args) -> anyhow::Result<Vec<ToWrite>> {
    let environment: EnvironmentName = parse_arg(&args.environment)?;
    check(args)?;
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    let directory = directory(args)?;
    let mut files = Vec::new();
    for &role in &args.roles {
        let text = unit_file(role, &program, &environment, args)?;
        let reload = if args.user { "systemctl --user" } else { "systemctl" };
        let hint = format!("{reload} daemon-reload && {reload} enable --now {}", role.instance());
        files.push(ToWrite { path: directory.join(role.file()), mark: MARK, text, hint });
        if role == Role::Manager && !args.user {
            let (path, text) = (args.dbus_directory.join(POLICY_FILE), policy(args.bus_group.as_deref())?);
            files.push(ToWrite { path, mark: POLICY_MARK, text, hint: POLICY_HINT.to_owned() });
        }
    }
    files.extend(proxy_files(args, &program, &directory)?);
    for file in &files {
        refuse_anothers(file)?;
    }
    Ok(files)
}

/// Returns the unit files of proxy services, and the D-Bus policy of an agent. Roles that have an
/// agent among other parts get them if the helper is installed.
fn proxy_files(args: &Args, program: &Path, directory: &Path) -> anyhow::Result<Vec<ToWrite>> {
    let has_agent = |role: &Role| matches!(role, Role::Agent | Role::Machine | Role::Up);
    if !args.roles.iter().any(has_agent) {
        return Ok(Vec::new());
    }
    let helper = match proxy::helper(program) {
        Ok(helper) => helper,
        Err(missing) if args.roles.contains(&Role::Agent) => return Err(missing),
        Err(_) => return Ok(Vec::new()),
    };
    let reload = if args.user { "systemctl --user daemon-reload" } else { "systemctl daemon-reload" };
    let units =
        [(proxy::PROXY_FILE, proxy::proxy_unit(&helper, args.user)?), (proxy::DEP_FILE, proxy::dep_unit())];
    let write =
        |(file, text)| ToWrite { path: directory.join(file), mark: MARK, text, hint: reload.to_owned() };
    let mut files: Vec<ToWrite> = units.into_iter().map(write).collect();
    if !args.user {
        let (path, text) = (args.dbus_directory.join(AGENT_POLICY_FILE), agent_policy()?);
        files.push(ToWrite { path, mark: POLICY_MARK, text, hint: POLICY_HINT.to_owned() });
    }
    Ok(files)
}

/// Writes the unit file of machines' agents, for `portcullis join`.
pub(super) fn machine_service(environment: &EnvironmentName, hook_user: &str) -> anyhow::Result<()> {
    run(&of_machine(environment, hook_user))
}

/// Refuses what [`machine_service`] would refuse, and writes nothing.
pub(super) fn check_machine_service(environment: &EnvironmentName, hook_user: &str) -> anyhow::Result<()> {
    prepare(&of_machine(environment, hook_user)).map(drop)
}

fn of_machine(environment: &EnvironmentName, hook_user: &str) -> Args {
    Args {
        roles: vec![Role::Machine],
        environment: environment.to_string(),
        hook_user: hook_user.to_owned(),
        listen: None,
        heartbeat: None,
        fleet: None,
        firewall: None,
        provider: Provider::Memory,
        ec2_settings: None,
        config: None,
        tls: TlsFiles::default(),
        bus_group: None,
        user: false,
        directory: None,
        dbus_directory: PathBuf::from(DBUS_POLICIES),
    }
}

/// Refuses options that do not fit the roles.
fn check(args: &Args) -> Result<(), Usage> {
    let of_nodes = |role: &&Role| matches!(role, Role::Manager | Role::Agent);
    if args.user && args.roles.iter().any(|role| !of_nodes(&role)) {
        return Err(Usage::new("--user is for the roles manager and agent"));
    }
    if args.config.is_some() && args.roles.iter().filter(of_nodes).count() != 1 {
        return Err(Usage::new("--config requires exactly one of the roles manager and agent"));
    }
    if args.tls.is_given() && args.roles.iter().filter(of_nodes).count() != 1 {
        return Err(Usage::new("--tls-cert requires exactly one of the roles manager and agent"));
    }
    if !options_of_up(args).is_empty() && !args.roles.contains(&Role::Up) {
        return Err(Usage::new("--listen, --heartbeat, --fleet and --firewall are for the role up"));
    }
    if args.bus_group.is_some() && !args.roles.contains(&Role::Manager) {
        return Err(Usage::new("--bus-group is for the role manager"));
    }
    args.bus_group.as_deref().map_or(Ok(()), |group| check_name("group", group))
}

/// Refuses names with characters that have a meaning in unit files or XML.
fn check_name(what: &str, name: &str) -> Result<(), Usage> {
    let odd = |c: char| !c.is_ascii_alphanumeric() && !"-_.:+".contains(c);
    if name.is_empty() || name.contains(odd) {
        return Err(Usage::new(format!("invalid {what} name '{}'", name.escape_debug())));
    }
    Ok(())
}

/// Returns the directory for the unit files.
fn directory(args: &Args) -> anyhow::Result<PathBuf> {
    match (&args.directory, args.user) {
        (Some(directory), _) => Ok(directory.clone()),
        (None, false) => Ok(PathBuf::from("/etc/systemd/system")),
        (None, true) => {
            let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let config = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")));
            let config = config.ok_or_else(|| Usage::new("neither XDG_CONFIG_HOME nor HOME is set"))?;
            Ok(config.join("systemd/user"))
        }
    }
}

#[cfg(feature = "fleet")]
fn policy(group: Option<&str>) -> anyhow::Result<String> {
    Ok(crate::fleet::policy::policy(group))
}

#[cfg(not(feature = "fleet"))]
fn policy(_: Option<&str>) -> anyhow::Result<String> {
    Err(crate::cli::error::Refusal::NoFleet.into())
}

#[cfg(feature = "fleet")]
fn agent_policy() -> anyhow::Result<String> {
    Ok(crate::fleet::policy::agent_policy())
}

#[cfg(not(feature = "fleet"))]
fn agent_policy() -> anyhow::Result<String> {
    Err(crate::cli::error::Refusal::NoFleet.into())
}

/// Refuses to replace a file that another program wrote, or the service of another environment.
fn refuse_anothers(file: &ToWrite) -> anyhow::Result<()> {
    let ToWrite { path, mark, text, .. } = file;
    let Some(found) = trusted_file::read_limited(path, MAX_BYTES)? else { return Ok(()) };
    if !found.starts_with(mark.as_bytes()) {
        bail!("{} was not written by this command and is not replaced", path.display());
    }
    let found = String::from_utf8_lossy(&found);
    match (environment_of(&found), environment_of(text)) {
        (Some(other), Some(environment)) if other != environment => bail!(
            "{} is the service of environment '{other}'; remove it first, or choose another --directory",
            path.display()
        ),
        _ => Ok(()),
    }
}

/// Returns the environment in the command of a unit file.
fn environment_of(unit: &str) -> Option<&str> {
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart="))?;
    command.split(' ').skip_while(|word| *word != "-e").nth(1)
}

fn unit_file(
    role: Role,
    program: &Path,
    environment: &EnvironmentName,
    args: &Args,
) -> anyhow::Result<String> {
    let hook_user = args.hook_user.as_str();
    check_name("user", hook_user)?;
    let hooks = |units_dir: String| format!("--hook-user {hook_user} --units-dir {units_dir}");
    let program = quoted(program)?;
    let (description, arguments) = match role {
        Role::Up => (
            format!("environment {environment}"),
            format!("up -e {environment}{} {}", options_of_up(args), hooks(units_dir_of_up(environment))),
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
        Role::Manager => ("manager of nodes".to_owned(), args.options_of_nodes().manager(environment)?),
        Role::Agent => ("agent of a node".to_owned(), args.options_of_nodes().agent()?),
    };
    let unit = SystemdUnit {
        description,
        command: format!("{program} --log-level info {arguments}"),
        // AWS credentials, where the machine has no role of its own.
        environment_file: (role == Role::Controller && args.provider != Provider::Memory)
            .then_some("/etc/portcullis/aws.env"),
        runs_hooks: matches!(role, Role::Up | Role::Machine),
    };
    Ok(if args.user { unit.render_for_user() } else { unit.render() })
}

/// Returns the options of `up` that were given, each with a blank before it.
fn options_of_up(args: &Args) -> String {
    let firewall = args.firewall.and_then(|kind| kind.to_possible_value());
    let options = [
        ("--listen", args.listen.map(|addr| addr.to_string())),
        ("--heartbeat", args.heartbeat.map(|addr| addr.to_string())),
        ("--fleet", args.fleet.map(|addr| addr.to_string())),
        ("--firewall", firewall.map(|value| value.get_name().to_owned())),
    ];
    options.into_iter().filter_map(|(name, value)| Some(format!(" {name} {}", value?))).collect()
}

impl Args {
    fn options_of_nodes(&self) -> Options<'_> {
        let Self { config, tls, user, bus_group, .. } = self;
        Options { config: config.as_ref(), tls, user: *user, bus_group: bus_group.as_deref() }
    }
}

/// A service starts in the root directory.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot make {} an absolute path", path.display()))
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
    Ok(format!("--provider {name} --ec2-settings {}", quoted(&absolute(path)?)?))
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
#[path = "install_tests.rs"]
mod tests;
