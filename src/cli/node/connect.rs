//! Connects to a manager: on a bus, or to the one that leads in an environment, whose address is in
//! the store.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;

use super::Through;
use crate::cli::args::environment::{Globals, Target};
use crate::cli::authority::role_identity;
use crate::cli::config::Role;
use crate::cli::error::Refusal;
use crate::cli::file;
use crate::fleet::client::Client;
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::connect::Security;
use crate::fleet::dbus::names::MANAGER_CERTIFICATE;
use crate::fleet::discovery;
use crate::net::tls::{ClientFiles, ClientTls};
use crate::store::certificates::read_authority;
use crate::store::fleet::addresses;
use crate::store::{Environment, ZkTree};

/// The longest wait for the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(8);

pub(super) async fn connect(through: &Through<'_>, timeout: Duration) -> anyhow::Result<Client> {
    match through {
        Through::Bus(bus) => Ok(Client::on_bus(&Bus::parse(bus), timeout).await?),
        Through::Environment(globals) => to_leader(globals, timeout).await,
    }
}

/// The address of the leading manager, and the CA of the environment.
struct Found {
    addresses: Vec<String>,
    ca: Option<String>,
}

async fn to_leader(globals: &Globals, timeout: Duration) -> anyhow::Result<Client> {
    let target = globals.target()?;
    let read = globals.in_environment(async |_, environment| read(environment).await);
    let slow = || Refusal::TooSlow { address: target.address.to_string(), seconds: STORE_TIMEOUT.as_secs() };
    let Found { addresses, ca } = tokio::time::timeout(STORE_TIMEOUT, read).await.map_err(|_| slow())??;
    let managers = discovery::parse(&addresses);
    if managers.is_empty() {
        return Err(Refusal::NoManager { environment: target.environment.clone() }.into());
    }
    let tls = client_tls(&target, ca.as_deref())?;
    let security = Security::Tls { tls, server_name: Some(MANAGER_CERTIFICATE.to_owned()) };
    Ok(Client::to_manager(&managers, &security, timeout).await?)
}

async fn read(environment: &Environment<ZkTree>) -> anyhow::Result<Found> {
    let tree = environment.tree();
    Ok(Found { addresses: addresses(tree).await?, ca: read_authority(tree).await? })
}

/// Returns TLS with the operator's certificate. An operator that was added on another host has the
/// certificate and the key, but not the CA.
fn client_tls(target: &Target, ca: Option<&str>) -> anyhow::Result<ClientTls> {
    let identity = role_identity(&target.config, &target.environment, Role::Operator);
    let files = identity.files();
    let missing = |path: &PathBuf| !path.exists();
    if let Some(path) = [&files.certificates, &files.key].into_iter().find(|path| missing(path)) {
        return Err(Refusal::NoOperatorCertificate { path: path.clone() }.into());
    }
    if let Some(ca) = ca.filter(|ca| !identity.has_ca(ca).unwrap_or(false)) {
        let path = identity.ca();
        let written = file::replace(&path, ca.as_bytes(), file::Privacy::Plain);
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    let files = ClientFiles { ca: Some(identity.ca()), identity: Some(files), ..ClientFiles::default() };
    Ok(ClientTls::load(files)?)
}
