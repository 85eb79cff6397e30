//! How the controller is told about EC2: flags, or the same keys in a file. Region, credentials and endpoint come from where
//! every AWS program has them. Nothing is launched or looked at here.

#![cfg_attr(
    not(feature = "ec2"),
    allow(dead_code, reason = "it is understood, and then there is nobody to tell")
)]

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde::Deserialize;

use super::failure::{Refusal, Usage};
use super::file;
use crate::store::Address;

const MAX_BYTES: usize = 16 * 1024;

/// EC2's own names have at most this many characters.
const VALUE_MAX: usize = 255;

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "EC2")]
pub(super) struct Flags {
    /// Image that machines are launched from; `portcullis` must be on it
    #[arg(long, value_name = "AMI")]
    ec2_image: Option<String>,
    /// Type of the instances
    #[arg(long, value_name = "TYPE")]
    ec2_instance_type: Option<String>,
    /// Subnet for them [default: one of the default VPC]
    #[arg(long, value_name = "ID")]
    ec2_subnet: Option<String>,
    /// Key pair for ssh [default: none]
    #[arg(long, value_name = "NAME")]
    ec2_key: Option<String>,
    /// The store as machines reach it [default: as the controller does]
    #[arg(long, value_name = "HOSTS")]
    ec2_zookeeper: Option<String>,
    /// The same in YAML: image, instance-type, subnet, key, zookeeper. Flags come before it
    #[arg(long, value_name = "FILE")]
    ec2_settings: Option<PathBuf>,
}

/// The keys, as they are written in a file and as flags give them.
#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Keys {
    image: Option<String>,
    instance_type: Option<String>,
    subnet: Option<String>,
    key: Option<String>,
    zookeeper: Option<String>,
}

/// What it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// Without it no machine can be launched, only adopted.
    pub(super) launch: Option<Launch>,
    /// The store as machines reach it.
    pub(super) store: Address,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Launch {
    pub(super) image: String,
    pub(super) instance_type: String,
    pub(super) subnet: Option<String>,
    pub(super) key: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("EC2's {key} is empty")]
    Empty { key: &'static str },
    #[error("EC2's {key} has more than {VALUE_MAX} characters, or such as cannot be seen")]
    NoName { key: &'static str },
    #[error("EC2 needs an image and an instance type, or neither")]
    Half,
    #[error("{given} belongs to EC2, and the provider is another one")]
    OtherProvider { given: &'static str },
}

impl Flags {
    /// For a provider that has no use for any of it.
    pub(super) fn refuse_all(&self) -> Result<(), Usage> {
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

    /// `store` is how the controller itself reaches it.
    pub(super) fn settings(&self, store: &Address) -> anyhow::Result<Settings> {
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
    let bytes = file::read_trusted(path, MAX_BYTES)?
        .ok_or_else(|| Refusal::NoEc2Settings { path: path.to_owned() })?;
    let wrong = || format!("cannot use the settings in {}", path.display());
    let text = std::str::from_utf8(&bytes).with_context(wrong)?;
    let one_line = |error: serde_saphyr::Error| {
        let text = error.to_string();
        anyhow::Error::msg(text.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    serde_saphyr::from_str(text).map_err(one_line).with_context(wrong)
}

fn meant(keys: Keys, store: &Address) -> anyhow::Result<Settings> {
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
        Some(hosts) => hosts.parse().map_err(Usage::new)?,
        None => store.clone(),
    };
    Ok(Settings { launch, store })
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

/// The driver for the environment of an opened store, with region and credentials that were found before.
#[cfg(feature = "ec2")]
pub(super) fn connect(
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
    Ok(ec2::Ec2::connect(ec2::Settings { launch, ..ec2::Settings::new(environment) }, access)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Address {
        "127.0.0.1:2181/prod".parse().unwrap()
    }

    fn refused(typed: &Flags) -> String {
        let text = format!("{:#}", typed.settings(&store()).unwrap_err());
        assert!(!text.contains('\n'), "{text}");
        text
    }

    #[test]
    fn flags_come_before_the_file_and_both_may_be_left_out() {
        let none = Flags::default().settings(&store()).unwrap();
        assert_eq!(none, Settings { launch: None, store: store() });
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ec2.yaml");
        std::fs::write(&path, "image: ami-1\ninstance-type: t3.micro\nkey: mine\nzookeeper: zk1,zk2/prod\n")
            .unwrap();
        let typed = Flags {
            ec2_image: Some("ami-2".to_owned()),
            ec2_subnet: Some("subnet-1".to_owned()),
            ec2_settings: Some(path),
            ..Flags::default()
        };
        let settings = typed.settings(&store()).unwrap();
        let launch = settings.launch.unwrap();
        assert_eq!((launch.image.as_str(), launch.instance_type.as_str()), ("ami-2", "t3.micro"));
        assert_eq!((launch.subnet.as_deref(), launch.key.as_deref()), (Some("subnet-1"), Some("mine")));
        assert_eq!(settings.store.to_string(), "zk1:2181,zk2:2181/prod");
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_one_line() {
        let flag = |image: &str| Flags {
            ec2_image: Some(image.to_owned()),
            ec2_instance_type: Some("t3.micro".to_owned()),
            ..Flags::default()
        };
        assert_eq!(refused(&flag("")), "EC2's image is empty");
        assert!(refused(&flag("ami\n")).contains("cannot be seen"));
        assert!(refused(&flag(&"x".repeat(256))).contains("more than 255"));
        let half = Flags { ec2_instance_type: None, ..flag("ami-1") };
        assert_eq!(refused(&half), "EC2 needs an image and an instance type, or neither");
        let nowhere = Flags { ec2_zookeeper: Some("zk:0".to_owned()), ..flag("ami-1") };
        assert!(refused(&nowhere).contains("not the address of a store"));
        assert!(flag("ami-1").refuse_all().unwrap_err().to_string().contains("--ec2-image"));
        assert!(Flags::default().refuse_all().is_ok());
    }

    #[test]
    fn a_file_that_was_named_is_used_or_refused() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("ec2.yaml");
        let typed = Flags { ec2_settings: Some(path.clone()), ..Flags::default() };
        assert!(refused(&typed).ends_with("ec2.yaml do not exist"));
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
