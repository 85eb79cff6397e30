//! Rules for the sources: which part may use which other, where each library may be used, what pure
//! files may not use, and how long files and lines may be. Dependencies are found in the tokens of
//! a source; comments and string literals do not count.

use std::fs;
use std::path::{Path, PathBuf};

/// The parts of the library that each part may use; `*` stands for all.
const PARTS: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("runtime", &["model"]),
    ("net", &["model", "runtime"]),
    ("keeper", &["net"]),
    ("store", &["model", "runtime", "net", "keeper"]),
    ("identity", &["model", "runtime", "net", "store"]),
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

/// The only files and directories that may use a name. A name that ends in an underscore stands for
/// all names that begin with it, and a name that ends in `!` for a macro.
const ALLOWED_IN: &[(&str, &[&str])] = &[
    ("zookeeper_client", &["src/store/zk.rs", "src/store/zk/"]),
    ("aws_config", &["provider/src/ec2.rs", "provider/src/ec2/"]),
    ("aws_credential_", &["provider/src/ec2.rs", "provider/src/ec2/"]),
    ("aws_sdk_", &["provider/src/ec2.rs", "provider/src/ec2/"]),
    ("aws_smithy_", &["provider/src/ec2.rs", "provider/src/ec2/"]),
    // The crypto provider.
    ("aws_lc_rs", &["src/net/tls/"]),
    ("zbus", &["src/fleet/"]),
    ("zbus_systemd", &["src/fleet/"]),
    ("hyper", &["src/ingress/", "src/net/http/"]),
    ("hyper_util", &["src/ingress/", "src/net/http/", "provider/src/ec2/"]),
    ("http_body_util", &["src/ingress/", "src/net/http/"]),
    ("rustls", &["src/net/", "src/keeper/"]),
    ("tokio_rustls", &["src/net/"]),
    ("webpki", &["src/net/tls/peer.rs"]),
    ("rcgen", &["src/net/tls/"]),
    ("x509_parser", &["src/net/tls/certificate.rs"]),
    ("rustls_native_certs", &["src/net/tls/client.rs"]),
    ("mio", &["src/keeper/"]),
    ("clap", &["src/cli/"]),
    ("clap_complete", &["src/cli/"]),
    ("clap_mangen", &["src/cli/"]),
    ("anyhow", &["src/cli/"]),
    ("tracing_subscriber", &["src/runtime/logging.rs"]),
    (
        "portcullis_provider",
        &[
            "src/lib.rs",
            "src/model/",
            "src/machine/",
            "src/firewall/",
            "src/provision/",
            "src/cli/",
            "provider/",
        ],
    ),
    ("println!", &["src/cli/output.rs", "hooks/"]),
    ("print!", &["src/cli/output.rs", "hooks/"]),
    ("eprintln!", &["src/cli/output.rs", "hooks/"]),
    ("eprint!", &["src/cli/output.rs", "hooks/"]),
    (
        "stdout",
        &[
            "src/cli/portcullis/demo/network.rs",
            "src/cli/portcullis/demo/nodes.rs",
            "src/cli/output.rs",
            "hooks/",
            "provider/src/nftables/run.rs",
            "src/fleet/systemd/journal.rs",
            "src/unit/hook.rs",
            "src/unit/host.rs",
        ],
    ),
    ("unsafe", &[]),
];

/// Names that a pure file may not use. A file is pure if its first paragraph contains `Pure.`.
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

