//! EC2 settings of the controller, from flags or from a file with the same keys. Region,
//! credentials and endpoint come from the usual AWS settings. No request to EC2 is made here.

#![cfg_attr(
    not(feature = "ec2"),
    allow(dead_code, reason = "settings are checked in every build, and used only with EC2")
)]

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde::Deserialize;

use crate::cli::error::{Refusal, Usage};
use crate::runtime::trusted_file;
use crate::store::{Address, tree};

const MAX_BYTES: usize = 16 * 1024;

/// Maximum length of a value, as for names in EC2.
const VALUE_MAX: usize = 255;

#[derive(Debug, Default, Clone, Args)]
#[command(next_help_heading = "EC2")]
pub(in crate::cli) struct Ec2Args {
    /// Image for new instances; `portcullis` must be installed on it
    #[arg(long, value_name = "AMI")]
    ec2_image: Option<String>,
    /// Type of new instances
    #[arg(long, value_name = "TYPE")]
    ec2_instance_type: Option<String>,
    /// Subnet for new instances [default: one of the default VPC]
    #[arg(long, value_name = "ID")]
    ec2_subnet: Option<String>,
    /// Key pair for ssh [default: none]
    #[arg(long, value_name = "NAME")]
    ec2_key: Option<String>,
    /// Store address for machines [default: the controller's]
    #[arg(long, value_name = "HOSTS")]
    ec2_zookeeper: Option<String>,
    /// YAML file with image, instance-type, subnet, key and zookeeper. Flags override it
    #[arg(long, value_name = "FILE")]
    ec2_settings: Option<PathBuf>,
}

/// The keys of the settings file. Flags have the same meaning.
#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Keys {
    image: Option<String>,
    instance_type: Option<String>,
    subnet: Option<String>,
    key: Option<String>,
    zookeeper: Option<String>,
}

