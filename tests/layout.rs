//! Holds the dependency rule of the crate: which part may name which other, where each outside library may be used,
//! and what pure files must not touch. It reads sources as tokens; comments and texts do not count.

use std::fs;
use std::path::{Path, PathBuf};

/// What each part of the library may name of the others; `*` stands for all.
const PARTS: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("runtime", &["model"]),
    ("net", &["model", "runtime"]),
    ("keeper", &["net"]),
    ("store", &["model", "runtime", "keeper"]),
    ("machine", &["model", "runtime", "store"]),
    ("firewall", &["model", "runtime", "store", "machine", "status"]),
    ("provision", &["model", "runtime", "store", "machine"]),
    ("unit", &["model", "runtime", "store"]),
    ("heartbeat", &["model", "runtime", "net", "store", "status"]),
    ("fleet", &["model", "runtime", "net", "store"]),
    ("ingress", &["model", "runtime", "net", "store"]),
    ("status", &["model", "runtime", "store"]),
    ("cli", &["*"]),
];

/// Where a name may stand at all. A name that ends in an underscore stands for all that begin with it, and one that
/// ends in `!` for a macro.
const HOMES: &[(&str, &[&str])] = &[
    ("zookeeper_client", &["src/store/zk.rs", "src/store/zk/"]),
    ("aws_", &["provider/src/ec2.rs", "provider/src/ec2/"]),
    ("zbus", &["src/fleet/"]),
    ("hyper", &["src/ingress/", "src/net/http/"]),
    ("hyper_util", &["src/ingress/", "src/net/http/", "provider/src/ec2/"]),
    ("http_body_util", &["src/ingress/", "src/net/http/"]),
    ("rustls", &["src/net/", "src/keeper/"]),
    ("tokio_rustls", &["src/net/"]),
    ("webpki", &["src/net/tls/peer.rs"]),
    ("rustls_native_certs", &["src/net/tls/client.rs"]),
    ("mio", &["src/keeper/"]),
    ("clap", &["src/cli/"]),
    ("clap_complete", &["src/cli/"]),
    ("clap_mangen", &["src/cli/"]),
    ("anyhow", &["src/cli/"]),
    ("tracing_subscriber", &["src/runtime/logging.rs"]),
    (
        "portcullis_provider",
        &["src/model/", "src/machine/", "src/firewall/", "src/provision/", "src/cli/", "provider/"],
    ),
    ("println!", &["src/cli/output.rs", "hooks/"]),
    ("print!", &["src/cli/output.rs", "hooks/"]),
    ("eprintln!", &["src/cli/output.rs", "hooks/"]),
    ("eprint!", &["src/cli/output.rs", "hooks/"]),
    (
        "stdout",
        &[
            "src/cli/portcullis/demo/network.rs",
            "src/cli/output.rs",
            "hooks/",
            "provider/src/nftables/run.rs",
            "src/unit/hook.rs",
            "src/unit/host.rs",
        ],
    ),
    ("unsafe", &[]),
];

