//! INI files as hirte and BlueChi write them: sections, `key = value`, comments that begin with `#`
//! or `;`, and values that continue on indented lines. The meaning of sections and keys is in
//! `config`. Pure.

use std::fmt;

/// The largest file that is read. A usual one has a few kilobytes.
pub const MAX_BYTES: usize = 1 << 20;

/// An error with the line that it is about, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineError {
    pub line: usize,
    pub reason: String,
}

impl LineError {
    pub fn new(line: usize, reason: impl Into<String>) -> Self {
        Self { line, reason: reason.into() }
    }
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for LineError {}

/// A key and its value. A value on several lines has them joined by newlines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: String,
    pub line: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub name: String,
    pub line: usize,
    pub entries: Vec<Entry>,
}

/// # Errors
/// Names the first line that is neither a section, an entry, a continuation nor a comment.
pub fn parse(text: &str) -> Result<Vec<Section>, LineError> {
    let mut sections: Vec<Section> = Vec::new();
    for (at, raw) in text.lines().enumerate() {
        let line = at + 1;
        let trimmed = raw.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if raw.starts_with([' ', '\t']) {
            let entry = sections.last_mut().and_then(|section| section.entries.last_mut());
            let entry = entry.ok_or_else(|| LineError::new(line, "an indented line continues no value"))?;
            entry.value.push('\n');
            entry.value.push_str(trimmed);
        } else if let Some(header) = trimmed.strip_prefix('[') {
            let name = header.strip_suffix(']').map(str::trim).filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| LineError::new(line, "a section is written as [NAME]"))?;
            sections.push(Section { name: name.to_owned(), line, entries: Vec::new() });
        } else {
            let (key, value) = trimmed
                .split_once('=')
                .ok_or_else(|| LineError::new(line, "expected KEY=VALUE, [SECTION] or a comment"))?;
            let entry = Entry { key: key.trim().to_owned(), value: value.trim().to_owned(), line };
            let section =
                sections.last_mut().ok_or_else(|| LineError::new(line, "a key before any section"))?;
            section.entries.push(entry);
        }
    }
    Ok(sections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_values_comments_and_continuations_are_read() {
        let text = "# a comment\n[hirte]\nManagerPort = 1842\nAllowedNodeNames=a,\n  b,\n\n; more\n\tc\n\n\
                    [node a]\nCertificate=/etc/a=b.pem\n";
        let read: Vec<_> = parse(text)
            .unwrap()
            .into_iter()
            .map(|section| {
                let entries =
                    section.entries.into_iter().map(|e| (e.key, e.value, e.line)).collect::<Vec<_>>();
                (section.name, section.line, entries)
            })
            .collect();
        let entry = |key: &str, value: &str, line| (key.to_owned(), value.to_owned(), line);
        let expected = [
            (
                "hirte".to_owned(),
                2,
                vec![entry("ManagerPort", "1842", 3), entry("AllowedNodeNames", "a,\nb,\nc", 4)],
            ),
            ("node a".to_owned(), 10, vec![entry("Certificate", "/etc/a=b.pem", 11)]),
        ];
        assert_eq!(read, expected);
    }

    #[test]
    fn errors_name_the_line() {
        for (text, expected) in [
            ("a=1", "line 1: a key before any section"),
            ("[a]\nb", "line 2: expected KEY=VALUE, [SECTION] or a comment"),
            ("[a]\n b=1", "line 2: an indented line continues no value"),
            ("\n[a", "line 2: a section is written as [NAME]"),
            ("[]", "line 1: a section is written as [NAME]"),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), expected);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "([a=\\[\\]#; \t]|\n|\\PC){0,60}") {
            let lines = text.lines().count();
            match parse(&text) {
                Ok(sections) => {
                    let entries = sections.iter().flat_map(|section| &section.entries);
                    proptest::prop_assert!(entries.into_iter().all(|entry| entry.line <= lines));
                }
                Err(error) => proptest::prop_assert!((1..=lines).contains(&error.line)),
            }
        }
    }
}