/// Checked EC2 settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) struct Ec2Config {
    /// If `None`, machines cannot be launched, only adopted.
    pub(in crate::cli) launch: Option<Launch>,
    /// Store address for machines.
    pub(in crate::cli) store: Address,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) struct Launch {
    pub(in crate::cli) image: String,
    pub(in crate::cli) instance_type: String,
    pub(in crate::cli) subnet: Option<String>,
    pub(in crate::cli) key: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("EC2 setting '{key}' is empty")]
    Empty { key: &'static str },
    #[error("EC2 setting '{key}' has more than {VALUE_MAX} characters or contains control characters")]
    NoName { key: &'static str },
    #[error("EC2 needs both an image and an instance type, or neither")]
    Half,
    #[error("{given} requires an EC2 provider: --provider ec2 or dry-run")]
    OtherProvider { given: &'static str },
}

impl Ec2Args {
    /// Refuses all EC2 flags, for providers other than EC2.
    pub(in crate::cli) fn refuse_all(&self) -> Result<(), Usage> {
        let given = [
            ("--ec2-image", self.ec2_image.is_some()),
            ("--ec2-instance-type", self.ec2_instance_type.is_some()),
            ("--ec2-subnet", self.ec2_subnet.is_some()),
            ("--ec2-key", self.ec2_key.is_some()),
            ("--ec2-zookeeper", self.ec2_zookeeper.is_some()),
            ("--ec2-settings", self.ec2_settings.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((given, _)) => Err(Usage::new(Wrong::OtherProvider { given })),
            None => Ok(()),
        }
    }

    /// Combines flags and file. `store` is the controller's own address of the store.
    pub(in crate::cli) fn settings(&self, store: &Address) -> anyhow::Result<Ec2Config> {
        let file = self.ec2_settings.as_deref().map(read).transpose()?.unwrap_or_default();
        let flags = Keys {
            image: self.ec2_image.clone(),
            instance_type: self.ec2_instance_type.clone(),
            subnet: self.ec2_subnet.clone(),
            key: self.ec2_key.clone(),
            zookeeper: self.ec2_zookeeper.clone(),
        };
        meant(flags.or(file), store)
    }
}

impl Keys {
    fn or(self, file: Self) -> Self {
        Self {
            image: self.image.or(file.image),
            instance_type: self.instance_type.or(file.instance_type),
            subnet: self.subnet.or(file.subnet),
            key: self.key.or(file.key),
            zookeeper: self.zookeeper.or(file.zookeeper),
        }
    }
}

fn read(path: &Path) -> anyhow::Result<Keys> {
    let bytes = trusted_file::read_trusted(path, MAX_BYTES)?
        .ok_or_else(|| Refusal::NoEc2Settings { path: path.to_owned() })?;
    let wrong = || format!("cannot use the settings in {}", path.display());
    let text = std::str::from_utf8(&bytes).with_context(wrong)?;
    let one_line = |error: serde_saphyr::Error| {
        let text = error.to_string();
        anyhow::Error::msg(text.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    serde_saphyr::from_str(text).map_err(one_line).with_context(wrong)
}

fn meant(keys: Keys, store: &Address) -> anyhow::Result<Ec2Config> {
    let Keys { image, instance_type, subnet, key, zookeeper } = keys;
    for (name, value) in
        [("image", &image), ("instance-type", &instance_type), ("subnet", &subnet), ("key", &key)]
    {
        if let Some(value) = value {
            check(name, value).map_err(Usage::new)?;
        }
    }
    let launch = match (image, instance_type) {
        (Some(image), Some(instance_type)) => Some(Launch { image, instance_type, subnet, key }),
        (None, None) => None,
        _ => return Err(Usage::new(Wrong::Half).into()),
    };
    let store = match zookeeper {
        // The same ensemble by other addresses, so its servers have certificates of the same CA.
        Some(hosts) => hosts.parse::<Address>().map_err(Usage::new)?.with_ca(store.ca()),
        None => store.clone(),
    };
    if store.is_tls() && store.ca().is_none() {
        // A token for machines has to name the CA.
        return Err(tree::Error::NoCa { hosts: store.hosts() }.into());
    }
    Ok(Ec2Config { launch, store })
}

fn check(key: &'static str, value: &str) -> Result<(), Wrong> {
    if value.is_empty() {
        return Err(Wrong::Empty { key });
    }
    let unseen = |c: char| c.is_control();
    if value.chars().count() > VALUE_MAX || value.chars().any(unseen) {
        return Err(Wrong::NoName { key });
    }
    Ok(())
}

/// Creates the EC2 driver for the environment of an opened store.
#[cfg(feature = "ec2")]
pub(in crate::cli) fn connect(
    access: &portcullis_provider::ec2::Access,
    store: &crate::store::records::Initialized,
    launch: Option<Launch>,
) -> anyhow::Result<portcullis_provider::Ec2> {
    use portcullis_provider::ec2;
    let environment =
        ec2::Environment::new(store.environment.as_str(), &store.cluster_id).map_err(Usage::new)?;
    let launch = launch.map(|launch| ec2::LaunchSettings {
        image: launch.image,
        instance_type: launch.instance_type,
        subnet: launch.subnet,
        key: launch.key,
    });
    Ok(ec2::Ec2::connect(ec2::Ec2Settings { launch, ..ec2::Ec2Settings::new(environment) }, access)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::authority::ca_fingerprint;
    use crate::machine::join_token::JoinToken;
    use crate::model::MachineId;
    use crate::net::tls::authority::Authority;
    use crate::net::tls::certificate::Certificate;
    use crate::net::tls::key::PrivateKey;
    use crate::provision::user_data::BootConfig;
    use crate::store::Credential;
    use crate::store::acl::Roles;
    use crate::store::joining::LaunchOffer;

    fn store() -> Address {
        "127.0.0.1:2181/prod".parse().unwrap()
    }

    fn refused(typed: &Ec2Args) -> String {
        let text = format!("{:#}", typed.settings(&store()).unwrap_err());
        assert!(!text.contains('\n'), "{text}");
        text
    }

    #[test]
    fn flags_override_the_settings_file() {
        let none = Ec2Args::default().settings(&store()).unwrap();
        assert_eq!(none, Ec2Config { launch: None, store: store() });
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ec2.yaml");
        std::fs::write(&path, "image: ami-1\ninstance-type: t3.micro\nkey: mine\nzookeeper: zk1,zk2/prod\n")
            .unwrap();
        let typed = Ec2Args {
            ec2_image: Some("ami-2".to_owned()),
            ec2_subnet: Some("subnet-1".to_owned()),
            ec2_settings: Some(path),
            ..Ec2Args::default()
        };
        let settings = typed.settings(&store()).unwrap();
        let launch = settings.launch.unwrap();
        assert_eq!((launch.image.as_str(), launch.instance_type.as_str()), ("ami-2", "t3.micro"));
        assert_eq!((launch.subnet.as_deref(), launch.key.as_deref()), (Some("subnet-1"), Some("mine")));
        assert_eq!(settings.store.to_string(), "zk1:2181,zk2:2181/prod");
    }

    #[test]
    fn invalid_ec2_settings_are_refused_in_one_line() {
        let flag = |image: &str| Ec2Args {
            ec2_image: Some(image.to_owned()),
            ec2_instance_type: Some("t3.micro".to_owned()),
            ..Ec2Args::default()
        };
        assert_eq!(refused(&flag("")), "EC2 setting 'image' is empty");
        assert!(refused(&flag("ami\n")).contains("control characters"));
        assert!(refused(&flag(&"x".repeat(256))).contains("more than 255"));
        let half = Ec2Args { ec2_instance_type: None, ..flag("ami-1") };
        assert_eq!(refused(&half), "EC2 needs both an image and an instance type, or neither");
        let nowhere = Ec2Args { ec2_zookeeper: Some("zk:0".to_owned()), ..flag("ami-1") };
        assert!(refused(&nowhere).contains("not the address of a store"));
        assert!(flag("ami-1").refuse_all().unwrap_err().to_string().contains("--ec2-image"));
        assert!(Ec2Args::default().refuse_all().is_ok());
    }

    /// The address of a store with TLS has no CA of its own; that of the controller's store is
    /// used.
    #[test]
    fn the_token_in_user_data_names_the_ca_of_a_store_with_tls() {
        let key = PrivateKey::generate().unwrap();
        let ca = Authority::create("prod", &key, 1_800_000_000_000).unwrap();
        let own = store().with_ca(Some(ca.certificate()));
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ec2.yaml");
        std::fs::write(&path, "zookeeper: tls://zk1,zk2/prod\n").unwrap();
        let flag = Ec2Args { ec2_zookeeper: Some("tls://zk1,zk2/prod".to_owned()), ..Ec2Args::default() };
        let file = Ec2Args { ec2_settings: Some(path), ..Ec2Args::default() };
        for args in [flag, file] {
            let store = args.settings(&own).unwrap().store;
            let fingerprint = ca_fingerprint(&store).unwrap();
            let identity = || Credential::parse("nobody:secret").unwrap().identity();
            let roles = Roles { operator: identity(), controller: identity() };
            let boot = BootConfig::new("prod".parse().unwrap(), store, fingerprint, roles);
            let once = Credential::parse("join-machine-0000000007:hunter2").unwrap();
            let offer = LaunchOffer { machine: MachineId::new(7), once, expires_ms: 1_800_000_000_000 };
            let script = boot.user_data(&offer).reveal().to_owned();
            let token = script.lines().find(|line| line.starts_with("pj")).unwrap();
            let token: JoinToken = token.parse().unwrap();
            assert_eq!(token.store.to_string(), "tls://zk1:2181,zk2:2181/prod");
            let named = Certificate::parse(ca.certificate()).unwrap().fingerprint().to_string();
            assert_eq!(token.fingerprint, Some(named));
            // Without a CA there is no token that a machine can use.
            assert!(refused(&args).contains("no CA certificate to verify the store at zk1:2181,zk2:2181"));
        }
    }

    #[test]
    fn a_named_settings_file_is_used_or_refused() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ec2.yaml");
        let typed = Ec2Args { ec2_settings: Some(path.clone()), ..Ec2Args::default() };
        assert!(refused(&typed).ends_with("ec2.yaml does not exist"));
        for (text, part) in
            [("imgae: ami-1", "imgae"), ("[1]", "cannot use the settings"), ("image: [ami]", "cannot use")]
        {
            std::fs::write(&path, text).unwrap();
            assert!(refused(&typed).contains(part), "{}", refused(&typed));
        }
        std::fs::write(&path, b"\xff").unwrap();
        assert!(refused(&typed).contains("cannot use the settings in"));
        std::fs::write(&path, vec![b' '; MAX_BYTES + 1]).unwrap();
        assert!(refused(&typed).contains("more than 16384 bytes"));
    }
}