/// Files and directories whose code decides and does nothing else.
const PURE: &[&str] = &[
    "src/model/",
    "src/keeper/acl.rs",
    "src/keeper/admission.rs",
    "src/keeper/events.rs",
    "src/keeper/identities.rs",
    "src/keeper/jute.rs",
    "src/keeper/path.rs",
    "src/keeper/proto.rs",
    "src/keeper/refusals.rs",
    "src/keeper/session.rs",
    "src/keeper/state.rs",
    "src/keeper/tree.rs",
    "src/keeper/txn.rs",
    "src/keeper/watch.rs",
    "src/firewall/capacity.rs",
    "src/firewall/change_log.rs",
    "src/firewall/controller/outcome.rs",
    "src/firewall/controller/state.rs",
    "src/firewall/explain.rs",
    "src/firewall/plan.rs",
    "src/firewall/policy.rs",
    "src/firewall/refusals.rs",
    "src/firewall/report.rs",
    "src/firewall/unit_index.rs",
    "src/firewall/status_section.rs",
    "src/firewall/machine_reports.rs",
    "src/firewall/wanted.rs",
    "src/machine/file.rs",
    "src/machine/retry.rs",
    "src/machine/systemd_unit.rs",
    "src/provision/plan.rs",
    "src/provision/user_data.rs",
    "src/heartbeat/api/beat_json.rs",
    "src/heartbeat/api/health.rs",
    "src/heartbeat/api/request.rs",
    "src/heartbeat/core/",
    "src/net/http/chunked.rs",
    "src/net/http/framing.rs",
    "src/net/tls/peer.rs",
    "src/net/url.rs",
    "src/runtime/confirm.rs",
    "src/runtime/ownership.rs",
    "src/store/acl.rs",
    "src/store/address.rs",
    "src/store/paths.rs",
    "src/store/records.rs",
    "src/status/glob.rs",
    "src/status/render/",
    "src/status/sections/",
    "src/status/view.rs",
    "src/unit/charm/metadata.rs",
    "src/unit/limits.rs",
    "src/unit/charm/archive.rs",
    "src/unit/roster.rs",
    "src/unit/workflow.rs",
    "provider/src/ec2/naming.rs",
    "provider/src/ec2/permission.rs",
    "provider/src/ec2/error_codes.rs",
    "provider/src/rule.rs",
    "provider/src/rule/",
    "provider/src/memory/",
    "provider/src/nftables/parse.rs",
    "provider/src/nftables/render.rs",
    "provider/src/nftables/table.rs",
];

/// What pure code has no use for.
const IMPURE: &[&str] = &[
    "async",
    "await",
    "tokio",
    "tracing",
    "fs",
    "TcpStream",
    "TcpListener",
    "Instant",
    "SystemTime",
    "thread",
    "env",
    "getrandom",
];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    /// `::`
    Path,
    Mark(char),
}

impl Token {
    fn is(&self, mark: char) -> bool {
        *self == Self::Mark(mark)
    }

    fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }
}

/// The words and marks of a source, without comments, texts, characters and numbers.
fn tokens(source: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let taken = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = text_length(rest) {
            length
        } else if c == '_' || c.is_alphabetic() {
            let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            found.push(Token::Word(rest[..length].to_owned()));
            length
        } else if c.is_ascii_digit() {
            rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            found.push(Token::Path);
            2
        } else {
            if !c.is_whitespace() {
                found.push(Token::Mark(c));
            }
            c.len_utf8()
        };
        rest = &rest[taken..];
    }
    found
}

/// The length of the string or character that `rest` begins with, if it does.
fn text_length(rest: &str) -> Option<usize> {
    let body =
        rest.strip_prefix(['b', 'c']).filter(|body| body.starts_with(['"', 'r', '\''])).unwrap_or(rest);
    let before = rest.len() - body.len();
    if let Some(raw) = body.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let inner = raw[hashes..].strip_prefix('"')?;
        let close = format!("\"{}", "#".repeat(hashes));
        return Some(before + 1 + hashes + 1 + inner.find(&close)? + close.len());
    }
    let quote = body.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let mut escaped = false;
    for (at, c) in body.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(before + at + 1),
            // A lifetime, not a character.
            _ if quote == '\'' && at > 1 && !body.starts_with("'\\") => return None,
            _ => {}
        }
    }
    None
}

/// The parts of this crate that the tokens name, through `crate::`, or through `super::` beyond the part's own root.
fn named_parts(path: &str, tokens: &[Token]) -> Vec<String> {
    let inside = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let depth = inside.split('/').count();
    let mut named = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let starts = at == 0 || tokens[at - 1] != Token::Path;
        let ups = tokens[at..]
            .chunks(2)
            .take_while(|pair| **pair == [Token::Word("super".into()), Token::Path])
            .count();
        let from_root = match token.word() {
            Some("crate") if tokens.get(at + 1) == Some(&Token::Path) => at + 2,
            Some("super") if starts && ups >= depth => at + 2 * ups,
            _ => continue,
        };
        named.extend(first_words(&tokens[from_root..]));
    }
    named.retain(|name| PARTS.iter().any(|(part, _)| part == name));
    named
}

