//! The file of the environment's authority, `ENV-authority.json`, mode 0600: the CA certificate and
//! its private key. It is created on the host of `juju bootstrap` or `portcullis up`; controllers
//! on other hosts issue certificates only with a copy of it. The key is never written to the store.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::cli::config::{ConfigDir, Role, SavedEnvironment};
use crate::cli::error::Refusal;
use crate::cli::file::{self, Privacy};
use crate::identity::files::MachineIdentity;
use crate::keeper::storage::read_stored;
use crate::model::EnvironmentName;
use crate::net::tls::authority::{Authority, Names, ROLE_LIFETIME, Validity};
use crate::net::tls::certificate::Certificate;
use crate::net::tls::key::PrivateKey;
use crate::runtime::clock::wall_ms;
use crate::runtime::trusted_file;
use crate::store::certificates::read_authority;
use crate::store::{Address, Environment, Tree, paths};

/// Maximum size of the file.
const MAX_BYTES: usize = 64 * 1024;

#[derive(Serialize, Deserialize)]
struct Wire {
    certificate: String,
    key: String,
}

/// Returns the fingerprint of the CA certificate in the address of a store; `None` without TLS.
/// Refuses several certificates: a joining host looks for one of them in the server's chain.
pub(super) fn ca_fingerprint(store: &Address) -> anyhow::Result<Option<String>> {
    let Some(ca) = store.ca().filter(|_| store.is_tls()) else { return Ok(None) };
    match Certificate::count_in(ca) {
        count @ 2.. => Err(Refusal::SeveralCas { count }.into()),
        _ => Ok(Some(Certificate::parse(ca)?.fingerprint().to_string())),
    }
}

/// Reads the authority, if this host has its key. No message quotes the file.
pub(super) fn read(config: &ConfigDir, environment: &EnvironmentName) -> anyhow::Result<Option<Authority>> {
    let path = config.authority(environment);
    let Some(bytes) = trusted_file::read_secret(&path, MAX_BYTES)? else { return Ok(None) };
    let garbled = |problem: String| Refusal::GarbledAuthority { path: path.clone(), problem };
    let wire: Wire = serde_json::from_slice(&bytes)
        .map_err(|_| garbled("\"certificate\" or \"key\" is missing".to_owned()))?;
    let key = PrivateKey::parse(&wire.key).map_err(|error| garbled(error.to_string()))?;
    let loaded = Authority::load(&wire.certificate, &key).map_err(|error| garbled(error.to_string()))?;
    Ok(Some(loaded))
}

/// Reads the authority, if this host has its key, and refuses it if the environment has published
/// another one: two issuers with different keys would replace each other's certificates.
pub(super) async fn read_published<T: Tree>(
    config: &ConfigDir,
    environment: &EnvironmentName,
    tree: &T,
) -> anyhow::Result<Option<Authority>> {
    let Some(here) = read(config, environment)? else { return Ok(None) };
    match read_authority(tree).await? {
        Some(published) if published != here.certificate() => {
            Err(Refusal::OtherAuthority { path: config.authority(environment) }.into())
        }
        _ => Ok(Some(here)),
    }
}

/// Creates the authority of an environment that has none, and publishes its certificate as the
/// operator. The key is saved first: after a crash in between, the next run publishes the saved
/// one.
pub(super) async fn ensure<T: Tree>(
    config: &ConfigDir,
    environment: &EnvironmentName,
    opened: &Environment<T>,
) -> anyhow::Result<()> {
    file::remove_unfinished(&config.authority(environment));
    if read_authority(opened.tree()).await?.is_none() {
        let here = read_or_create(config, environment)?;
        opened.publish_authority(here.certificate()).await?;
    }
    match read_published(config, environment, opened.tree()).await? {
        Some(here) => issue_to_roles(config, environment, &here),
        None => Ok(()),
    }
}

/// The certificate of a role on this host.
pub(super) fn role_identity(
    config: &ConfigDir,
    environment: &EnvironmentName,
    role: Role,
) -> MachineIdentity {
    MachineIdentity::of_listener(config.identity(environment), role.name())
}

/// Issues the certificates of the operator and the controller, unless they are valid and not due
/// for renewal.
pub(super) fn issue_to_roles(
    config: &ConfigDir,
    environment: &EnvironmentName,
    authority: &Authority,
) -> anyhow::Result<()> {
    let directory = config.identity(environment);
    file::ensure_private_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    for role in [Role::Operator, Role::Controller] {
        issue_if_due(&role_identity(config, environment, role), authority, &Names::of([role.name()]))?;
    }
    Ok(())
}

