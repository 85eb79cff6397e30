//! The operator's client `juju`: its command line, and which file runs each command.

mod accept_store;
mod add_machine;
mod add_unit;
mod adopt_groups;
pub(super) mod bootstrap;
mod deploy;
mod destroy_environment;
mod destroy_service;
mod expose;
mod firewall;
mod firewall_log;
mod heartbeat;
pub(super) mod hook_env;
mod idempotency_notes;
mod machine;
mod node;
mod operator;
mod remove_unit;
mod resolved;
pub(super) mod status;
mod terminate_machine;
mod unexpose;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};

use self::idempotency_notes::IdempotencyNote;
use crate::cli::args::environment::Globals;
use crate::cli::completions;
use crate::cli::config::ConfigDir;
use crate::cli::error::{self, Refusal};
use crate::cli::man;
use crate::cli::output;
use crate::cli::start;

/// Time limit of a command. Each request to the store has a shorter limit of its own.
const DEADLINE: Duration = Duration::from_secs(9);

#[derive(Debug, Parser)]
#[command(
    name = "juju",
    version,
    about = "Deploy services and open exactly the ports that they request",
    after_help = "\
Examples:
  juju deploy ./charms/wordpress -n 2     deploy a service with two units
  juju expose wordpress                   open the ports that its units request
  juju status wordpress                   show its state
  juju -e prod --zookeeper zk1,zk2/prod bootstrap
  eval \"$(juju hook-env wordpress/0)\"     run a hook by hand

Messages go to stderr and data to stdout. Exit code 0: done, 1: failed, 2: wrong usage."
)]
struct Juju {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create an environment in a store, with its credentials
    #[command(after_help = "\
Credentials are saved in $XDG_CONFIG_HOME/portcullis/ENV.json (default: ~/.config/portcullis/ENV.json) \
with mode 0600. Running the command again after a failure completes it.

Examples:
  juju bootstrap
  juju -e prod --zookeeper zk1:2181,zk2:2181/prod bootstrap")]
    Bootstrap(bootstrap::Args),
    /// Deploy a charm as a service, with units and machines for them
    #[command(after_help = "\
A charm may have at most 1000 files and 16 MiB. Its symbolic links must stay within the charm.

Examples:
  juju deploy ./charms/wordpress
  juju deploy ./charms/wordpress blog -n 3
  juju deploy ./charms/mysql --to 0")]
    Deploy(deploy::Args),
    /// Add units to a service
    #[command(after_help = "Examples:\n  juju add-unit wordpress\n  juju add-unit wordpress -n 2 --to 0")]
    AddUnit(add_unit::Args),
    /// Resolve a failed hook: run it again or skip it
    #[command(after_help = "\
Without --retry the unit continues as if the hook had succeeded.

Examples:
  juju resolved --retry wordpress/0
  juju resolved wordpress/0")]
    Resolved(resolved::Args),
    /// Remove units from their services
    #[command(after_help = "Examples:\n  juju remove-unit wordpress/0 wordpress/1")]
    RemoveUnit(remove_unit::Args),
    /// Remove a service and all its units
    #[command(after_help = "Machines are not removed.\n\nExamples:\n  juju destroy-service wordpress")]
    DestroyService(destroy_service::Args),
    /// Remove an environment and everything in it
    #[command(after_help = "\
Refuses while the environment has services or machines, unless --force destroys and terminates them first. \
The controller removes instances and security groups, so a controller must be running; then the tree is \
removed. The credential files stay, and `juju bootstrap` uses them for the next environment of that name.

Examples:
  juju -e prod destroy-environment --yes
  juju -e prod destroy-environment --yes --force")]
    DestroyEnvironment(destroy_environment::Args),
    /// Take over security groups after the store was lost
    #[command(after_help = "\
Security groups are tagged with the id of the store that created them, and a controller does not change \
groups of another store. If that store is lost and a new store has the same environment name, this command \
makes the running controller tag the groups juju-ENV and juju-ENV-N with the new id. A machine's group \
that an instance uses is not changed; the command lists it.

Examples:
  juju -e prod adopt-groups")]
    AdoptGroups(adopt_groups::Args),
    /// Add a machine
    #[command(after_help = "\
Examples:
  juju add-machine
  juju add-machine --name web1 --address 192.0.2.7
  juju add-machine --instance-id i-0abc")]
    AddMachine(add_machine::Args),
    /// Terminate machines that have no units
    #[command(after_help = "\
The agent of a terminated machine removes what is left of its units and its firewall table, and ends. A \
machine whose agent is down is refused without --force: its agent can do that only when it returns.

Examples:
  juju terminate-machine 1 2
  juju terminate-machine --force 3")]
    TerminateMachine(terminate_machine::Args),
    /// Let agents continue with a store that was restored from a backup
    #[command(after_help = "\
An agent that has acted on changes which the store no longer contains removes nothing: no unit, port or \
instance. `juju status` shows such agents. This command accepts the store as it is; the agents then remove \
everything that is not in it.

Examples:
  juju accept-store")]
    AcceptStore,
    /// Open the ports of a service to everyone, or to given sources
    #[command(after_help = "\
Opens the ports that the service's units request with open-port, now and later, on the machines that they \
run on. Running it again replaces the list of allowed sources.

Examples:
  juju expose wordpress
  juju expose wordpress --to 192.0.2.0/24 2001:db8::/32")]
    Expose(expose::Args),
    /// Close the ports of a service
    #[command(after_help = "Examples:\n  juju unexpose wordpress")]
    Unexpose(unexpose::Args),
    /// Show pending firewall changes, reasons for the state of ports, and past changes
    #[command(after_help = "\
Examples:
  juju firewall plan                show pending changes; exit code 2 if there are any
  juju firewall explain 0           show the state of each port of machine 0, with the reason
  juju firewall explain 0 53/udp    the same for one port
  juju firewall log --unit web/0    show past changes for one unit")]
    Firewall(firewall::Args),
    /// Show and manage heartbeats of machines and other components
    #[command(after_help = "\
Examples:
  juju heartbeat list --unwell
  juju heartbeat show 3
  juju heartbeat watch
  juju heartbeat params Sm_url=http://sm:27779/hsm/v2
  juju heartbeat release             confirm a mass outage")]
    Heartbeat(heartbeat::Args),
    /// Manage machines
    #[command(after_help = "\
Examples:
  juju machine maintenance 3 --for 2h
  juju machine renew 3")]
    Machine(machine::Args),
    /// Control systemd on the machines
    #[command(after_help = "\
Examples:
  juju node list
  juju node units web1 --filter 'nginx*'
  juju node restart web1 nginx.service
  juju node monitor '*' nginx.service")]
    Node(node::Args),
    /// Manage the operators of the environment
    #[command(after_help = "\
Every operator has credentials of its own, and `juju firewall log` shows which operator exposed or unexposed \
a service.

Examples:
  juju operator add alice
  juju operator list
  juju operator remove alice")]
    Operator(operator::Args),
    /// Print the environment variables of a unit's hooks
    #[command(after_help = "\
Examples:
  eval \"$(juju hook-env wordpress/0)\"; open-port 80")]
    HookEnv(hook_env::Args),
    /// Show machines, services and units
    #[command(after_help = "\
