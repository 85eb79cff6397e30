//! The command lines of both programs: `juju/` for the operator's client, `portcullis/` for the
//! daemon, `args/` for flags that they share. Each command is a file that parses and checks its
//! arguments and calls the parts below. Commands do not define the layout of the tree, and no other
//! part prints.

mod args;
mod completions;
mod config;
mod error;
mod file;
pub mod juju;
mod man;
mod output;
pub mod portcullis;
mod start;
