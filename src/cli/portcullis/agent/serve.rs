//! Runs the standalone agent of a node: reads its options and its file, and starts
//! `fleet::agent`.

use std::path::Path;

use anyhow::Context as _;
use futures_util::FutureExt as _;
use tokio::sync::watch;

use super::Args;
use crate::cli::args::agent::{agents_dir, part_of, proxies_file};
use crate::cli::error::{Usage, parse_arg};
use crate::fleet::address::ManagerAddress;
use crate::fleet::agent::{Agent, Settings};
use crate::fleet::config::AgentFile;
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::connect::Security;
use crate::fleet::ini::MAX_BYTES;
use crate::fleet::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use crate::fleet::systemd::Systemd;
use crate::net::tls::{ClientFiles, ClientTls, IdentityFiles};
use crate::runtime::service::{OnEnd, Service};
use crate::runtime::trusted_file;

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let settings = settings(args)?;
    let (control, events) = Systemd::connect(Bus::parse(&args.bus));
    let file = proxies_file(args.state_dir.clone().or_else(agents_dir), &settings.name);
    let agent = Agent::new(settings, control, events).with_proxies(Bus::parse(&args.bus), file);
    service.start("agent", OnEnd::StopOthers, |stop| agent.run(stop).map(Ok));
    service.run().await
}

/// Combines the options and the file. Invalid values are errors of usage.
fn settings(args: &Args) -> anyhow::Result<Settings> {
    let file = args.config.as_deref().map(read_file).transpose()?.unwrap_or_default();
    let name = match &args.name {
        Some(name) => parse_arg(name)?,
        None => file.name.ok_or_else(|| Usage::new("no name of the node: give --name or set NodeName"))?,
    };
    let mut managers: Vec<ManagerAddress> =
        args.manager.iter().map(|address| parse_arg(address)).collect::<Result<_, _>>()?;
    if managers.is_empty() {
        let address = file.manager;
        managers.push(address.ok_or_else(|| Usage::new("no manager: give --manager or set ManagerHost"))?);
    }
    let security = security(args)?;
    if let Some(remote) = managers.iter().find(|address| !address.is_local())
        && matches!(security, Security::Plain)
        && !args.allow_plain_tcp
    {
        let problem = format!("{remote} is another host: give --tls-cert, or --allow-plain-tcp");
        return Err(Usage::new(problem).into());
    }
    Ok(Settings {
        name,
        // The list of a standalone agent never changes.
        managers: watch::channel(managers).1,
        security,
        heartbeat_interval: file.heartbeat_interval.unwrap_or(HEARTBEAT_INTERVAL),
        silence_limit: file.silence_limit.unwrap_or(SILENCE_LIMIT),
        jitter: part_of,
    })
}

fn security(args: &Args) -> anyhow::Result<Security> {
    let (Some(certificates), Some(key)) = (&args.tls_cert, &args.tls_key) else {
        return Ok(Security::Plain);
    };
    let identity = IdentityFiles { certificates: certificates.clone(), key: key.clone() };
    let ca = args.ca_file.clone();
    let files = ClientFiles { ca, identity: Some(identity), ..ClientFiles::default() };
    let tls = ClientTls::load(files)?;
    Ok(Security::Tls { tls, server_name: args.manager_name.clone() })
}

fn read_file(path: &Path) -> anyhow::Result<AgentFile> {
    let bytes = trusted_file::read_trusted(path, MAX_BYTES)?;
    let bytes = bytes.ok_or_else(|| Usage::new(format!("{} does not exist", path.display())))?;
    let text = String::from_utf8(bytes);
    let text = text.map_err(|_| Usage::new(format!("{} is not UTF-8", path.display())))?;
    let file = AgentFile::read(&text);
    Ok(file.map_err(|error| Usage::new(format!("{}: {error}", path.display())))?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &[&str]) -> anyhow::Result<Settings> {
        settings(&Line::try_parse_from([&["agent"], line].concat())?.args)
    }

    #[test]
    fn plain_tcp_to_another_host_needs_a_flag() {
        let to = |address: &'static str| ["--name", "n1", "--manager", address];
        for local in ["127.0.0.1:842", "localhost", "[::1]:842", "unix:/run/manager"] {
            parse(&to(local)).unwrap();
        }
        for remote in ["192.0.2.1:842", "127.0.0.1:842,manager.example"] {
            let refused = parse(&to(remote)).unwrap_err().to_string();
            assert!(refused.contains("is another host: give --tls-cert"), "{refused}");
            parse(&[&to(remote)[..], &["--allow-plain-tcp"]].concat()).unwrap();
        }
    }

    #[test]
    fn options_take_precedence_over_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let text = "[hirte-agent]\nNodeName=n1\nManagerHost=127.0.0.1\nHeartbeatInterval=500\n";
        std::fs::write(file.path(), text).unwrap();
        let from_file = parse(&["--config", path]).unwrap();
        assert_eq!(from_file.name.as_str(), "n1");
        assert_eq!(from_file.managers.borrow()[0].to_string(), "127.0.0.1:842");
        assert_eq!(from_file.heartbeat_interval, Duration::from_millis(500));
        let options = ["--config", path, "--name", "n2", "--manager", "127.0.0.1:1,127.0.0.1:2"];
        let with_options = parse(&options).unwrap();
        assert_eq!(with_options.name.as_str(), "n2");
        assert_eq!(with_options.managers.borrow().len(), 2);
        std::fs::write(file.path(), "[hirte-agent]\nNodeName=n_1\n").unwrap();
        let refused = parse(&["--config", path]).unwrap_err().to_string();
        assert!(refused.contains(path) && refused.contains('2'), "{refused}");
        std::fs::write(file.path(), "[hirte-agent]\nNodeName=n1\n").unwrap();
        assert!(parse(&["--config", path]).unwrap_err().to_string().contains("no manager"));
    }
}