A scope with a slash selects units, any other scope selects services. Machines are shown if selected units \
run on them.

Examples:
  juju status
  juju status 'word*' mysql/0 --format tabular
  juju status --format json --output status.json")]
    Status(status::Args),
    /// Print a completion script for a shell
    #[command(
        after_help = "Examples:\n  juju completions bash > ~/.local/share/bash-completion/completions/juju"
    )]
    Completions(completions::Args),
    /// Print or write the manual pages
    #[command(after_help = "Examples:\n  juju man | man -l -\n  juju man --output ~/.local/share/man/man1")]
    Man(man::Args),
}

/// Runs the command of the process's arguments.
pub fn main() -> ExitCode {
    let juju = match start::parse::<Juju>() {
        Ok(juju) => juju,
        Err(code) => return code,
    };
    // Only on request, since the setup takes as long as the rest of the start.
    if std::env::var_os("RUST_LOG").is_some() {
        crate::runtime::logging::init("warn");
    }
    match start::block_on(run(&juju)) {
        Ok(code) => code,
        Err(error) => error::report(&error),
    }
}

async fn run(juju: &Juju) -> anyhow::Result<ExitCode> {
    match &juju.command {
        Command::Completions(args) => {
            return completions::run(Juju::command(), args).map(|()| ExitCode::SUCCESS);
        }
        Command::Man(args) => return man::run(Juju::command(), args).map(|()| ExitCode::SUCCESS),
        Command::Heartbeat(args) if args.is_endless() => {
            return heartbeat::run(&juju.globals, args).await.map(|()| ExitCode::SUCCESS);
        }
        _ => {}
    }
    if !juju.command.is_done_once() {
        return in_time(&juju.globals, &juju.command).await;
    }
    let notes = juju.globals.config()?.idempotency_notes(&juju.globals.environment()?);
    // Arguments that are not UTF-8 are escaped, so that they stay distinct.
    let words =
        std::env::args_os().skip(1).map(|word| word.into_string().unwrap_or_else(|raw| format!("{raw:?}")));
    let run = IdempotencyNote::look(notes, words.collect())?;
    let done = in_time(&juju.globals.marked(run.operation()), &juju.command).await;
    match &done {
        Ok(_) => run
            .forget()
            .context("the command succeeded, but the note of its previous run cannot be removed")?,
        Err(error) if error::leaves_doubt(error) => {
            if let Err(cause) = run.remember() {
                let cause = anyhow::Error::new(cause)
                    .context("cannot save a note that the outcome of this command is unknown");
                output::error(&cause);
                output::hint("check `juju status` before running it again");
            }
        }
        Err(_) => {}
    }
    done
}