/// Issues a certificate for these names, unless the saved one is for them and not due for renewal.
/// Returns the validity of a new certificate.
pub(super) fn issue_if_due(
    files: &MachineIdentity,
    authority: &Authority,
    names: &Names,
) -> anyhow::Result<Option<Validity>> {
    let (key, now_ms) = (files.ensure_key()?, wall_ms());
    let is_current = files.certificate()?.is_some_and(|certificate| {
        let validity = certificate.validity();
        certificate.names() == names
            && key.matches(&certificate)
            && (validity.from_ms..validity.renew_at_ms()).contains(&now_ms)
    });
    if is_current && files.has_ca(authority.certificate())? {
        return Ok(None);
    }
    let validity = Validity::starting(now_ms, ROLE_LIFETIME);
    files.install(&authority.issue_for(&key, names, validity)?)?;
    Ok(Some(validity))
}

/// Reads the authority for a keeper's listener. Creates it first for a new environment, but not if
/// the data of the keeper or the saved credentials show that there is another one.
pub(super) fn read_or_create_for_keeper(
    config: &ConfigDir,
    environment: &EnvironmentName,
    data_dir: &Path,
) -> anyhow::Result<Authority> {
    if let Some(here) = read(config, environment)? {
        return Ok(here);
    }
    let mut shown_by = None;
    for role in [Role::Operator, Role::Controller] {
        if let Some(SavedEnvironment { cluster_id: Some(_), ca: Some(_), .. }) =
            config.read(environment, role)?
        {
            shown_by = Some(config.path(environment, role)?);
        }
    }
    if read_stored(data_dir, paths::authority().as_str())?.is_some() {
        shown_by = Some(data_dir.to_owned());
    }
    match shown_by {
        None => read_or_create(config, environment),
        Some(shown_by) => {
            let (environment, path) = (environment.clone(), config.authority(environment));
            Err(Refusal::NoAuthority { environment, shown_by, path }.into())
        }
    }
}

/// Reads the authority, and creates it first on a host that has none.
fn read_or_create(config: &ConfigDir, environment: &EnvironmentName) -> anyhow::Result<Authority> {
    read(config, environment)?.map_or_else(|| create(config, environment), Ok)
}

