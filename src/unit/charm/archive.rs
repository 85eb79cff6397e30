//! The archive of a charm. The same directory always gives the same bytes, so that their hash
//! identifies the charm. Entries of an archive cannot leave the directory that it is unpacked into.
//! Pure.

use std::collections::BTreeMap;

/// The most files and links in a charm.
pub const MAX_ENTRIES: usize = 1000;
/// The most bytes of a charm, names included.
pub const MAX_BYTES: usize = 16 * 1024 * 1024;
/// The most bytes of a path within a charm, and of the target of a link.
pub const MAX_PATH_BYTES: usize = 512;

const MAGIC: &[u8] = b"portcullis charm 1\n";

/// One file of a charm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    File {
        executable: bool,
        contents: Vec<u8>,
    },
    /// A link to another entry of the same charm.
    Link {
        target: String,
    },
}

/// Why a path is not allowed in a charm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    #[error("it has more than {MAX_PATH_BYTES} bytes")]
    TooLong,
    #[error("it is empty, absolute, or has empty parts, `.` or control characters")]
    Malformed,
    #[error("it leads out of the charm")]
    Outside,
}

/// Why bytes are not a charm archive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadArchive {
    #[error("not a charm archive: bad magic bytes")]
    NotOne,
    #[error("the archive is truncated")]
    Cut,
    #[error("more than {MAX_ENTRIES} files")]
    TooMany,
    #[error("more than {MAX_BYTES} bytes")]
    TooLarge,
    #[error("path {path:?} is not allowed in a charm: {problem}")]
    Path { path: String, problem: BadPath },
    #[error("entry {0:?} is out of order, duplicated, or below a file")]
    Unsorted(String),
    #[error("a name is not UTF-8 text")]
    NotText,
    #[error("unknown entry kind {0}")]
    Kind(u8),
}

/// Checks the path of a file in a charm.
///
/// # Errors
/// See [`BadPath`].
pub fn check_path(path: &str) -> Result<(), BadPath> {
    if path.len() > MAX_PATH_BYTES {
        return Err(BadPath::TooLong);
    }
    if path.chars().any(char::is_control) {
        return Err(BadPath::Malformed);
    }
    for part in path.split('/') {
        match part {
            "" | "." => return Err(BadPath::Malformed),
            ".." => return Err(BadPath::Outside),
            _ => {}
        }
    }
    Ok(())
}

/// Checks the target of a link at `path`. All `..` parts must come first: a link that goes up after
/// it went down, perhaps through another link, could lead anywhere.
///
/// # Errors
/// See [`BadPath`].
pub fn check_target(path: &str, target: &str) -> Result<(), BadPath> {
    if target.len() > MAX_PATH_BYTES {
        return Err(BadPath::TooLong);
    }
    if target.is_empty() || target.chars().any(char::is_control) {
        return Err(BadPath::Malformed);
    }
    if target.starts_with('/') {
        return Err(BadPath::Outside);
    }
    let mut depth = path.split('/').count() - 1;
    let mut descended = false;
    for part in target.split('/') {
        match part {
            "" | "." => return Err(BadPath::Malformed),
            ".." if descended || depth == 0 => return Err(BadPath::Outside),
            ".." => depth -= 1,
            _ => descended = true,
        }
    }
    Ok(())
}

/// Returns the archive of a charm whose paths and links were checked.
pub fn pack(entries: &BTreeMap<String, Entry>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for (path, entry) in entries {
        let (kind, data) = match entry {
            Entry::File { executable: false, contents } => (b'f', contents.as_slice()),
            Entry::File { executable: true, contents } => (b'x', contents.as_slice()),
            Entry::Link { target } => (b'l', target.as_bytes()),
        };
        bytes.push(kind);
        for part in [path.as_bytes(), data] {
            // Longer paths were refused when they were read; a length that does not fit makes an
            // archive that is refused.
            bytes.extend(u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend(part);
        }
    }
    bytes
}

/// Returns the files of a charm.
///
/// # Errors
/// See [`BadArchive`]. No returned entry leads out of the directory that it is unpacked into.
pub fn unpack(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, BadArchive> {
    if bytes.len() > MAX_BYTES {
        return Err(BadArchive::TooLarge);
    }
    let mut rest = bytes.strip_prefix(MAGIC).ok_or(BadArchive::NotOne)?;
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    while let Some((kind, after)) = rest.split_first() {
        rest = after;
        let path = text(take(&mut rest)?)?;
        let data = take(&mut rest)?;
        let wrong = |problem| BadArchive::Path { path: path.chars().take(200).collect(), problem };
        check_path(&path).map_err(wrong)?;
        let entry = match kind {
            b'f' | b'x' => Entry::File { executable: *kind == b'x', contents: data.to_vec() },
            b'l' => {
                let target = text(data)?;
                check_target(&path, &target).map_err(wrong)?;
                Entry::Link { target }
            }
            other => return Err(BadArchive::Kind(*other)),
        };
        let follows = entries.last_key_value().is_none_or(|(last, _)| *last < path);
        if !follows || is_below_a_file(&path, &entries) {
            return Err(BadArchive::Unsorted(path));
        }
        entries.insert(path, entry);
        if entries.len() > MAX_ENTRIES {
            return Err(BadArchive::TooMany);
        }
    }
    Ok(entries)
}

/// Refuses entries below another entry. Directories exist only through their files, so a parent
/// cannot be an entry itself; as a link it would let the file be written elsewhere.
fn is_below_a_file(path: &str, entries: &BTreeMap<String, Entry>) -> bool {
    path.match_indices('/').any(|(at, _)| entries.contains_key(&path[..at]))
}

fn take<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], BadArchive> {
    let (length, after) = rest.split_first_chunk::<4>().ok_or(BadArchive::Cut)?;
    let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| BadArchive::Cut)?;
    let (data, after) = after.split_at_checked(length).ok_or(BadArchive::Cut)?;
    *rest = after;
    Ok(data)
}

