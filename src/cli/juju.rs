//! The operator's client: what can be typed, and which file does it.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};

use super::config::ConfigDir;
use super::failure::{self, Refusal};
use super::settings::Globals;
use super::unanswered::Unanswered;
use super::{
    accept_store, add_machine, add_unit, adopt_groups, bootstrap, completions, deploy, destroy_environment,
    destroy_service, expose, firewall, heartbeat, hook_env, man, output, remove_unit, resolved, start,
    status, terminate_machine, unexpose,
};

/// The longest that a command may take. Each call of the store has its own, shorter limit; this one is for many.
const DEADLINE: Duration = Duration::from_secs(9);

#[derive(Debug, Parser)]
#[command(
    name = "juju",
    version,
    about = "Deploys services and opens exactly the ports they ask for",
    after_help = "\
Examples:
  juju deploy ./charms/wordpress -n 2     a service with two units
  juju expose wordpress                   open the ports that its units asked for
  juju status wordpress                   what is going on there
  juju -e prod --zookeeper zk1,zk2/prod bootstrap
  eval \"$(juju hook-env wordpress/0)\"     try a hook by hand

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
    /// Make an environment in a store, with its credentials
    #[command(after_help = "\
The credentials are kept in $XDG_CONFIG_HOME/portcullis/ENV.json (else below ~/.config), which only you can read.
Run again after a failure, it finishes what was begun.

Examples:
  juju bootstrap
  juju -e prod --zookeeper zk1:2181,zk2:2181/prod bootstrap")]
    Bootstrap(bootstrap::Typed),
    /// Make a service of a charm, with units and machines for them
    #[command(after_help = "\
A charm has at most 1000 files and 16 MiB, and its links stay within it.

Examples:
  juju deploy ./charms/wordpress
  juju deploy ./charms/wordpress blog -n 3
  juju deploy ./charms/mysql --to 0")]
    Deploy(deploy::Typed),
    /// Add units to a service
    #[command(after_help = "Examples:\n  juju add-unit wordpress\n  juju add-unit wordpress -n 2 --to 0")]
    AddUnit(add_unit::Typed),
    /// Decide about a hook that failed
    #[command(after_help = "\
Without --retry the unit goes on as if the hook had succeeded.

Examples:
  juju resolved --retry wordpress/0
  juju resolved wordpress/0")]
    Resolved(resolved::Typed),
    /// Remove units from their services
    #[command(after_help = "Examples:\n  juju remove-unit wordpress/0 wordpress/1")]
    RemoveUnit(remove_unit::Typed),
    /// Remove a service with all its units
    #[command(after_help = "Machines stay. Examples:\n  juju destroy-service wordpress")]
    DestroyService(destroy_service::Typed),
    /// Remove an environment with all that it has
    #[command(after_help = "\
Refuses while there are services or machines, unless --force destroys and terminates them first. The controller removes
instances and security groups, so one has to run; then the tree is removed. The credentials of the environment stay in
their files: `juju bootstrap` makes the next one with them.

Examples:
  juju -e prod destroy-environment --yes
  juju -e prod destroy-environment --yes --force")]
    DestroyEnvironment(destroy_environment::Typed),
    /// Take over security groups after the store was lost
    #[command(after_help = "\
Groups are marked with the id of the store that made them, and a controller leaves those of another store alone. When that
store is lost and a new one has the environment's name, this command has the running controller mark the groups
juju-ENV and juju-ENV-N with the new id. A machine's group that an instance is in is left as it is, and named.

Examples:
  juju -e prod adopt-groups")]
    AdoptGroups(adopt_groups::Typed),
    /// Add a machine
    #[command(after_help = "Examples:\n  juju add-machine\n  juju add-machine --instance-id i-0abc")]
    AddMachine(add_machine::Typed),
    /// Let machines go that have no units
    #[command(after_help = "Examples:\n  juju terminate-machine 1 2")]
    TerminateMachine(terminate_machine::Typed),
    /// Let agents continue with a store that was restored from a backup
    #[command(after_help = "\
Agents that acted on changes which the store no longer has remove nothing: no unit, port or instance. `juju status` shows
them. This command accepts the store as it is; the agents then remove whatever is not in it.

Examples:
  juju accept-store")]
    AcceptStore,
    /// Open the ports of a service to the world
    #[command(after_help = "\
Opens what the service's units asked for with open-port, now and later, on the machines they are on.
Running it again replaces the list of allowed sources.

Examples:
  juju expose wordpress
  juju expose wordpress --to 192.0.2.0/24 2001:db8::/32")]
    Expose(expose::Typed),
    /// Close the ports of a service to the world
    #[command(after_help = "Examples:\n  juju unexpose wordpress")]
    Unexpose(unexpose::Typed),
    /// Show what a controller made of it, and why
    #[command(after_help = "\
Examples:
  juju firewall plan                what is still to change; exit code 2 if there is anything
  juju firewall explain 0           why each port of machine 0 is as it is
  juju firewall explain 0 53/udp    why this one is
  juju firewall log --unit web/0    what was changed for this unit, and when")]
    Firewall(firewall::Typed),
    /// Show who is alive
    #[command(after_help = "\
