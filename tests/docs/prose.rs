//! Form of the pages: their width, the length of the README, links that lead somewhere, and
//! messages that exist. Whether a page is well written is not for a test.

use std::fs;
use std::path::Path;

use crate::page::{Page, root, source};

#[test]
fn readme_is_short() {
    assert!(source("README.md").lines().count() <= 150);
}

#[test]
fn prose_wraps_at_100_columns() {
    for page in Page::all().iter().filter(|page| page.path != "docs/reference/cli.md") {
        let mut inside = false;
        for (number, line) in page.text.lines().enumerate() {
            inside ^= line.starts_with("```");
            let free = inside || line.starts_with('|') || line.starts_with("    ") || !line.contains(' ');
            let columns = line.chars().count();
            assert!(free || columns <= 100, "{}:{}: {columns} columns", page.path, number + 1);
        }
    }
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut checked = 0;
    for page in Page::all() {
        let directory = Path::new(&page.path).parent().unwrap();
        for link in page.text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            if link.contains("://") {
                continue;
            }
            let link = link.replace('\n', "");
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let path = if file.is_empty() { Path::new(&page.path).to_owned() } else { directory.join(file) };
            let path = root().join(path);
            assert!(path.exists(), "{}: {link}", page.path);
            if !heading.is_empty() {
                let text = fs::read_to_string(&path).unwrap();
                assert!(text.lines().any(|line| anchor(line) == heading), "{}: {link}", page.path);
            }
            checked += 1;
        }
    }
    assert!(checked > 60, "only {checked} links found");
}

/// A heading as links name it.
fn anchor(line: &str) -> String {
    let kept =
        line.trim_start_matches('#').trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn messages_in_troubleshooting_are_in_the_source() {
    let mut sources = String::new();
    for directory in ["src", "hooks/src", "provider/src"] {
        read_below(&root().join(directory), &mut sources);
    }
    let page = source("docs/troubleshooting.md");
    // Headings with code or a sentence of their own are no messages.
    let described = |text: &str| text.contains('`') || text == "sudo fails in a hook";
    let headings = page.lines().filter_map(|line| line.strip_prefix("### ")).filter(|text| !described(text));
    let missing: Vec<&str> = headings.filter(|text| !sources.contains(text)).collect();
    assert!(missing.is_empty(), "not in the source: {missing:#?}");
}

fn read_below(directory: &Path, found: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_below(&path, found);
        } else {
            found.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}
