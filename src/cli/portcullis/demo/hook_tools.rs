//! The hook tools that the demo's charm calls, and the helper of proxy services. `cargo demo`
//! builds the program that it runs and no other, so that program asks cargo to build these.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::cli::error::Refusal;
use crate::cli::juju::hook_env;

/// The arguments of cargo for the hook tools, and for the helper, which has the features of the
/// demo.
const HOOK_TOOLS: [&str; 3] = ["--package", "portcullis-hooks", "--bins"];
const HELPER: [&str; 7] =
    ["--package", "portcullis", "--no-default-features", "--features", "fleet", "--bin", "hirte-proxy"];
const TOOLS: [&str; 3] = ["open-port", "close-port", "opened-ports"];

/// Builds the tools if cargo runs this program, and checks that they are in the same directory.
/// Cargo writes its progress to stderr.
pub(super) fn ensure() -> anyhow::Result<()> {
    let directory = hook_env::tools_dir()?;
    let variables = ["CARGO", "CARGO_MANIFEST_DIR"].map(std::env::var_os);
    for what in [&HOOK_TOOLS[..], &HELPER] {
        if let Some(mut cargo) = build_command(&directory, variables.clone(), what) {
            let status = cargo.status().context("cannot start cargo")?;
            if !status.success() {
                bail!("cargo did not build the hook tools: {status}");
            }
        }
    }
    if TOOLS.iter().all(|tool| directory.join(tool).is_file()) {
        return Ok(());
    }
    Err(Refusal::NoHookTools { directory }.into())
}

/// The tools are built with the same profile into the same target directory, both derived from the
/// path of this program. The variables are set by `cargo run`.
fn build_command(
    directory: &Path,
    [cargo, manifest]: [Option<OsString>; 2],
    what: &[&str],
) -> Option<Command> {
    let manifest = PathBuf::from(manifest?);
    if !manifest.join("hooks/Cargo.toml").is_file() {
        return None;
    }
    let profile = match directory.file_name()?.to_str()? {
        "debug" => "dev",
        other => other,
    };
    let mut command = Command::new(cargo?);
    command.arg("build").args(what).arg("--manifest-path");
    command.arg(manifest.join("Cargo.toml"));
    command.args(["--profile", profile, "--target-dir"]).arg(directory.parent()?);
    Some(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hook_tools_are_built_with_the_same_profile() {
        let arguments = |directory: &str, manifest: &str| {
            let variables = [Some("cargo".into()), Some(manifest.into())];
            let command = build_command(Path::new(directory), variables, &HOOK_TOOLS)?;
            Some(
                command
                    .get_args()
                    .map(|word| word.to_string_lossy().into_owned())
                    .collect::<Vec<_>>()
                    .join(" "),
            )
        };
        let own = env!("CARGO_MANIFEST_DIR");
        let start =
            format!("build --package portcullis-hooks --bins --manifest-path {own}/Cargo.toml --profile ");
        assert_eq!(arguments("/t/debug", own), Some(format!("{start}dev --target-dir /t")));
        assert_eq!(arguments("/t/release", own), Some(format!("{start}release --target-dir /t")));
        assert_eq!(arguments("/t/debug", "/"), None, "another project's manifest");
        assert!(build_command(Path::new("/t/debug"), [None, None], &HELPER).is_none(), "run without cargo");
    }
}
