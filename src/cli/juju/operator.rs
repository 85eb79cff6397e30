//! `juju operator`: adds, lists and removes operators of an environment, and renews their
//! certificates.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Subcommand;

use crate::cli::args::environment::{Globals, Target};
use crate::cli::authority;
use crate::cli::config::{SavedEnvironment, render};
use crate::cli::error::parse_arg;
use crate::cli::file::{self, Privacy};
use crate::cli::output;
use crate::model::OperatorName;
use crate::net::tls::authority::{Authority, Names, ROLE_LIFETIME, Validity};
use crate::net::tls::key::PrivateKey;
use crate::runtime::clock::{utc, wall_ms};
use crate::store::operators::FIRST_OPERATOR;
use crate::store::{self, Credential, Environment, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add an operator with credentials and a certificate of its own
    #[command(after_help = "\
Writes NAME.json, NAME.key and NAME.pem to $XDG_CONFIG_HOME/portcullis/ENV-operators (default: \
~/.config/portcullis/ENV-operators). In the same place on the host of the new operator, NAME.json is \
saved as ENV.json, NAME.key as ENV-identity/operator.key and NAME.pem as ENV-identity/operator.pem, the \
first two with mode 0600. `juju node` uses the certificate; it is valid for a year.

Examples:
  juju operator add alice")]
    Add {
        /// Name of the operator: lower-case letters, digits and '-'
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Issue a new certificate with a new key for an operator
    #[command(after_help = "\
Requires the key of the environment's authority, which is on the host that bootstrapped. Writes NAME.key and \
NAME.pem as `juju operator add` does; the credentials stay the same. The certificate of the first operator \
is renewed by the process that issues certificates.

Examples:
  juju operator renew alice")]
    Renew {
        /// Name of the operator
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Remove an operator
    #[command(after_help = "Examples:\n  juju operator remove alice")]
    Remove {
        /// Name of the operator
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List the operators
    List,
}

pub(super) async fn run(globals: &Globals, args: &Args) -> anyhow::Result<()> {
    match &args.action {
        Action::Add { name } => add(globals, parse_arg(name)?).await,
        Action::Renew { name } => renew(globals, parse_arg(name)?).await,
        Action::Remove { name } => {
            let name: OperatorName = parse_arg(name)?;
            globals
                .in_environment(async |_, environment| Ok(environment.remove_operator(&name).await?))
                .await?;
            output::message(&format!("Operator '{name}' was removed."));
            output::hint(
                "a copy of the environment's shared credential, which every operator can read, stays valid",
            );
            Ok(())
        }
        Action::List => {
            let names =
                globals.in_environment(async |_, environment| Ok(environment.operators().await?)).await?;
            let names = names.iter().map(ToString::to_string);
            let lines: String =
                std::iter::once(FIRST_OPERATOR.to_owned()).chain(names).map(|name| name + "\n").collect();
            output::data(&lines).context("cannot write to stdout")
        }
    }
}

/// The files of a new operator.
struct Written {
    credentials: PathBuf,
    has_certificate: bool,
}

/// Writes the files before the entry, so that a crash leaves no entry without its credentials.
async fn add(globals: &Globals, name: OperatorName) -> anyhow::Result<()> {
    let credential = Credential::of_operator(&name)?;
    let work = async |target: &Target, environment: &Environment<ZkTree>| {
        // The files of an operator that exists must not be replaced.
        if environment.operators().await?.contains(&name) {
            return Err(store::Error::OperatorExists(name.clone()).into());
        }
        let (config, tree) = (&target.config, environment.tree());
        let shared = target.shared_credential(tree).await?;
        let authority = authority::read_published(config, &target.environment, tree).await?;
        let cluster_id = &environment.info().cluster_id;
        let written = write_files(target, (&name, &credential), cluster_id, authority.as_ref())?;
        environment.add_operator(&name, &credential.identity(), &shared).await?;
        let path = config.authority(&target.environment);
        Ok((written, path))
    };
    let (Written { credentials, has_certificate }, authority) = globals.in_environment(work).await?;
    let credentials = credentials.display();
    output::message(&format!("Operator '{name}' was added; the credentials are in {credentials}."));
    if !has_certificate {
        output::hint(&format!("no certificate was issued, because {} does not exist", authority.display()));
    }
    Ok(())
}

/// Writes the credentials, and the certificate if this host has the authority's key.
fn write_files(
    target: &Target,
    (name, credential): (&OperatorName, &Credential),
    cluster_id: &str,
    authority: Option<&Authority>,
) -> anyhow::Result<Written> {
    let directory = target.config.operators(&target.environment);
    let saved = SavedEnvironment {
        zookeeper: target.address.to_string(),
        credential: credential.clone(),
        cluster_id: Some(cluster_id.to_owned()),
        ca: target.address.ca().map(str::to_owned),
    };
    let credentials = directory.join(format!("{name}.json"));
    write(&directory, &credentials, &render(&saved), Privacy::Secret)?;
    if let Some(authority) = authority {
        write_certificate(&directory, name, authority)?;
    }
    Ok(Written { credentials, has_certificate: authority.is_some() })
}

/// Issues a certificate for a new key, and writes both. Returns the path of the certificate and its
/// validity.
fn write_certificate(
    directory: &Path,
    name: &OperatorName,
    authority: &Authority,
) -> anyhow::Result<(PathBuf, Validity)> {
    let key = PrivateKey::generate()?;
    let names = Names::of([format!("{FIRST_OPERATOR}-{name}")]);
    let validity = Validity::starting(wall_ms(), ROLE_LIFETIME);
    let chain = authority.issue_for(&key, &names, validity)?;
    write(directory, &directory.join(format!("{name}.key")), key.expose(), Privacy::Secret)?;
    let certificate = directory.join(format!("{name}.pem"));
    write(directory, &certificate, &chain, Privacy::Plain)?;
    Ok((certificate, validity))
}

fn write(directory: &Path, path: &Path, contents: &str, privacy: Privacy) -> anyhow::Result<()> {
    file::ensure_private_dir(directory)
        .and_then(|()| file::replace(path, contents.as_bytes(), privacy))
        .with_context(|| format!("cannot write {}", path.display()))
}

async fn renew(globals: &Globals, name: OperatorName) -> anyhow::Result<()> {
    let work = async |target: &Target, environment: &Environment<ZkTree>| {
        if !environment.operators().await?.contains(&name) {
            return Err(store::Error::OperatorNotFound(name.clone()).into());
        }
        let (config, environment, tree) = (&target.config, &target.environment, environment.tree());
        let Some(authority) = authority::read_published(config, environment, tree).await? else {
            bail!(
                "no certificate was issued, because {} does not exist",
                config.authority(environment).display()
            );
        };
        write_certificate(&config.operators(environment), &name, &authority)
    };
    let (certificate, validity) = globals.in_environment(work).await?;
    let (certificate, until) = (certificate.display(), utc(validity.until_ms));
    output::message(&format!(
        "Operator '{name}' has a new certificate, valid until {until}; it is in {certificate}, with its key \
         beside it."
    ));
    Ok(())
}