/// Creates the file unless it exists, and returns its content.
fn create(config: &ConfigDir, environment: &EnvironmentName) -> anyhow::Result<Authority> {
    let path = config.authority(environment);
    let made = Authority::create(environment.as_str(), &PrivateKey::generate()?, wall_ms())?;
    let wire = Wire { certificate: made.certificate().to_owned(), key: made.key().expose().to_owned() };
    let text = serde_json::to_string(&wire).context("cannot write the authority")?;
    file::ensure_private_dir(path.parent().unwrap_or(&path))
        .and_then(|()| file::create_new(&path, format!("{text}\n").as_bytes(), Privacy::Secret))
        .with_context(|| format!("cannot write {}", path.display()))?;
    read(config, environment)?.with_context(|| format!("{} was removed", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::{Config, Keeper};
    use crate::store::records::Placement;
    use crate::store::{Bootstrap, Credential, MemoryStore, MemoryTree, ZkTree};

    async fn environment(name: &str) -> Environment<MemoryTree> {
        let [operator, controller] =
            ["operator", "controller"].map(|user| Credential::generate(user).unwrap());
        let wanted = Bootstrap {
            environment: name.parse().unwrap(),
            placement: Placement::Local,
            operator: operator.identity(),
            controller: controller.identity(),
        };
        let tree = MemoryStore::default().connect(Some(&operator));
        Environment::bootstrap(tree, &wanted).await.unwrap()
    }

    #[test]
    fn a_token_names_one_ca() {
        let ca = || Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap();
        let (one, two) = (ca(), ca());
        let fingerprint = |store: &str, ca: &str| {
            ca_fingerprint(&store.parse::<Address>().unwrap().with_ca(Some(ca))).map_err(|e| e.to_string())
        };
        let expected = Certificate::parse(one.certificate()).unwrap().fingerprint().to_string();
        assert_eq!(fingerprint("tls://zk1", one.certificate()), Ok(Some(expected)));
        let both = format!("{}{}", one.certificate(), two.certificate());
        assert!(fingerprint("tls://zk1", &both).unwrap_err().contains("has 2 certificates"));
        assert_eq!(fingerprint("zk1", &both), Ok(None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_authority_of_an_environment_stays() {
        let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (config, other) = (ConfigDir::below(home.path()), ConfigDir::below(elsewhere.path()));
        let name: EnvironmentName = "prod".parse().unwrap();
        let opened = environment("prod").await;
        assert!(read(&config, &name).unwrap().is_none());
        ensure(&config, &name, &opened).await.unwrap();
        let made = read(&config, &name).unwrap().unwrap();
        assert_eq!(read_authority(opened.tree()).await.unwrap().as_deref(), Some(made.certificate()));
        ensure(&config, &name, &opened).await.unwrap();
        assert_eq!(read(&config, &name).unwrap().unwrap().certificate(), made.certificate());
        for (role, dns) in [(Role::Operator, "operator"), (Role::Controller, "controller")] {
            let identity = role_identity(&config, &name, role);
            let issued = identity.certificate().unwrap().unwrap();
            assert_eq!(issued.names(), &Names::of([dns]));
            assert!(identity.has_ca(made.certificate()).unwrap());
            ensure(&config, &name, &opened).await.unwrap();
            assert_eq!(identity.certificate().unwrap(), Some(issued), "converged");
        }
        // A second operator gets no key, and a key of another environment is refused.
        ensure(&other, &name, &opened).await.unwrap();
        assert!(read(&other, &name).unwrap().is_none());
        ensure(&other, &name, &environment("prod").await).await.unwrap();
        let refused = format!("{:#}", ensure(&other, &name, &opened).await.unwrap_err());
        assert!(refused.contains("prod-authority.json holds the key of another authority"), "{refused}");
        let refused = read_published(&other, &name, opened.tree()).await.unwrap_err();
        assert!(refused.to_string().contains("prod-authority.json"), "{refused}");
        // An environment that is created again with the saved key gets the same authority.
        let again = environment("prod").await;
        ensure(&config, &name, &again).await.unwrap();
        assert_eq!(read_authority(again.tree()).await.unwrap().as_deref(), Some(made.certificate()));
        file::replace(&config.authority(&name), b"{\"key\": \"hunter2\"}", Privacy::Secret).unwrap();
        let refused = format!("{:#}", read(&config, &name).unwrap_err());
        assert!(refused.contains("is missing") && !refused.contains("hunter2"), "{refused}");
    }

    #[tokio::test]
    async fn a_keeper_creates_no_second_authority_for_an_environment_that_has_one() {
        let home = tempfile::tempdir().unwrap();
        let config = ConfigDir::below(home.path());
        let data = home.path().join("data");
        let name: EnvironmentName = "prod".parse().unwrap();
        // A new environment gets one.
        let made = read_or_create_for_keeper(&config, &name, &data).unwrap();
        std::fs::create_dir(&data).unwrap();
        let keeper = Keeper::start(Config::new(&data, ([127, 0, 0, 1], 0).into())).unwrap();
        let credential = Credential::generate("operator").unwrap();
        let identity = credential.identity();
        let address = keeper.local_addr().to_string().parse().unwrap();
        let tree = ZkTree::connect(&address, Some(&credential)).await.unwrap();
        let wanted = Bootstrap {
            environment: name.clone(),
            placement: Placement::Local,
            operator: identity.clone(),
            controller: identity,
        };
        let opened = Environment::bootstrap(tree, &wanted).await.unwrap();
        opened.publish_authority(made.certificate()).await.unwrap();
        opened.into_tree().close().await;
        drop(keeper);
        let again = read_or_create_for_keeper(&config, &name, &data).unwrap();
        assert_eq!(again.certificate(), made.certificate());

        std::fs::remove_file(config.authority(&name)).unwrap();
        let refused = |data: &Path| read_or_create_for_keeper(&config, &name, data).unwrap_err().to_string();
        let shown = refused(&data);
        assert!(shown.contains("prod-authority.json") && shown.contains("data"), "{shown}");
        assert!(!config.authority(&name).exists());
        // Another keeper's data says nothing; credentials that were saved with a CA do.
        let saved = SavedEnvironment {
            zookeeper: "tls://zk1:2181".to_owned(),
            credential,
            cluster_id: Some("c1".to_owned()),
            ca: Some(made.certificate().to_owned()),
        };
        config.replace(&name, Role::Operator, &saved).unwrap();
        let shown = refused(&home.path().join("elsewhere"));
        assert!(shown.contains("prod.json") && !config.authority(&name).exists(), "{shown}");
        let destroyed = SavedEnvironment { cluster_id: None, ..saved };
        config.replace(&name, Role::Operator, &destroyed).unwrap();
        read_or_create_for_keeper(&config, &name, &home.path().join("elsewhere")).unwrap();
    }
}
