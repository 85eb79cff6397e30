//! The daemon `portcullis`: its command line, and which file runs each role.

mod agent;
mod checkpoint_file;
mod controller;
mod demo;
mod fleet_role;
mod heartbeat;
mod install;
mod issuer;
mod join;
mod keeper;
mod leave;
mod listener_certificate;
pub(super) mod machine;
pub(super) mod machine_file;
mod machine_service;
mod manager;
mod node_agent;
mod run_hook;
pub(super) mod up;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum};

use crate::cli::completions;

use crate::cli::error;

use crate::cli::man;

use crate::cli::start;

use crate::runtime::logging;

#[derive(Debug, Parser)]
#[command(
    name = "portcullis",
    version,
    about = "Run the store and the agents that work on it, in one process or several",
    after_help = "\
Examples:
  portcullis up                                     run an environment on this machine
  portcullis demo                                   watch a complete example
  portcullis keeper --data-dir /var/lib/portcullis  run only the store

Logs go to stderr; RUST_LOG overrides --log-level. SIGTERM and SIGINT stop the process gracefully."
)]
struct Portcullis {
    /// Least severe level to log
    #[arg(long, global = true, value_enum, value_name = "LEVEL", default_value_t = Level::Warn)]
    log_level: Level,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole environment on this machine, in one process
    #[command(after_help = "\
Saves the store's address and credentials where `juju` finds them. Started again, it continues with the \
same data.

Examples:
  portcullis up
  portcullis up -e try --listen 127.0.0.1:0 --data-dir ./try")]
    Up(up::Args),
    /// Run only the store
    #[command(after_help = "\
Prints `listening on HOST:PORT` when it is ready. Any ZooKeeper client can connect. \
PORTCULLIS_SUPER_DIGEST=USER:BASE64-OF-SHA1 sets an identity to which access lists do not apply.

Examples:
  portcullis keeper -e prod --data-dir /var/lib/portcullis --listen 0.0.0.0:2181")]
    Keeper(keeper::Args),
    /// Run the firewall controller of an environment
    #[command(after_help = "\
Reads $XDG_CONFIG_HOME/portcullis/ENV-controller.json, which `juju bootstrap` and `portcullis up` write. \
Several controllers may run: one is the leader, and another takes over when it stops.

A policy file is YAML; each key is optional, but the file must not be empty:
  forbidden-ports: [22, 8000-8100/udp]
  forbidden-sources: [10.0.0.0/8]
  max-ports-in-range: 1000
  max-rules: 50

Region and credentials for EC2 come from AWS_REGION, AWS_PROFILE and the other usual AWS settings.

Examples:
  portcullis controller --provider memory
  portcullis controller -e prod --provider dry-run
  portcullis --log-level info controller -e prod --provider ec2 --policy policy.yaml \\
    --ec2-image ami-0abcdef --ec2-instance-type t3.micro --ec2-zookeeper zk1:2181,zk2:2181")]
    Controller(controller::Args),
    /// Run the heartbeat tracker
    #[command(after_help = "\
Prints `listening on HOST:PORT` when it is ready. Reads $XDG_CONFIG_HOME/portcullis/ENV-controller.json. \
Several trackers may run: each accepts every beat, and one of them, the judge, decides about states. \
Clients of hms-hbtd need --open, and --open-params to set parameters; machines authenticate with their \
token. PORTCULLIS_WEBHOOK_SECRET signs webhook requests.

Examples:
  portcullis heartbeat
  portcullis --log-level info heartbeat -e prod --listen 10.0.0.5:28500 --open --allow-plain-tcp")]
    Heartbeat(heartbeat::Args),
    /// Run the agent of this machine
    #[command(after_help = "\
One agent at a time runs for a machine; when it stops, open ports stay open. The machine's credentials are \
in $XDG_CONFIG_HOME/portcullis/ENV-machines/machine-NNNNNNNNNN.json. `portcullis join` creates this file; \
where the operator's credentials are, the agent creates it.

With --firewall nftables the agent opens the ports that exposed units request and rejects all other \
connections, in an nftables table of its own; ssh, the store's ports and those of --protect stay open.

Examples:
  portcullis machine --id 0
  portcullis machine --id 3 -e prod --firewall nftables --protect 51820/udp
  portcullis machine --id 3 -e prod --firewall nftables-accept-only     try before enforcing
  portcullis machine --id 3 -e prod --leave     remove everything of machine 3 from this host")]
    Machine(machine::Args),
    /// Run the manager of a fleet
    #[command(after_help = "\
Prints `listening on HOST:PORT` when it accepts agents. Serves systemd of all nodes under one D-Bus API, \
with the name org.containers.hirte, on the bus and to operators. The file is INI:
  [hirte]
  ManagerPort=842
  AllowedNodeNames=n1,n2
  [node n3]
  Certificate=/etc/portcullis/n3.pem

Plain TCP is accepted from loopback addresses only, unless --allow-plain-tcp is given. SIGTERM ends all jobs \
with the result 'cancelled'.

Examples:
  portcullis manager --config /etc/hirte/hirte.conf
  portcullis manager --config hirte.conf --bus user --listen 127.0.0.1:0")]
    Manager(manager::Args),
    /// Run the agent of a node of a fleet
    #[command(after_help = "\
Connects to a manager, and gives it control of systemd on this machine. When the connection is lost, the \
agent connects again; nothing that runs is changed. The file is INI:
  [hirte-agent]
  NodeName=n1
  ManagerHost=192.0.2.1
  ManagerPort=842

Examples:
  portcullis agent --name n1 --manager 192.0.2.1:842 --tls-cert n1.pem --tls-key n1.key \\
    --ca-file ca.pem
  portcullis agent --name n1 --manager 127.0.0.1:842 --bus user
  portcullis agent --config /etc/hirte/agent.conf")]
    Agent(agent::Args),
    /// Make this host a machine of an environment
    #[command(after_help = "\
`juju add-machine` and `juju machine token` print the token. It is valid once, and for one hour. The private \
key of the machine is created here and does not leave this host. With --service, the machine file is below \
/etc/portcullis, and the agent runs as a systemd service; otherwise the file is below \
$XDG_CONFIG_HOME/portcullis (default: ~/.config/portcullis).

Examples:
  portcullis join pj1.eyJlbnZpcm9ubWVudCI6InByb2QifQ.0a1b2c3d
  portcullis join --service -     read the token from stdin")]
    Join(join::Args),
    /// Write systemd unit files
    #[command(after_help = "\
The installed services read credentials below /etc/portcullis and keep data below /var/lib/portcullis.

Examples:
  portcullis install up
  portcullis install -e prod machine
  portcullis install manager --bus-group fleet
  portcullis install agent --user")]
    Install(install::Args),
    /// Run one hook for the unit agent
    #[command(hide = true)]
    RunHook(run_hook::Args),
    /// Log the output of processes that a hook started
    #[command(hide = true)]
    KeepLog(run_hook::Log),
    /// Run a complete example in a temporary directory
    Demo(demo::Args),
    /// Print a completion script for a shell
    #[command(after_help = "Examples:\n  portcullis completions zsh > _portcullis")]
    Completions(completions::Args),
    /// Print or write the manual pages
    #[command(after_help = "Examples:\n  portcullis man | man -l -")]
    Man(man::Args),
}

