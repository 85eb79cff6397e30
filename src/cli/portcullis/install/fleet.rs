//! The options of `portcullis install` for managers and agents of nodes, and the arguments of their
//! services.

use std::path::PathBuf;

use super::{absolute, quoted};
use crate::cli::error::Usage;
use crate::model::EnvironmentName;

/// The certificates of a manager with a file, or of an agent without an environment.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct TlsFiles {
    /// Certificate chain (PEM) of a manager with --config, or of an agent
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "ca_file"])]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// CA (PEM) of the certificates of the other side: of agents and operators, or of the manager
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    ca_file: Option<PathBuf>,
    /// Name in the certificate of an agent's manager [default: the host of its address]
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    manager_name: Option<String>,
}

impl TlsFiles {
    pub(super) fn is_given(&self) -> bool {
        self.tls_cert.is_some()
    }

    /// Returns the arguments for a service. `ca` is its name of the option for the CA.
    fn arguments(&self, ca: &str) -> anyhow::Result<String> {
        let (Some(cert), Some(key), Some(ca_file)) = (&self.tls_cert, &self.tls_key, &self.ca_file) else {
            return Ok(String::new());
        };
        let mut arguments = String::new();
        for (option, path) in [("--tls-cert", cert), ("--tls-key", key), (ca, ca_file)] {
            arguments.push_str(&format!(" {option} {}", quoted(&absolute(path)?)?));
        }
        Ok(arguments)
    }
}

/// The options of `install` that these services use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options<'a> {
    pub(super) config: Option<&'a PathBuf>,
    pub(super) tls: &'a TlsFiles,
    pub(super) user: bool,
    pub(super) bus_group: Option<&'a str>,
}

impl Options<'_> {
    fn bus(&self) -> &'static str {
        if self.user { "user" } else { "system" }
    }

    /// Returns the arguments of a manager: of the environment, or with a file.
    pub(super) fn manager(&self, environment: &EnvironmentName) -> anyhow::Result<String> {
        let nodes = match self.config {
            Some(config) => format!("--config {}", quoted(&absolute(config)?)?),
            None if self.tls.is_given() => {
                let text = "the environment issues the manager's certificate; --tls-cert requires --config";
                return Err(Usage::new(text).into());
            }
            None => format!("-e {environment}"),
        };
        if self.tls.manager_name.is_some() {
            return Err(Usage::new("--manager-name is for the role agent").into());
        }
        let group = self.bus_group.map_or_else(String::new, |group| format!(" --bus-group {group}"));
        let tls = self.tls.arguments("--client-ca")?;
        Ok(format!("manager {nodes} --bus {}{group}{tls}", self.bus()))
    }

    /// Returns the arguments of an agent without an environment.
    pub(super) fn agent(&self) -> anyhow::Result<String> {
        let config = match self.config {
            Some(config) => quoted(&absolute(config)?)?,
            // systemd replaces %E with the directory of configuration files.
            None => "%E/portcullis/agent.conf".to_owned(),
        };
        let mut tls = self.tls.arguments("--ca-file")?;
        if let Some(name) = &self.tls.manager_name {
            super::check_name("manager", name)?;
            tls.push_str(&format!(" --manager-name {name}"));
        }
        Ok(format!("agent --config {config} --bus {}{tls}", self.bus()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_nodes_name_their_certificates() {
        let prod: EnvironmentName = "prod".parse().unwrap();
        let file = |name: &str| Some(PathBuf::from(name));
        let tls = TlsFiles {
            tls_cert: file("/c/n1.pem"),
            tls_key: file("/c/n1.key"),
            ca_file: file("/c/ca.pem"),
            manager_name: Some("m.example".to_owned()),
        };
        let (none, config) = (TlsFiles::default(), PathBuf::from("/c/m.conf"));
        let options = Options { config: None, tls: &none, user: false, bus_group: Some("ops") };
        assert_eq!(options.manager(&prod).unwrap(), "manager -e prod --bus system --bus-group ops");
        let files = " \"/c/n1.pem\" --tls-key \"/c/n1.key\"";
        let of_manager = TlsFiles { manager_name: None, ..tls.clone() };
        let with_file = Options { config: Some(&config), tls: &of_manager, user: true, bus_group: None };
        assert_eq!(
            with_file.manager(&prod).unwrap(),
            format!("manager --config \"/c/m.conf\" --bus user --tls-cert{files} --client-ca \"/c/ca.pem\"")
        );
        let named = Options { tls: &tls, ..with_file };
        assert!(named.manager(&prod).unwrap_err().to_string().contains("for the role agent"));
        let agent = Options { config: None, tls: &tls, user: false, bus_group: None };
        assert_eq!(
            agent.agent().unwrap(),
            format!(
                "agent --config %E/portcullis/agent.conf --bus system --tls-cert{files} --ca-file \
                 \"/c/ca.pem\" --manager-name m.example"
            )
        );
        assert!(agent.manager(&prod).unwrap_err().to_string().contains("requires --config"));
    }
}
