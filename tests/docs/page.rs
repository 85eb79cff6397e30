//! Markdown pages as the tests need them: fenced blocks with the comment above each, and the
//! commands in them. No command is run here.

use std::fs;
use std::path::{Path, PathBuf};

pub(crate) struct Page {
    /// Relative to the repository.
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) blocks: Vec<Block>,
}

pub(crate) struct Block {
    /// `sh` is run, `console` is run on several machines, `text` is not run.
    pub(crate) language: String,
    /// Of the first line inside, counted from 1.
    pub(crate) line: usize,
    pub(crate) text: String,
    /// The HTML comment above, without its marks.
    pub(crate) comment: Option<String>,
}

/// A command of an `sh` block, with continuation lines and here-documents.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) line: usize,
    pub(crate) text: String,
    pub(crate) expected: Expected,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    Exit(u8),
    /// The output contains this text, at the latest when the command is repeated.
    Shows(String),
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file of the repository.
pub(crate) fn source(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

impl Page {
    pub(crate) fn read(path: &str) -> Self {
        Self::parse(path, source(path))
    }

    fn parse(path: &str, text: String) -> Self {
        let blocks = blocks(path, &text);
        Self { path: path.to_owned(), text, blocks }
    }

    /// Every page that users read, in the order of their paths.
    pub(crate) fn all() -> Vec<Self> {
        let mut paths = Vec::new();
        markdown(root(), &mut paths);
        markdown(&root().join("docs"), &mut paths);
        for directory in directories(&root().join("docs")) {
            markdown(&directory, &mut paths);
        }
        paths.sort();
        assert!(paths.len() > 20, "only {paths:?}");
        paths.iter().map(|path| Self::read(path)).collect()
    }

    pub(crate) fn commands(&self) -> Vec<Command> {
        self.blocks.iter().filter(|block| block.language == "sh").flat_map(Block::commands).collect()
    }
}

fn directories(of: &Path) -> Vec<PathBuf> {
    fs::read_dir(of).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect()
}

fn markdown(directory: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
        }
    }
}

fn blocks(path: &str, text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open = false;
    let mut comment = None;
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), open) {
            (Some(language), false) => {
                let (language, comment) = (language.to_owned(), comment.take());
                blocks.push(Block { language, line: number + 2, text: String::new(), comment });
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => {
                let block = blocks.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, false) => {
                let inside = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
                comment = inside.map(str::to_owned);
            }
        }
    }
    assert!(!open, "{path}: a block is not closed");
    blocks
}

impl Block {
    pub(crate) fn commands(&self) -> Vec<Command> {
        let mut commands = Vec::new();
        let mut lines = self.text.lines().enumerate();
        while let Some((number, first)) = lines.next() {
            if first.trim().is_empty() || first.starts_with('#') {
                continue;
            }
            let mut text = first.to_owned();
            while text.ends_with('\\') {
                text.push('\n');
                text.push_str(lines.next().expect("a line after the continuation").1);
            }
            let mut command = Command::new(self.line + number, &text);
            if let Some((_, rest)) = text.split_once("<<'") {
                let end = rest.split('\'').next().unwrap();
                for (_, line) in lines.by_ref() {
                    command.text = format!("{}\n{line}", command.text);
                    if line == end {
                        break;
                    }
                }
            }
            commands.push(command);
        }
        commands
    }
}

impl Command {
    fn new(line: usize, text: &str) -> Self {
        let marked = |mark: &str| text.rsplit_once(mark).map(|(text, rest)| (text.trim_end(), rest));
        let (text, expected) = if let Some((text, shown)) = marked(" # until ") {
            (text, Expected::Shows(shown.to_owned()))
        } else if let Some((text, code)) = marked(" # exit ") {
            (text, Expected::Exit(code.parse().expect("an exit code")))
        } else {
            (text, Expected::Exit(0))
        };
        Self { line, text: text.to_owned(), expected }
    }
}

#[test]
fn commands_are_found_with_their_expected_output() {
    let text = "<!-- why -->\n```sh\n# only a comment\na b \\\n  c   # exit 2\ncat <<'EOF'\nx # \
                exit 1\nEOF\n\nd &  # \
                until is up\n```\n";
    let page = Page::parse("page.md", text.to_owned());
    assert_eq!(page.blocks[0].comment.as_deref(), Some("why"));
    let command = |line, text: &str, expected| Command { line, text: text.to_owned(), expected };
    let expected = [
        command(4, "a b \\\n  c", Expected::Exit(2)),
        command(6, "cat <<'EOF'\nx # exit 1\nEOF", Expected::Exit(0)),
        command(10, "d &", Expected::Shows("is up".to_owned())),
    ];
    assert_eq!(page.commands(), expected);
}