/// Splits a source into words and marks, without comments, strings, characters and numbers.
fn tokens(source: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let taken = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = literal_length(rest) {
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

/// Returns the length of the string or character literal at the start of `rest`; `None` if there is
/// none.
fn literal_length(rest: &str) -> Option<usize> {
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

/// Returns the parts of this crate that the tokens use, through `crate::`, or through `super::`
/// beyond the part's own root.
fn used_parts(path: &str, tokens: &[Token]) -> Vec<String> {
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

/// Returns the first word of a path, or of each branch of a group in braces.
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

/// Returns whether the first paragraph of a source contains `Pure.`.
fn is_pure(source: &str) -> bool {
    let header = source.lines().map_while(|line| line.strip_prefix("//! "));
    header.flat_map(str::split_whitespace).any(|word| word == "Pure.")
}

/// Returns all violations of the dependency rules in one source.
fn violations(path: &str, source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let mut found = part_violations(path, source, &tokens);
    let pure = is_pure(source);
    for (at, token) in tokens.iter().enumerate() {
        let Some(word) = token.word() else { continue };
        let called = tokens.get(at + 1).is_some_and(|next| next.is('!'));
        for (name, allowed) in ALLOWED_IN {
            let matches = match (name.strip_suffix('!'), name.ends_with('_')) {
                (Some(name), _) => called && word == name,
                (None, true) => word.starts_with(name),
                (None, false) => word == *name,
            };
            if matches && !allowed.iter().any(|prefix| path.starts_with(prefix)) {
                found.push(format!("{path}: {name} is allowed only in {allowed:?}"));
            }
        }
        // The variants of `store::tree::Write` and its constructor.
        let step = tokens.get(at + 2).and_then(Token::word).is_some_and(|word| {
            ["create", "Create", "SetIfVersion", "DeleteIfVersion", "Delete", "Check"].contains(&word)
        });
        if word == "Write" && step && !path.starts_with("src/store/") {
            found.push(format!("{path}: znodes are written in src/store/ only"));
        }
        if pure && IMPURE.contains(&word) {
            found.push(format!("{path}: {word} is not allowed in a pure file"));
        }
    }
    found.dedup();
    found
}

/// Returns all uses of parts that the table does not allow.
fn part_violations(path: &str, source: &str, tokens: &[Token]) -> Vec<String> {
    let part = path.strip_prefix("src/").and_then(|inside| inside.split('/').next()).unwrap_or_default();
    let Some((_, allowed)) = PARTS.iter().find(|(name, _)| *name == part) else {
        let missing = path.starts_with("src/") && path != "src/lib.rs" && part != "bin";
        return missing.then(|| format!("{path}: {part} is not in the table of parts")).into_iter().collect();
    };
    let used = used_parts(path, tokens);
    // Other parts fill in sections of status, and use nothing else of it.
    let sections = source.matches("crate::status::sections").count();
    let only_sections = used.iter().filter(|used| *used == "status").count() == sections;
    let is_allowed = |used: &str| {
        used == part
            || allowed.contains(&"*")
            || allowed.contains(&used) && (used != "status" || only_sections)
    };
    let forbidden = used.iter().filter(|used| !is_allowed(used));
    forbidden.map(|used| format!("{path}: {part} must not use {used}")).collect()
}

/// Columns of the longest line and of the longest comment, and lines of the longest file.
const MAX_COLUMNS: usize = 110;
const MAX_COMMENT_COLUMNS: usize = 100;
const MAX_LINES: usize = 500;

/// Returns the number of columns that a line may have. The rows of tables in comments cannot be
/// wrapped.
fn max_columns(line: &str) -> usize {
    let comment = line.trim_start().strip_prefix("//").map(|text| text.trim_start_matches(['/', '!', ' ']));
    match comment {
        Some(text) if !text.starts_with('|') => MAX_COMMENT_COLUMNS,
        _ => MAX_COLUMNS,
    }
}

/// Returns all violations of the rules for the form of a source.
fn form_violations(path: &str, source: &str) -> Vec<String> {
    let mut found = Vec::new();
    if !source.starts_with("//! ") {
        found.push(format!("{path}: the first line is not a `//!` paragraph"));
    }
    let lines = source.lines().count();
    if lines > MAX_LINES {
        found.push(format!("{path}: {lines} lines; at most {MAX_LINES}"));
    }
    let long = source.lines().enumerate().filter_map(|(at, line)| {
        let columns = line.chars().count();
        (columns > max_columns(line)).then(|| format!("{path}:{}: {columns} columns", at + 1))
    });
    found.extend(long);
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

/// Removes the unit tests at the end of a source: the dependency rules do not apply to tests.
fn without_tests(source: &str) -> &str {
    source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(source)
}

/// Returns the paths and texts of all sources below some directories of the repository.
fn sources_of(directories: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    directories.iter().for_each(|directory| sources(&root.join(directory), &mut files));
    assert!(files.len() > 40, "only {} sources found", files.len());
    let relative = |file: &Path| file.strip_prefix(root).expect("below the root").display().to_string();
    files.iter().map(|file| (relative(file), fs::read_to_string(file).expect("a source"))).collect()
}

#[test]
fn dependencies_follow_the_rules() {
    let sources = sources_of(&["src", "hooks/src", "provider/src"]);
    let is_test = |path: &str| path.ends_with("tests.rs") || path.contains("/tests/");
    let pure = sources.iter().filter(|(path, source)| !is_test(path) && is_pure(source)).count();
    assert!(pure > 80, "only {pure} pure files found");
    let shipped = sources.iter().filter(|(path, _)| !is_test(path));
    let broken: Vec<_> = shipped.flat_map(|(path, source)| violations(path, without_tests(source))).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn files_have_a_header_and_limited_length() {
    let sources = sources_of(&["src", "hooks", "provider", "tests", "benches"]);
    let broken: Vec<_> = sources.iter().flat_map(|(path, source)| form_violations(path, source)).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Sources with one violation each: path, content, and a part of the message.
const VIOLATIONS: &[(&str, &str, &str)] = &[
    ("src/model/name.rs", "use crate::store::Tree;", "model must not use store"),
    ("src/model/mod.rs", "use super::store::Tree;", "model must not use store"),
    ("src/model/name.rs", "fn f() { super::super::store::g() }", "model must not use store"),
    ("src/keeper/tree.rs", "use crate::{model::UnitId, cli};", "keeper must not use model"),
    ("src/keeper/tree.rs", "use crate::{keeper::{a, model}, cli};", "keeper must not use cli"),
    ("src/runtime/clock.rs", "fn f() -> crate::store::Error {}", "runtime must not use store"),
    ("src/runtime/clock.rs", "use crate::net::http;", "runtime must not use net"),
    ("src/net/http/server.rs", "use crate::store::Tree;", "net must not use store"),
    ("src/firewall/run.rs", "use crate::net::http;", "firewall must not use net"),
    ("src/store/zk.rs", "use crate::cli::output;", "store must not use cli"),
    ("src/firewall/plan.rs", "use crate::status::View;", "firewall must not use status"),
    ("src/firewall/run.rs", "use crate::provision::plan;", "firewall must not use provision"),
    ("src/provision/apply.rs", "use crate::firewall::plan;", "provision must not use firewall"),
    ("src/machine/presence.rs", "use crate::firewall::agent;", "machine must not use firewall"),
    ("src/unit/agent.rs", "use crate::keeper::Server;", "unit must not use keeper"),
    ("src/heartbeat/api.rs", "use crate::fleet;", "heartbeat must not use fleet"),
    ("src/fleet/agent.rs", "use crate::unit;", "fleet must not use unit"),
    ("src/ingress/scaler.rs", "use crate::fleet::Job;", "ingress must not use fleet"),
    ("src/status/view.rs", "use crate::cli::output;", "status must not use cli"),
    ("src/firewall/plan.rs", "use crate::{model, status};", "firewall must not use status"),
    ("src/newpart/mod.rs", "", "newpart is not in the table"),
    ("src/store/tree.rs", "use zookeeper_client as zk;", "zookeeper_client is allowed only"),
    (
        "src/cli/up.rs",
        "fn f() { let c = zookeeper_client::Client::connector(); }",
        "zookeeper_client is allowed only",
    ),
    ("src/firewall/apply.rs", "use aws_sdk_ec2::Client;", "aws_sdk_ is allowed only"),
    ("src/cli/up.rs", "use zbus::Connection;", "zbus is allowed only"),
    ("src/cli/up.rs", "use hyper::Request;", "hyper is allowed only"),
    ("src/heartbeat/api.rs", "use hyper_util::rt::TokioIo;", "hyper_util is allowed only"),
    ("src/heartbeat/api.rs", "use http_body_util::Full;", "http_body_util is allowed only"),
    ("src/store/zk.rs", "use mio::Poll;", "mio is allowed only"),
    ("src/store/zk.rs", "use clap::Parser;", "clap is allowed only"),
    ("hooks/src/lib.rs", "use clap_complete::Shell;", "clap_complete is allowed only"),
    ("hooks/src/lib.rs", "use clap_mangen::Man;", "clap_mangen is allowed only"),
    ("src/store/zk.rs", "fn f() -> anyhow::Result<()> {}", "anyhow is allowed only"),
    ("src/cli/juju.rs", "use tracing_subscriber::fmt;", "tracing_subscriber is allowed only"),
    ("src/store/zk.rs", "use portcullis_provider::rule::PortRange;", "portcullis_provider is allowed only"),
    ("src/cli/status.rs", "fn f() { println!(\"x\"); }", "println! is allowed only"),
    ("src/cli/status.rs", "fn f() { print!(\"x\"); }", "print! is allowed only"),
    ("src/store/zk.rs", "fn f() { eprintln!(\"x\"); }", "eprintln! is allowed only"),
    ("src/store/zk.rs", "fn f() { std::eprint!(\"x\"); }", "eprint! is allowed only"),
    ("src/cli/status.rs", "fn f() { std::io::stdout(); }", "stdout is allowed only"),
    ("src/cli/output.rs", "fn f() { unsafe { g() } }", "unsafe is allowed only"),
    ("src/unit/agent.rs", "fn f() { Write::create(path, data, acl); }", "znodes are written in"),
    ("src/status/view.rs", "//! A value.\n//! Pure.\nasync fn f() {}", "async is not allowed in a pure file"),
    (
        "src/unit/charm/metadata.rs",
        "//! A value.\n//! Pure.\nuse std::fs;",
        "fs is not allowed in a pure file",
    ),
    (
        "src/keeper/tree.rs",
        "//! A value.\n//! Pure.\nfn f() { Instant::now(); }",
        "Instant is not allowed in a pure file",
    ),
    (
        "src/model/ports.rs",
        "//! A value.\n//! Pure.\nuse tracing::info;",
        "tracing is not allowed in a pure file",
    ),
    (
        "src/status/render/yaml.rs",
        "//! A value.\n//! Pure.\n/* a */ use tokio::sync;",
        "tokio is not allowed in a pure file",
    ),
];

#[test]
fn each_rule_catches_its_violations() {
    for (path, source, expected) in VIOLATIONS {
        let found = violations(path, source);
        assert!(found.iter().any(|violation| violation.contains(expected)), "{path} {source}: {found:?}");
    }
    let (long_line, long_file) = ("x".repeat(MAX_COLUMNS + 1), "\n".repeat(MAX_LINES + 1));
    let long_comment = format!("    /// {}", "x".repeat(MAX_COMMENT_COLUMNS - 7));
    for (path, source, expected) in [
        ("src/store/zk.rs", "use std::fs;\n", "src/store/zk.rs: the first line is not"),
        ("tests/layout.rs", &format!("//! A\n{long_line}\n"), "tests/layout.rs:2: 111 columns"),
        ("tests/layout.rs", &format!("//! A\n{long_comment}\n"), "tests/layout.rs:2: 101 columns"),
        ("benches/a.rs", &format!("//! A{long_file}"), "benches/a.rs: 501 lines; at most 500"),
    ] {
        let found = form_violations(path, source);
        assert_eq!(found.len(), 1, "{path}: {found:?}");
        assert!(found[0].starts_with(expected), "{found:?}");
    }
}

#[test]
fn correct_sources_have_no_violations() {
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
        ("src/status/view.rs", "//! Pure.\nfn f() { let b = b\"async\"; }"),
        ("src/status/read.rs", "//! A reader.\n//!\n//! Pure.\nasync fn f() {}"),
    ] {
        assert_eq!(violations(path, source), Vec::<String>::new(), "{path} {source}");
    }
    let row = format!("//! | {} |", "x".repeat(MAX_COLUMNS - 8));
    let longest = format!("//! A\n{row}\n{}{}", "x".repeat(MAX_COLUMNS), "\n".repeat(MAX_LINES - 2));
    assert_eq!(form_violations("src/store/zk.rs", &longest), Vec::<String>::new());
}
