//! `juju machine`: maintenance of machines, and their certificates.

use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;

use crate::cli::args::environment::{Globals, Target};
use crate::cli::authority;
use crate::cli::error::{Refusal, parse_arg};
use crate::cli::juju::heartbeat::{self, MaintenanceArgs};
use crate::cli::output;
use crate::identity::expired_offers;
use crate::identity::issuer::Issuer;
use crate::machine::join_token::{JoinToken, LIFETIME_MS};
use crate::model::MachineId;
use crate::net::tls::certificate::Certificate;
use crate::runtime::clock::{utc, wall_ms};
use crate::store::certificates::{Answer, read_answer};
use crate::store::changes::Watched;
use crate::store::joining::OfferKind;
use crate::store::tree::Feed as _;
use crate::store::{Environment, ZkTree};

/// How long the command waits for an issuer in another process.
const ISSUER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Suppress warnings and alerts for a silent machine for some time
    #[command(after_help = "\
Examples:
  juju machine maintenance 3
  juju machine maintenance 3 --for 30m
  juju machine maintenance 3 --end")]
    Maintenance(MaintenanceArgs),
    /// Make a new token for `portcullis join`
    #[command(after_help = "\
The token is valid once, and for one hour. Earlier tokens for the machine become void. It names the address \
of the store that this command uses: choose one that the machine can reach with --zookeeper.

Examples:
  juju machine token 3")]
    Token {
        /// Machine number
        #[arg(value_name = "ID")]
        machine: String,
    },
    /// Issue a new certificate for a machine
    #[command(after_help = "\
Certificates of machines are renewed without this command after two thirds of their lifetime. The machine's \
agent saves the new certificate as soon as it is connected to the store.

Examples:
  juju machine renew 3")]
    Renew {
        /// Machine number
        #[arg(value_name = "ID")]
        machine: String,
    },
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    match &args.action {
        Action::Maintenance(args) => heartbeat::run_maintenance(globals, args).await,
        Action::Token { machine } => {
            let machine = parse_arg(machine)?;
            let work = async |target: &Target, environment: &Environment<ZkTree>| {
                join_token(target, environment, machine).await
            };
            print_join_command(&globals.in_environment(work).await?)
        }
        Action::Renew { machine } => renew(globals, parse_arg(machine)?).await,
    }
}

/// Offers the machine to the holder of a new token, and deletes the offers of expired ones.
pub(super) async fn join_token(
    target: &Target,
    environment: &Environment<ZkTree>,
    machine: MachineId,
) -> anyhow::Result<JoinToken> {
    let now_ms = wall_ms();
    // A controller does so as well, if one runs.
    if let Err(problem) = expired_offers::delete_all(environment.tree(), now_ms).await {
        output::hint(&format!("expired tokens of other machines were not deleted: {problem}"));
    }
    let expires_ms = now_ms + LIFETIME_MS;
    Ok(JoinToken {
        environment: target.environment.clone(),
        machine,
        store: target.address.clone().with_ca(None),
        fingerprint: authority::ca_fingerprint(&target.address)?,
        credential: environment.offer_join(machine, expires_ms).await?,
        expires_ms,
        offer: OfferKind::Operator,
    })
}

/// Prints the command to run on the machine.
pub(super) fn print_join_command(token: &JoinToken) -> anyhow::Result<()> {
    let machine = token.machine;
    output::message(&format!("Run this on machine {machine} within an hour; it works once:"));
    if token.store.is_loopback() {
        let store = &token.store;
        output::hint(&format!(
            "other hosts cannot reach the store at {store}; choose its address with --zookeeper"
        ));
    }
    output::data(&format!("portcullis join {}\n", token.expose())).context("cannot write to stdout")
}

async fn renew(globals: &Globals, machine: MachineId) -> anyhow::Result<()> {
    let work = async |target: &Target, environment: &Environment<ZkTree>| {
        let tree = environment.tree();
        let authority = authority::read_published(&target.config, &target.environment, tree).await?;
        if !environment.renew_certificate(machine).await? {
            return Err(Refusal::NoRequest { machine }.into());
        }
        if let Some(authority) = authority {
            Issuer::new(tree.clone(), authority, wall_ms).pass(&[machine]).await?;
        }
        let answer = tokio::time::timeout(ISSUER_TIMEOUT, next_answer(tree, machine));
        answer.await.map_err(|_| Refusal::NoIssuer { machine })?
    };
    match globals.in_environment(work).await? {
        Answer::Refused(reason) => Err(Refusal::NoCertificate { machine, reason }.into()),
        Answer::Issued(chain) => {
            let issued = Certificate::parse(&chain).context("the new certificate cannot be read")?;
            let until = utc(issued.validity().until_ms);
            output::message(&format!("Machine {machine} has a new certificate, valid until {until}."));
            Ok(())
        }
    }
}

async fn next_answer(tree: &ZkTree, machine: MachineId) -> anyhow::Result<Answer> {
    let mut feed = Watched::MachineCertificate(machine).feed(tree).await?;
    loop {
        feed.next().await?;
        if let Some(answered) = read_answer(tree, machine).await? {
            return Ok(answered.answer);
        }
    }
}
