//! `juju status`: one look at the environment, shown or written to a file.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};

use super::settings::Globals;
use super::{file, output};
use crate::status::render::{json, tabular, yaml};
use crate::status::{Scope, View, collect};

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Services, or units if it has a slash; `*`, `?` and `[..]` are patterns
    #[arg(value_name = "SCOPE")]
    scopes: Vec<String>,
    /// How to show it
    #[arg(long, value_enum, default_value_t = Format::Yaml)]
    format: Format,
    /// Write to FILE instead, whole or not at all
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Yaml,
    Json,
    Tabular,
}

pub(super) async fn run(globals: &Globals, args: &Typed) -> anyhow::Result<()> {
    let snapshot =
        globals.in_environment(async |_, environment| Ok(collect(environment.tree()).await?)).await?;
    let view = View::new(&snapshot, &Scope::new(args.scopes.iter().map(String::as_str)));
    let text = match args.format {
        Format::Yaml => yaml::render(&view.document()),
        Format::Json => json::render(&view.document()),
        Format::Tabular => tabular::render(&view),
    };
    match &args.output {
        None => output::data(&text).context("cannot write to stdout"),
        Some(path) => file::write_output(path, text.as_bytes())
            .with_context(|| format!("cannot write {}", path.display())),
    }
}
