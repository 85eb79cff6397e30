//! The command lines of the programs: `juju/` for the operator's client, `portcullis/` for the
//! daemon, `node/` for the commands that `juju` and `hirtectl` share, `args/` for shared flags.
//! Each command is a file that parses and checks its arguments and calls the parts below. Commands
//! do not define the layout of the tree, and no other part prints.

mod args;
mod authority;
mod completions;
mod config;
mod error;
mod file;
#[cfg(feature = "fleet")]
pub mod hirte_proxy;
pub mod hirtectl;
pub mod juju;
mod man;
// Without D-Bus the arguments are parsed, and the commands are refused.
#[cfg_attr(not(feature = "fleet"), allow(dead_code))]
mod node;
mod output;
pub mod portcullis;
mod start;
