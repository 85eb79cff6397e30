//! The two programs as their users see them: `juju` for the operator, `portcullis` for the daemon. Each command is a
//! file that turns what was typed into what it means, and that into calls of the parts below. No command decides
//! what the tree looks like, and nothing below prints.

mod accept_store;
mod add_machine;
mod add_unit;
mod adopt_groups;
mod bootstrap;
mod checkpoint_file;
mod completions;
mod config;
mod controller;
mod demo;
mod deploy;
mod destroy_environment;
mod destroy_service;
mod ec2;
mod expose;
mod failure;
mod file;
mod firewall;
mod firewall_log;
mod heartbeat;
mod heartbeat_role;
mod hook_env;
mod hook_user;
mod install;
pub mod juju;
mod keeper;
mod machine;
mod machine_file;
mod man;
mod metrics;
mod output;
pub mod portcullis;
mod remove_unit;
mod resolved;
mod run_hook;
mod settings;
mod start;
mod status;
mod terminate_machine;
mod tls_door;
mod unanswered;
mod unexpose;
mod unit_options;
mod up;
mod upkeep;