Examples:
  juju heartbeat list --unwell
  juju heartbeat show 3
  juju heartbeat watch
  juju heartbeat params Sm_url=http://sm:27779/hsm/v2
  juju heartbeat release             believe a mass outage")]
    Heartbeat(heartbeat::Typed),
    /// Say something about a machine
    #[command(after_help = "Examples:\n  juju machine maintenance 3 --for 2h")]
    Machine(heartbeat::MachineTyped),
    /// Print the environment that a unit's hook gets
    #[command(after_help = "\
Examples:
  eval \"$(juju hook-env wordpress/0)\"; open-port 80")]
    HookEnv(hook_env::Typed),
    /// Show machines, services and units
    #[command(after_help = "\
A scope with a slash is for units, any other for services; machines are shown that those are on.

Examples:
  juju status
  juju status 'word*' mysql/0 --format tabular
  juju status --format json --output status.json")]
    Status(status::Typed),
    /// Print completions for a shell
    #[command(
        after_help = "Examples:\n  juju completions bash > ~/.local/share/bash-completion/completions/juju"
    )]
    Completions(completions::Typed),
    /// Print or write the manual pages
    #[command(after_help = "Examples:\n  juju man | man -l -\n  juju man --output ~/.local/share/man/man1")]
    Man(man::Typed),
}

/// Runs what the process was given.
pub fn main() -> ExitCode {
    let juju = match start::parse::<Juju>() {
        Ok(juju) => juju,
        Err(code) => return code,
    };
    // Only for those who ask: setting it up costs as much as the rest of the start.
    if std::env::var_os("RUST_LOG").is_some() {
        crate::runtime::telemetry::init("warn");
    }
    match start::block_on(run(&juju)) {
        Ok(code) => code,
        Err(error) => failure::report(&error),
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
    let notes = juju.globals.config()?.unanswered(&juju.globals.environment()?);
    // What is no text is told apart all the same.
    let words =
        std::env::args_os().skip(1).map(|word| word.into_string().unwrap_or_else(|raw| format!("{raw:?}")));
    let run = Unanswered::look(notes, words.collect())?;
    let done = in_time(&juju.globals.marked(run.operation()), &juju.command).await;
    match &done {
        Ok(_) => run.forget().context("done, but the note of the run before cannot be removed")?,
        Err(error) if failure::leaves_doubt(error) => {
            if let Err(cause) = run.remember() {
                let cause =
                    anyhow::Error::new(cause).context("cannot note that this command was not answered");
                output::error(&cause);
                output::hint("look at `juju status` before you run it again");
            }
        }
        Err(_) => {}
    }
    done
}

async fn in_time(globals: &Globals, command: &Command) -> anyhow::Result<ExitCode> {
    // These wait for a controller, and have their own limit.
    let waits = matches!(command, Command::DestroyEnvironment(_) | Command::AdoptGroups(_));
    if waits || matches!(command, Command::Status(args) if args.is_endless()) {
        return talk(globals, command).await;
    }
    match tokio::time::timeout(DEADLINE, talk(globals, command)).await {
        Ok(done) => done,
        Err(_) => {
            let address = globals.settings()?.address.to_string();
            Err(Refusal::TooSlow { address, seconds: DEADLINE.as_secs() }.into())
        }
    }
}

impl Command {
    /// Run twice it would do more, or fail, than run once.
    fn is_done_once(&self) -> bool {
        use Command::{AddMachine, AddUnit, Deploy, DestroyService, RemoveUnit, TerminateMachine};
        matches!(
            self,
            Deploy(_) | AddUnit(_) | RemoveUnit(_) | DestroyService(_) | AddMachine(_) | TerminateMachine(_)
        )
    }
}

/// The commands that need a store.
async fn talk(globals: &Globals, command: &Command) -> anyhow::Result<ExitCode> {
    if let Command::Firewall(args) = command {
        return firewall::run(globals, args).await;
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
        Command::Machine(args) => heartbeat::run_machine(globals, args).await,
        Command::Resolved(args) => resolved::run(globals, args).await,
        Command::HookEnv(args) => hook_env::run(globals, args).await,
        Command::Status(args) => status::run(globals, args).await,
        Command::Firewall(_) | Command::Completions(_) | Command::Man(_) => Ok(()),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// `juju` run within another program, with a memory of its own: shows each command, then does it.
#[derive(Debug)]
pub(super) struct Story {
    globals: Globals,
}

impl Story {
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
    use crate::unit::pack;

    #[test]
    fn the_definition_is_sound() {
        Juju::command().debug_assert();
    }

    #[test]
    fn the_limits_of_a_charm_are_told_as_they_are() {
        let mut juju = Juju::command();
        let told = juju.find_subcommand_mut("deploy").unwrap().render_help().to_string();
        let limits = format!("at most {} files and {} MiB", pack::MAX_ENTRIES, pack::MAX_BYTES >> 20);
        assert!(told.contains(&limits), "{told}");
    }
}