async fn in_time(globals: &Globals, command: &Command) -> anyhow::Result<ExitCode> {
    // These commands wait for a controller or a manager and have limits of their own.
    let waits =
        matches!(command, Command::DestroyEnvironment(_) | Command::AdoptGroups(_) | Command::Node(_));
    if waits || matches!(command, Command::Status(args) if args.is_endless()) {
        return talk(globals, command).await;
    }
    match tokio::time::timeout(DEADLINE, talk(globals, command)).await {
        Ok(done) => done,
        Err(_) => {
            let address = globals.target()?.address.to_string();
            Err(Refusal::TooSlow { address, seconds: DEADLINE.as_secs() }.into())
        }
    }
}

impl Command {
    /// Whether repeating the command would change more, or fail.
    fn is_done_once(&self) -> bool {
        use Command::{AddMachine, AddUnit, Deploy, DestroyService, RemoveUnit, TerminateMachine};
        matches!(
            self,
            Deploy(_) | AddUnit(_) | RemoveUnit(_) | DestroyService(_) | AddMachine(_) | TerminateMachine(_)
        )
    }
}

/// Runs a command that needs a store.
async fn talk(globals: &Globals, command: &Command) -> anyhow::Result<ExitCode> {
    if let Command::Firewall(args) = command {
        return firewall::run(globals, args).await;
    }
    if let Command::Node(args) = command {
        return node::run(globals, args).await;
    }
    let done = match command {
        Command::Bootstrap(args) => bootstrap::run(globals, args).await,
        Command::Deploy(args) => deploy::run(globals, args).await,
        Command::AddUnit(args) => add_unit::run(globals, args).await,
        Command::RemoveUnit(args) => remove_unit::run(globals, args).await,
        Command::DestroyService(args) => destroy_service::run(globals, args).await,
        Command::DestroyEnvironment(args) => destroy_environment::run(globals, args).await,
        Command::AdoptGroups(args) => adopt_groups::run(globals, args).await,
        Command::AddMachine(args) => add_machine::run(globals, args).await,
        Command::TerminateMachine(args) => terminate_machine::run(globals, args).await,
        Command::AcceptStore => accept_store::run(globals).await,
        Command::Expose(args) => expose::run(globals, args).await,
        Command::Unexpose(args) => unexpose::run(globals, args).await,
        Command::Heartbeat(args) => heartbeat::run(globals, args).await,
        Command::Machine(args) => machine::run(globals, args).await,
        Command::Operator(args) => operator::run(globals, args).await,
        Command::Resolved(args) => resolved::run(globals, args).await,
        Command::HookEnv(args) => hook_env::run(globals, args).await,
        Command::Status(args) => status::run(globals, args).await,
        Command::Firewall(_) | Command::Node(_) | Command::Completions(_) | Command::Man(_) => Ok(()),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Runs `juju` commands within another program, with a configuration directory of its own. Prints
/// each command before its output.
#[derive(Debug)]
pub(super) struct Transcript {
    globals: Globals,
}

impl Transcript {
    pub(super) fn new(home: ConfigDir) -> Self {
        Self { globals: Globals::default().at(home) }
    }

    pub(super) fn globals(&self) -> &Globals {
        &self.globals
    }

    pub(super) async fn juju(&self, args: &[&str]) -> anyhow::Result<()> {
        output::data(&format!("$ juju {}\n", args.join(" "))).context("cannot write to stdout")?;
        let typed = Juju::try_parse_from(std::iter::once("juju").chain(args.iter().copied()))?;
        talk(&self.globals, &typed.command).await.map(|_code| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::charm::archive;

    #[test]
    fn the_command_definition_is_valid() {
        Juju::command().debug_assert();
    }

    #[test]
    fn help_states_the_actual_charm_limits() {
        let mut juju = Juju::command();
        let told = juju.find_subcommand_mut("deploy").unwrap().render_help().to_string();
        let limits = format!("at most {} files and {} MiB", archive::MAX_ENTRIES, archive::MAX_BYTES >> 20);
        assert!(told.contains(&limits), "{told}");
    }
}
