//! `juju expose`: sets a service's flag. Its ports open once the firewall agent sees it.

use clap::Args;

use super::failure::typed;
use super::output;
use super::settings::Globals;
use crate::model::{Cidr, ServiceName};
use crate::store::Flag;

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Service to expose
    service: String,
    /// Only to these blocks of addresses
    #[arg(long, value_name = "CIDR", num_args = 1..)]
    to: Vec<String>,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let name: ServiceName = typed(&args.service)?;
    let sources = args.to.iter().map(|text| typed(text)).collect::<Result<Vec<Cidr>, _>>()?;
    let became = globals
        .in_environment(async |_, environment| Ok(environment.expose_to(&name, &sources).await?))
        .await?;
    output::message(&match became {
        Flag::Changed => format!("Service '{name}' was exposed."),
        Flag::AlreadySo => format!("Service '{name}' was already exposed."),
    });
    Ok(())
}