/// Runs the command of the process's arguments.
pub fn main() -> ExitCode {
    let portcullis = match start::parse::<Portcullis>() {
        Ok(portcullis) => portcullis,
        Err(code) => return code,
    };
    let level = match portcullis.log_level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    };
    match portcullis.command {
        Command::Demo(_) => logging::init(&demo::log_filter(level)),
        _ => logging::init(level),
    }
    let done = match &portcullis.command {
        // These start once per hook and wait for one pipe only, so they need no runtime.
        Command::RunHook(args) => run_hook::run(args),
        Command::KeepLog(args) => run_hook::keep_log(args),
        Command::Controller(_) => start::block_on_beside_sessions(run(&portcullis)),
        _ => start::block_on(run(&portcullis)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error::report(&error),
    }
}

async fn run(portcullis: &Portcullis) -> anyhow::Result<()> {
    match &portcullis.command {
        Command::Up(args) => up::run(args).await,
        Command::Keeper(args) => keeper::run(args).await,
        Command::Controller(args) => controller::run(args).await,
        Command::Heartbeat(args) => heartbeat::run(args).await,
        Command::Machine(args) => machine::run(args).await,
        Command::Manager(args) => manager::run(args).await,
        Command::Agent(args) => agent::run(args).await,
        Command::Join(args) => join::run(args).await,
        Command::Install(args) => install::run(args),
        Command::Demo(args) => demo::run(args).await,
        Command::Completions(args) => completions::run(Portcullis::command(), args),
        Command::Man(args) => man::run(Portcullis::command(), args),
        // Handled in `main`, without a runtime.
        Command::RunHook(_) | Command::KeepLog(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_definition_is_valid() {
        Portcullis::command().debug_assert();
    }
}
