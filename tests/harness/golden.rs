//! Golden files: user-visible text as plain files below `tests/cli/golden`. A test compares the
//! output of a program with its file; `BLESS=1` rewrites the file, and the change is
//! reviewed as a diff. Values that differ between runs become placeholders here; the tests decide
//! which texts to compare.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/golden");

thread_local! {
    /// Values of this test that differ between runs, each with its placeholder.
    static PLACEHOLDERS: RefCell<Vec<(String, String)>> = const { RefCell::new(Vec::new()) };
    /// Refusals that this test has recorded and not yet compared.
    static REFUSALS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Replaces `value` with `name` in every text that this test compares from now on.
pub(crate) fn placeholder(value: &str, name: &str) {
    if !value.is_empty() {
        PLACEHOLDERS.with_borrow_mut(|all| {
            all.push((value.to_owned(), name.to_owned()));
            // A path is replaced before the directory that it starts with.
            all.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
        });
    }
}

/// Adds a refusal to those that [`refusals`] compares.
pub(crate) fn record(line: &str, stdout: &str, stderr: &str, code: i32) {
    REFUSALS.with_borrow_mut(|all| all.push_str(&entry(line, stdout, stderr, code)));
}

/// One command and its outcome, as in a terminal.
pub(crate) fn entry(line: &str, stdout: &str, stderr: &str, code: i32) -> String {
    let exit = if code == 0 { String::new() } else { format!("[exit {code}]\n") };
    format!("$ {line}\n{stdout}{stderr}{exit}")
}

/// Compares all refusals recorded since the last call with `refusals/NAME.txt`.
#[track_caller]
pub(crate) fn refusals(name: &str) {
    let seen = REFUSALS.with_borrow_mut(std::mem::take);
    assert!(!seen.is_empty(), "no refusal was recorded for {name}");
    check(&format!("refusals/{name}.txt"), &seen);
}

/// Fails if a refusal was recorded and not compared.
#[track_caller]
pub(crate) fn all_compared() {
    REFUSALS.with_borrow(|left| assert!(left.is_empty(), "compare these with golden::refusals:\n{left}"));
}

/// Compares a text, after placeholders are filled in, with the golden file of that name.
#[track_caller]
pub(crate) fn check(name: &str, text: &str) {
    check_exact(name, &normalised(text));
}

/// Compares a text that has no values that differ between runs.
#[track_caller]
pub(crate) fn check_exact(name: &str, text: &str) {
    let path = Path::new(DIRECTORY).join(name);
    if std::env::var_os("BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(&path, text).expect("a golden file");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(text == expected, "{name} differs (BLESS=1 rewrites it):\n{}", difference(&expected, text));
}

/// Returns the names of all golden files below a directory, sorted.
pub(crate) fn files_below(directory: &str) -> Vec<String> {
    let mut directories = vec![PathBuf::from(directory)];
    let mut names = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(Path::new(DIRECTORY).join(&directory)).expect("golden files") {
            let entry = entry.expect("an entry");
            let name = directory.join(entry.file_name());
            match entry.file_type().expect("a type").is_dir() {
                true => directories.push(name),
                false => names.push(name.to_str().expect("UTF-8").to_owned()),
            }
        }
    }
    names.sort();
    names
}

fn normalised(text: &str) -> String {
    let known = PLACEHOLDERS
        .with_borrow(|all| all.iter().fold(text.to_owned(), |text, (value, name)| text.replace(value, name)));
    let known = known.replace(env!("CARGO_MANIFEST_DIR"), "REPO");
    epoch_times(&times(&loopback_ports(&join_tokens(&known))))
}

/// Replaces the token after `portcullis join ` with `TOKEN`.
fn join_tokens(text: &str) -> String {
    let mut parts = text.split("portcullis join pj1.");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |shown, part| {
        let end = part.find(char::is_whitespace).unwrap_or(part.len());
        format!("{shown}portcullis join TOKEN{}", &part[end..])
    })
}

/// Replaces `127.0.0.1:40123` with `127.0.0.1:PORT`; ports that a test chose stay.
fn loopback_ports(text: &str) -> String {
    let mut parts = text.split("127.0.0.1:");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let port = &part[..digits];
        let chosen_by_kernel = port.parse().is_ok_and(|port: u16| port >= 1024);
        shown += "127.0.0.1:";
        shown += if chosen_by_kernel { "PORT" } else { port };
        shown += &part[digits..];
    }
    shown
}

/// Replaces `2026-11-18T04:16:43.123Z` with `YYYY-MM-DDTHH:MM:SSZ`, so that columns keep their
/// width.
fn times(text: &str) -> String {
    const SHAPE: &str = "0000-00-00T00:00:00";
    let mut shown = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let is_time = rest.len() > SHAPE.len()
            && rest
                .bytes()
                .zip(SHAPE.bytes())
                .all(|(c, shape)| if shape == b'0' { c.is_ascii_digit() } else { c == shape });
        if is_time {
            shown += "YYYY-MM-DDTHH:MM:SS";
            let fraction = |c: char| c == '.' || c.is_ascii_digit();
            rest = rest[SHAPE.len()..].trim_start_matches(fraction);
        } else {
            shown.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    shown
}

/// Replaces `"at":1794976575481` with `"at":MILLISECONDS`.
fn epoch_times(text: &str) -> String {
    let mut parts = text.split("\"at\":");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |shown, part| {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        shown + "\"at\":" + if rest.len() < part.len() { "MILLISECONDS" } else { "" } + rest
    })
}

/// Returns the lines from the first to the last that differ, with one line of context before them.
fn difference(expected: &str, text: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), text.lines().collect());
    let same = |(old, new): &(&&str, &&str)| old == new;
    let start = old.iter().zip(&new).take_while(same).count();
    let end = old[start..].iter().rev().zip(new[start..].iter().rev()).take_while(same).count();
    let context = start.checked_sub(1).map(|line| format!("  {}", old[line]));
    let removed = old[start..old.len() - end].iter().map(|line| format!("- {line}"));
    let added = new[start..new.len() - end].iter().map(|line| format!("+ {line}"));
    context.into_iter().chain(removed).chain(added).collect::<Vec<_>>().join("\n")
}