fn text(bytes: &[u8]) -> Result<String, BadArchive> {
    String::from_utf8(bytes.to_vec()).map_err(|_| BadArchive::NotText)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(contents: &[u8]) -> Entry {
        Entry::File { executable: false, contents: contents.to_vec() }
    }

    fn link(target: &str) -> Entry {
        Entry::Link { target: target.to_owned() }
    }

    fn packed(entries: &[(&str, Entry)]) -> Vec<u8> {
        // A list and not a map, so that a wrong order stays wrong.
        let one = |(path, entry): &(&str, Entry)| {
            pack(&BTreeMap::from([((*path).to_owned(), entry.clone())]))[MAGIC.len()..].to_vec()
        };
        MAGIC.iter().copied().chain(entries.iter().flat_map(one)).collect()
    }

    #[test]
    fn an_archive_is_unpacked_as_it_was_packed() {
        let entries = BTreeMap::from([
            ("hooks/install".to_owned(), Entry::File { executable: true, contents: b"#!/bin/sh\n".to_vec() }),
            ("hooks/start".to_owned(), link("install")),
            ("metadata.yaml".to_owned(), file(b"name: a\n")),
        ]);
        let bytes = pack(&entries);
        assert_eq!(unpack(&bytes), Ok(entries));
    }

    #[test]
    fn links_stay_inside() {
        for (path, target, allowed) in [
            ("hooks/start", "install", true),
            ("hooks/start", "../bin/start", true),
            ("a/b/up", "../..", true),
            ("start", "..", false),
            ("hooks/start", "../../etc/passwd", false),
            ("hooks/start", "/etc/passwd", false),
            // Through `a/b/up`, this is the parent directory of the charm.
            ("sly", "a/b/up/..", false),
            ("hooks/start", "", false),
            ("hooks/start", "a//b", false),
            ("hooks/start", "./a", false),
            ("hooks/start", "a\nb", false),
        ] {
            assert_eq!(check_target(path, target).is_ok(), allowed, "{path} -> {target}");
        }
    }

    #[test]
    fn archives_with_paths_outside_are_refused() {
        for (entries, problem) in [
            (vec![("../x", file(b""))], "\"../x\" is not allowed in a charm: it leads out of the charm"),
            (vec![("a/../../x", file(b""))], "it leads out of the charm"),
            (vec![("/etc/passwd", file(b""))], "is not allowed in a charm"),
            (vec![("a//b", file(b""))], "is not allowed in a charm"),
            (vec![("", file(b""))], "is not allowed in a charm"),
            (vec![("a\0b", file(b""))], "is not allowed in a charm"),
            (vec![("a", link("../x"))], "it leads out of the charm"),
            (vec![("a", link("/etc"))], "it leads out of the charm"),
            (vec![("a", link("b")), ("a/passwd", file(b""))], "below a file"),
            (vec![("a", file(b"")), ("a/b/c", file(b""))], "below a file"),
            (vec![("b", file(b"")), ("a", file(b""))], "out of order"),
            (vec![("a", file(b"")), ("a", link("b"))], "duplicated"),
        ] {
            let refused = unpack(&packed(&entries)).expect_err("refused").to_string();
            assert!(refused.contains(problem), "{entries:?}: {refused}");
        }
        let many: BTreeMap<_, _> = (0..=MAX_ENTRIES).map(|n| (format!("{n:04}"), file(b""))).collect();
        assert_eq!(unpack(&pack(&many)), Err(BadArchive::TooMany));
        assert_eq!(unpack(&vec![0; MAX_BYTES + 1]), Err(BadArchive::TooLarge));
        assert_eq!(unpack(b"PK\x03\x04"), Err(BadArchive::NotOne));
    }

    proptest! {
        #[test]
        fn damaged_archives_are_refused_or_unpack_within_limits(
            at in 0usize..200, byte: u8, cut in 0usize..200
        ) {
            let whole = packed(&[("a", link("b/c")), ("b/c", file(b"contents")), ("b/d", file(b""))]);
            let mut changed = whole.clone();
            let at = at % changed.len();
            changed[at] = byte;
            if let Ok(entries) = unpack(&changed) {
                for (path, entry) in entries {
                    prop_assert!(check_path(&path).is_ok());
                    if let Entry::Link { target } = entry {
                        prop_assert!(check_target(&path, &target).is_ok());
                    }
                }
            }
            let cut = cut % whole.len();
            prop_assert!(unpack(&whole[..cut]).map_or(true, |entries| entries.len() < 3));
        }

        #[test]
        fn arbitrary_bytes_cause_no_panic(bytes: Vec<u8>) {
            let with_magic: Vec<u8> = MAGIC.iter().copied().chain(bytes).collect();
            if let Ok(entries) = unpack(&with_magic) {
                prop_assert_eq!(pack(&entries), with_magic);
            }
        }
    }
}
