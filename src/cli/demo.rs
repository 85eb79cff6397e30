//! `portcullis demo`: the whole story by itself, in a directory that is gone afterwards. It types what an operator
//! would type, and shows it; nothing of this user's own settings is read or written.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;

use super::config::ConfigDir;
use super::{hook_env, juju, output, up};
use crate::keeper::Config;
use crate::model::UnitName;
use crate::model::ports::parse_argument;
use crate::store::{UnitPorts, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {}

/// The charm of the story, in the binary, so that the demo needs no file beside it.
const CHARM: &[(&str, &str, u32)] = &[
    ("metadata.yaml", include_str!("../../fixtures/charms/wordpress/metadata.yaml"), 0o644),
    ("hooks/install", include_str!("../../fixtures/charms/wordpress/hooks/install"), 0o755),
    ("hooks/start", include_str!("../../fixtures/charms/wordpress/hooks/start"), 0o755),
    ("hooks/stop", include_str!("../../fixtures/charms/wordpress/hooks/stop"), 0o755),
];

pub(super) async fn run(_: &Typed) -> anyhow::Result<()> {
    let place = Place::make()?;
    let told = tell(&place).await;
    let removed =
        fs::remove_dir_all(&place.0).with_context(|| format!("cannot remove {}", place.0.display()));
    told.and(removed)
}

async fn tell(place: &Place) -> anyhow::Result<()> {
    say(&format!("# Everything is in {}, and gone at the end.", place.0.display()))?;
    let charm = place.charm()?;
    let data = place.0.join("data");
    say(&format!("$ portcullis up --data-dir {} --listen 127.0.0.1:0 &", data.display()))?;
    let story = juju::Story::new(place.config());
    let wanted = Config::new(data, (Ipv4Addr::LOCALHOST, 0).into());
    let keeper = up::start(story.globals(), &story.globals().environment()?, wanted).await?;
    super::keeper::announce(&keeper)?;
    story.juju(&["deploy", &charm.to_string_lossy()]).await?;
    open_port(&story, "wordpress/0", "80/tcp").await?;
    story.juju(&["status"]).await?;
    say("# The port is asked for, and closed to the world: the service is not exposed.")?;
    story.juju(&["expose", "wordpress"]).await?;
    story.juju(&["status", "wordpress"]).await?;
    story.juju(&["unexpose", "wordpress"]).await?;
    story.juju(&["status", "--format", "tabular"]).await?;
    say("# Done. `portcullis up` starts an environment that stays.")?;
    keeper.stop_handle().stop();
    tokio::task::spawn_blocking(move || keeper.wait()).await.context("the keeper's thread is gone")??;
    Ok(())
}

/// What the charm's hook does: with the tool itself, or the same through the store where it is not installed.
async fn open_port(story: &juju::Story, unit: &str, port: &str) -> anyhow::Result<()> {
    let name: UnitName = unit.parse()?;
    let tool = hook_env::tools_dir()?.join("open-port");
    let variables = story
        .globals()
        .in_environment(async |settings, environment| hook_env::prepare(settings, environment, &name).await)
        .await?;
    if tool.is_file() {
        say(&format!("$ eval \"$(juju hook-env {unit})\"; open-port {port}"))?;
        let status = std::process::Command::new(&tool).arg(port).envs(variables).status();
        return match status.with_context(|| format!("cannot run {}", tool.display()))? {
            status if status.success() => Ok(()),
            status => bail!("open-port ended with {status}"),
        };
    }
    say(&format!("# open-port is not beside this program; the same, with the credentials of {unit}:"))?;
    say(&format!("$ open-port {port}"))?;
    let (address, credential, id) = story
        .globals()
        .in_environment(async |settings, environment| {
            let (id, _) = environment.unit(&name).await?;
            Ok((settings.address.clone(), environment.unit_credential(&name).await?, id))
        })
        .await?;
    let tree = ZkTree::connect(&address, Some(&credential)).await?;
    UnitPorts::new(&tree, id).open(parse_argument(port)?).await?;
    tree.close().await;
    Ok(())
}

fn say(line: &str) -> anyhow::Result<()> {
    output::data(&format!("{line}\n")).context("cannot write to stdout")
}

/// The directory of the story.
struct Place(PathBuf);

impl Place {
    fn make() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("portcullis-demo-{}", std::process::id()));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    fn config(&self) -> ConfigDir {
        ConfigDir::below(&self.0.join("config"))
    }

    /// Writes the charm out.
    fn charm(&self) -> anyhow::Result<PathBuf> {
        let directory = self.0.join("wordpress");
        for (name, text, mode) in CHARM {
            let path = directory.join(name);
            write(&path, text, *mode).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(directory)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
