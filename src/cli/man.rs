//! `man` of both programs: the manual pages, generated from their command definitions.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Command;
use clap_mangen::Man;

use super::output;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Write a page for each command to DIR [default: print the program's own page to stdout]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

pub(super) fn run(program: Command, args: &Args) -> anyhow::Result<()> {
    if let Some(directory) = &args.output {
        return std::fs::create_dir_all(directory)
            .and_then(|()| clap_mangen::generate_to(program, directory))
            .with_context(|| format!("cannot write to {}", directory.display()));
    }
    let mut page = Vec::new();
    Man::new(program).render(&mut page).context("cannot make the page")?;
    let page = String::from_utf8(page).context("the page is not text")?;
    output::data(&page).context("cannot write to stdout")
}