/// What a path goes on with: one word, or the first word of each branch of a group.
fn first_words(tokens: &[Token]) -> Vec<String> {
    match tokens.first() {
        Some(Token::Word(word)) => vec![word.clone()],
        Some(open) if open.is('{') => {
            let (mut depth, mut begins, mut words) = (0, false, Vec::new());
            for token in tokens {
                match token {
                    Token::Mark('{') => depth += 1,
                    Token::Mark('}') => depth -= 1,
                    Token::Word(word) if begins && depth == 1 => words.push(word.clone()),
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
                begins = depth == 1 && (token.is('{') || token.is(','));
            }
            words
        }
        _ => Vec::new(),
    }
}

/// Everything in one source that breaks a rule.
fn violations(path: &str, source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let mut found = Vec::new();
    let part = path.strip_prefix("src/").and_then(|inside| inside.split('/').next()).unwrap_or_default();
    if let Some((_, allowed)) = PARTS.iter().find(|(name, _)| *name == part) {
        // Other parts fill sections of status, and name nothing else of it.
        let filled = source.matches("crate::status::sections").count();
        let named = named_parts(path, &tokens);
        let is_section = named.iter().filter(|named| *named == "status").count() == filled;
        for named in named {
            let is_allowed = allowed.contains(&named.as_str()) && (named != "status" || is_section);
            if named != part && !allowed.contains(&"*") && !is_allowed {
                found.push(format!("{path}: {part} must not name {named}"));
            }
        }
    } else if path.starts_with("src/") && path != "src/lib.rs" && part != "bin" {
        found.push(format!("{path}: {part} is no part that the table knows"));
    }
    for (at, token) in tokens.iter().enumerate() {
        let Some(word) = token.word() else { continue };
        let called = tokens.get(at + 1).is_some_and(|next| next.is('!'));
        for (name, homes) in HOMES {
            let stands = match (name.strip_suffix('!'), name.ends_with('_')) {
                (Some(name), _) => called && word == name,
                (None, true) => word.starts_with(name),
                (None, false) => word == *name,
            };
            if stands && !homes.iter().any(|home| path.starts_with(home)) {
                found.push(format!("{path}: {name} belongs to {homes:?}"));
            }
        }
        // The variants of `store::tree::Write` and its constructor.
        let step = tokens.get(at + 2).and_then(Token::word).is_some_and(|word| {
            ["create", "Create", "SetIfVersion", "DeleteIfVersion", "Delete", "Check"].contains(&word)
        });
        if word == "Write" && step && !path.starts_with("src/store/") {
            found.push(format!("{path}: znodes are written in src/store/ only"));
        }
        if PURE.iter().any(|pure| path.starts_with(pure)) && IMPURE.contains(&word) {
            found.push(format!("{path}: {word} has no place in a pure file"));
        }
    }
    found.dedup();
    found
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Tests may look at anything they like; the rules are for what is shipped.
fn without_tests(source: &str) -> &str {
    source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(source)
}

#[test]
fn every_source_keeps_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for directory in ["src", "hooks/src", "provider/src"] {
        sources(&root.join(directory), &mut files);
    }
    assert!(files.len() > 40, "only {} sources found", files.len());
    let broken: Vec<String> = files
        .iter()
        .filter(|file| !file.to_string_lossy().ends_with("tests.rs"))
        .flat_map(|file| {
            let path = file.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
            violations(&path, without_tests(&fs::read_to_string(file).expect("a source")))
        })
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_source_says_what_it_is_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for directory in ["src", "hooks/src", "provider/src", "tests"] {
        sources(&root.join(directory), &mut files);
    }
    let silent: Vec<_> = files
        .iter()
        .filter(|file| !fs::read_to_string(file).expect("a source").starts_with("//! "))
        .collect();
    assert!(silent.is_empty(), "no opening paragraph in {silent:?}");
}

#[test]
fn each_rule_catches_what_breaks_it() {
    for (path, source, expected) in [
        ("src/model/name.rs", "use crate::store::Tree;", "model must not name store"),
        ("src/model/mod.rs", "use super::store::Tree;", "model must not name store"),
        ("src/model/name.rs", "fn f() { super::super::store::g() }", "model must not name store"),
        ("src/keeper/tree.rs", "use crate::{model::UnitId, cli};", "keeper must not name model"),
        ("src/keeper/tree.rs", "use crate::{keeper::{a, model}, cli};", "keeper must not name cli"),
        ("src/runtime/clock.rs", "fn f() -> crate::store::Error {}", "runtime must not name store"),
        ("src/runtime/clock.rs", "use crate::net::http;", "runtime must not name net"),
        ("src/net/http/server.rs", "use crate::store::Tree;", "net must not name store"),
        ("src/firewall/leader_loop.rs", "use crate::net::http;", "firewall must not name net"),
        ("src/store/zk.rs", "use crate::cli::output;", "store must not name cli"),
        ("src/firewall/plan.rs", "use crate::status::View;", "firewall must not name status"),
        ("src/firewall/leader_loop.rs", "use crate::provision::plan;", "firewall must not name provision"),
        ("src/provision/apply.rs", "use crate::firewall::plan;", "provision must not name firewall"),
        ("src/machine/presence.rs", "use crate::firewall::controller;", "machine must not name firewall"),
        ("src/unit/agent.rs", "use crate::keeper::Server;", "unit must not name keeper"),
        ("src/heartbeat/api.rs", "use crate::fleet;", "heartbeat must not name fleet"),
        ("src/fleet/agent.rs", "use crate::unit;", "fleet must not name unit"),
        ("src/ingress/scaler.rs", "use crate::fleet::Job;", "ingress must not name fleet"),
        ("src/status/view.rs", "use crate::cli::output;", "status must not name cli"),
        ("src/firewall/plan.rs", "use crate::{model, status};", "firewall must not name status"),
        ("src/newpart/mod.rs", "", "newpart is no part"),
        ("src/store/tree.rs", "use zookeeper_client as zk;", "zookeeper_client belongs to"),
        (
            "src/cli/up.rs",
            "fn f() { let c = zookeeper_client::Client::connector(); }",
            "zookeeper_client belongs",
        ),
        ("src/firewall/apply.rs", "use aws_sdk_ec2::Client;", "aws_ belongs to"),
        ("src/cli/up.rs", "use zbus::Connection;", "zbus belongs to"),
        ("src/cli/up.rs", "use hyper::Request;", "hyper belongs to"),
        ("src/heartbeat/api.rs", "use hyper_util::rt::TokioIo;", "hyper_util belongs to"),
        ("src/heartbeat/api.rs", "use http_body_util::Full;", "http_body_util belongs to"),
        ("src/store/zk.rs", "use mio::Poll;", "mio belongs to"),
        ("src/store/zk.rs", "use clap::Parser;", "clap belongs to"),
        ("hooks/src/lib.rs", "use clap_complete::Shell;", "clap_complete belongs to"),
        ("hooks/src/lib.rs", "use clap_mangen::Man;", "clap_mangen belongs to"),
        ("src/store/zk.rs", "fn f() -> anyhow::Result<()> {}", "anyhow belongs to"),
        ("src/cli/juju.rs", "use tracing_subscriber::fmt;", "tracing_subscriber belongs to"),
        ("src/store/zk.rs", "use portcullis_provider::rule::PortRange;", "portcullis_provider belongs to"),
        ("src/cli/status.rs", "fn f() { println!(\"x\"); }", "println! belongs to"),
        ("src/cli/status.rs", "fn f() { print!(\"x\"); }", "print! belongs to"),
        ("src/store/zk.rs", "fn f() { eprintln!(\"x\"); }", "eprintln! belongs to"),
        ("src/store/zk.rs", "fn f() { std::eprint!(\"x\"); }", "eprint! belongs to"),
        ("src/cli/status.rs", "fn f() { std::io::stdout(); }", "stdout belongs to"),
        ("src/cli/output.rs", "fn f() { unsafe { g() } }", "unsafe belongs to"),
        ("src/unit/agent.rs", "fn f() { Write::create(path, data, acl); }", "znodes are written in"),
        ("src/status/view.rs", "async fn f() {}", "async has no place"),
        ("src/unit/charm/metadata.rs", "use std::fs;", "fs has no place"),
        ("src/keeper/tree.rs", "fn f() { Instant::now(); }", "Instant has no place"),
        ("src/model/ports.rs", "use tracing::info;", "tracing has no place"),
        ("src/status/render/yaml.rs", "/* a */ use tokio::sync;", "tokio has no place"),
    ] {
        let found = violations(path, source);
        assert!(found.iter().any(|violation| violation.contains(expected)), "{path} {source}: {found:?}");
    }
}

#[test]
fn what_keeps_the_rules_is_left_alone() {
    for (path, source) in [
        ("src/store/zk.rs", "use crate::{model::UnitId, runtime, keeper};\nuse zookeeper_client as zk;"),
        ("src/store/zk.rs", "// crate::cli, anyhow::Result\n/* crate::cli */ fn f() {}"),
        ("src/store/zk.rs", "const A: &str = \"crate::cli \\\" anyhow\"; const B: &str = r#\"anyhow \" \"#;"),
        (
            "src/store/zk.rs",
            "fn f<'a>(c: char) -> &'a str { match c { '\"' => \"anyhow\", '\\'' => \"\", _ => \"\" } }",
        ),
        ("src/store/zk.rs", "use super::tree::Error; use super::super::model;"),
        ("src/firewall/status_section.rs", "use crate::status::sections::Firewall;"),
        ("src/store/mod.rs", "mod cli_like; pub use records::cli;"),
        ("src/cli/output.rs", "fn f() { println!(\"x\"); }"),
        ("hooks/src/lib.rs", "fn f() { eprintln!(\"x\"); }"),
        ("src/status/view.rs", "fn f() { let b = b\"async\"; }"),
    ] {
        assert_eq!(violations(path, source), Vec::<String>::new(), "{path} {source}");
    }
}

/// The longest line, in columns, and the longest file, in lines.
const MAX_COLUMNS: usize = 110;
const MAX_LINES: usize = 500;

/// Lines and files that are still longer. Lower these numbers when fewer are left; never raise them.
const LONG_LINES_LEFT: usize = 1032;
const LONG_FILES_LEFT: usize = 1;

#[test]
fn lines_and_files_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for directory in ["src", "hooks", "provider", "tests", "benches"] {
        sources(&root.join(directory), &mut files);
    }
    let (mut long_lines, mut long_files) = (Vec::new(), Vec::new());
    for file in files {
        let path = file.strip_prefix(root).expect("below the root").display().to_string();
        let text = fs::read_to_string(&file).expect("a source");
        let long = text.lines().enumerate().filter(|(_, line)| line.chars().count() > MAX_COLUMNS);
        long_lines.extend(long.map(|(number, _)| format!("{path}:{}", number + 1)));
        if text.lines().count() > MAX_LINES {
            long_files.push(path);
        }
    }
    assert!(long_lines.len() <= LONG_LINES_LEFT, "{} long lines: {long_lines:#?}", long_lines.len());
    assert!(long_files.len() <= LONG_FILES_LEFT, "{long_files:#?}");
}
