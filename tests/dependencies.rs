//! Checks the dependencies of the workspace against `deny.toml` without cargo-deny: licences,
//! sources and duplicate versions.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// A package of the dependency graph.
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for a package of a directory.
    source: Option<String>,
}

/// Returns the packages that the workspace needs on this platform, with all features.
fn packages() -> Vec<Package> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--offline", "--locked", "--format-version", "1", "--all-features"])
        .args(["--filter-platform", &platform])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let nodes = metadata["resolve"]["nodes"].as_array().expect("nodes");
    let used: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let all = metadata["packages"].as_array().expect("packages").iter();
    let text = |package: &Value, field: &str| package[field].as_str().map(str::to_owned);
    let found: Vec<Package> = all
        .filter(|package| package["id"].as_str().is_some_and(|id| used.contains(id)))
        .map(|package| Package {
            name: text(package, "name").expect("a name"),
            version: text(package, "version").expect("a version"),
            license: text(package, "license"),
            source: text(package, "source"),
        })
        .collect();
    assert!(found.len() > 100, "only {} packages found", found.len());
    found
}

/// Returns the strings in quotes of the list `name` in `deny.toml`; of a table in the list, the
/// first.
fn list_of(name: &str) -> BTreeSet<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml");
    let text = fs::read_to_string(file).expect("deny.toml");
    let begin = format!("{name} = [");
    let lines = text.lines().skip_while(|line| *line != begin).skip(1).take_while(|line| *line != "]");
    let list: BTreeSet<String> = lines.filter_map(|line| line.split('"').nth(1)).map(str::to_owned).collect();
    assert!(!list.is_empty(), "no list {name}");
    list
}

/// Returns whether a licence expression can be fulfilled with licences for which `is_allowed` is
/// true. `AND` binds more tightly than `OR`; a slash is an old form of `OR`.
fn is_fulfilled(expression: &str, is_allowed: &impl Fn(&str) -> bool) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let (fulfilled, rest) = any_of(&words, is_allowed);
    assert!(rest.is_empty(), "{expression}: {rest:?} is left over");
    fulfilled
}

fn any_of<'a>(words: &'a [&'a str], is_allowed: &impl Fn(&str) -> bool) -> (bool, &'a [&'a str]) {
    let (mut fulfilled, mut rest) = all_of(words, is_allowed);
    while let Some((&"OR", after)) = rest.split_first() {
        let (other, left) = all_of(after, is_allowed);
        (fulfilled, rest) = (fulfilled || other, left);
    }
    (fulfilled, rest)
}

fn all_of<'a>(words: &'a [&'a str], is_allowed: &impl Fn(&str) -> bool) -> (bool, &'a [&'a str]) {
    let (mut fulfilled, mut rest) = one(words, is_allowed);
    while let Some((&"AND", after)) = rest.split_first() {
        let (other, left) = one(after, is_allowed);
        (fulfilled, rest) = (fulfilled && other, left);
    }
    (fulfilled, rest)
}

fn one<'a>(words: &'a [&'a str], is_allowed: &impl Fn(&str) -> bool) -> (bool, &'a [&'a str]) {
    match words {
        ["(", inside @ ..] => {
            let (fulfilled, rest) = any_of(inside, is_allowed);
            (fulfilled, rest.strip_prefix(&[")"]).expect("a closing parenthesis"))
        }
        [license, "WITH", exception, rest @ ..] => (is_allowed(&format!("{license} WITH {exception}")), rest),
        [license, rest @ ..] => (is_allowed(license), rest),
        [] => panic!("a licence is missing"),
    }
}

#[test]
fn all_licences_are_allowed() {
    let allowed = list_of("allow");
    let is_allowed = |license: &str| allowed.contains(license);
    let fulfilled = |package: &&Package| match &package.license {
        Some(expression) => is_fulfilled(expression, &is_allowed),
        None => false,
    };
    let packages = packages();
    let others = packages.iter().filter(|package| package.source.is_some());
    let refused: Vec<String> = others
        .filter(|package| !fulfilled(package))
        .map(|package| format!("{} {}: {:?}", package.name, package.version, package.license))
        .collect();
    assert_eq!(refused, Vec::<String>::new());
}

#[test]
fn licence_expressions_are_evaluated() {
    let is_allowed = |license: &str| ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].contains(&license);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("GPL-3.0 AND GPL-2.0 OR MIT", true),
        ("MIT AND (GPL-3.0 OR ISC)", true),
        ("(MIT OR ISC) AND GPL-3.0", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(is_fulfilled(expression, &is_allowed), expected, "{expression}");
    }
}

#[test]
fn all_dependencies_are_from_one_registry() {
    let packages = packages();
    let sources: BTreeSet<&String> = packages.iter().filter_map(|package| package.source.as_ref()).collect();
    let is_registry = |source: &&&String| source.starts_with("registry+");
    assert!(sources.len() == 1 && sources.iter().all(|source| is_registry(&source)), "{sources:?}");
    let ours = packages.iter().filter(|package| package.source.is_none());
    let ours: BTreeSet<&str> = ours.map(|package| package.name.as_str()).collect();
    assert_eq!(ours, ["portcullis", "portcullis-hooks", "portcullis-provider"].into());
}

/// Each crate has one version, except those that `deny.toml` lists with a reason. An entry that is
/// not needed any more is refused, too.
#[test]
fn duplicate_versions_are_those_of_the_list() {
    let packages = packages();
    let mut versions: BTreeMap<&str, BTreeSet<Vec<u64>>> = BTreeMap::new();
    for package in &packages {
        let numbers = package.version.split(['.', '+', '-']).map_while(|number| number.parse().ok());
        versions.entry(&package.name).or_default().insert(numbers.collect());
    }
    let mut old = BTreeSet::new();
    for (name, versions) in versions {
        for version in versions.iter().rev().skip(1) {
            // Versions are compatible if their first number that is not zero is the same.
            let length = 1 + version.iter().position(|number| *number > 0).unwrap_or(0);
            let shown: Vec<String> = version[..length].iter().map(u64::to_string).collect();
            old.insert(format!("{name}:{}", shown.join(".")));
        }
    }
    assert_eq!(old, list_of("skip"));
}
