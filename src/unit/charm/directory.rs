//! Charms as directories: reads and checks the operator's directory, and writes the copy of a unit.
//! `metadata` and `archive` decide what a charm may contain; this file reads and writes the files.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use super::archive::{self, Entry, MAX_BYTES, MAX_ENTRIES};
use super::metadata::{self, Charm, HOOKS, Problem, Problems};
use crate::unit::tree_walk::remove_tree;

/// The deepest nesting. Stops the walk of a directory that a mount made endless.
const MAX_DEPTH: usize = 16;

/// The most problems that are reported at once.
const MAX_PROBLEMS: usize = 50;

/// Reads a whole charm.
///
/// # Errors
/// All problems of the charm at once.
pub fn read(directory: &Path) -> Result<(Charm, BTreeMap<String, Entry>), Problems> {
    let mut reading = Reading::default();
    reading.walk(directory, "", 0);
    if reading.full {
        return Err(Problems::all(reading.problems));
    }
    let metadata = reading.contents("metadata.yaml");
    let revision = reading.contents("revision");
    let checked = match metadata {
        Some(metadata) => metadata::check(&metadata, revision.as_deref()),
        None => Err(Problems::one(Problem::NoMetadata)),
    };
    for hook in HOOKS {
        if matches!(
            reading.entries.get(&format!("hooks/{hook}")),
            Some(Entry::File { executable: false, .. })
        ) {
            reading.problem(Problem::NotExecutable { hook });
        }
    }
    match (checked, reading.problems.is_empty()) {
        (Ok(charm), true) => Ok((charm, reading.entries)),
        (Ok(_), false) => Err(Problems::all(reading.problems)),
        (Err(said), _) => {
            reading.problems.splice(0..0, said.iter().cloned());
            Err(Problems::all(reading.problems))
        }
    }
}

#[derive(Default)]
struct Reading {
    entries: BTreeMap<String, Entry>,
    problems: Vec<Problem>,
    bytes: usize,
    /// A limit was exceeded, so the rest is not read.
    full: bool,
}

impl Reading {
    fn problem(&mut self, problem: Problem) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        }
    }

    fn contents(&self, path: &str) -> Option<Vec<u8>> {
        match self.entries.get(path) {
            Some(Entry::File { contents, .. }) => Some(contents.clone()),
            _ => None,
        }
    }

    fn unreadable(&mut self, path: &str, error: &io::Error) {
        let path = if path.is_empty() { "the directory" } else { path };
        self.problem(Problem::Unreadable { path: path.to_owned(), reason: error.to_string() });
    }

    fn walk(&mut self, directory: &Path, prefix: &str, depth: usize) {
        if depth == MAX_DEPTH {
            return self.problem(Problem::TooDeep { path: prefix.to_owned(), most: MAX_DEPTH });
        }
        let listed = fs::read_dir(directory).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
        let mut listed = match listed {
            Ok(listed) => listed,
            Err(error) => return self.unreadable(prefix, &error),
        };
        listed.sort_by_key(fs::DirEntry::file_name);
        for entry in listed {
            if self.full {
                return;
            }
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                let shown = format!("{prefix}{}", name.to_string_lossy());
                self.problem(Problem::BadPath {
                    path: shown,
                    problem: "its name is not UTF-8 text".to_owned(),
                });
                continue;
            };
            let path = format!("{prefix}{name}");
            if let Err(problem) = archive::check_path(&path) {
                self.problem(Problem::BadPath { path, problem: problem.to_string() });
                continue;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.walk(&entry.path(), &format!("{path}/"), depth + 1),
                Ok(kind) if kind.is_symlink() => self.link(&entry.path(), path),
                Ok(kind) if kind.is_file() => self.file(&entry.path(), path),
                Ok(_) => self.problem(Problem::NotFile { path }),
                Err(error) => self.unreadable(&path, &error),
            }
        }
    }

    fn link(&mut self, place: &Path, path: String) {
        let target = match fs::read_link(place) {
            Ok(target) => target,
            Err(error) => return self.unreadable(&path, &error),
        };
        match target.to_str().map(|target| (target, archive::check_target(&path, target))) {
            Some((target, Ok(()))) => self.add(path, Entry::Link { target: target.to_owned() }, target.len()),
            Some((_, Err(problem))) => self.problem(Problem::BadLink { path, problem: problem.to_string() }),
            None => self.problem(Problem::BadLink { path, problem: "it is not UTF-8 text".to_owned() }),
        }
    }

    fn file(&mut self, place: &Path, path: String) {
        let room = MAX_BYTES.saturating_sub(self.bytes);
        let read = || -> io::Result<(bool, Vec<u8>)> {
            // Does not block if a pipe replaced the file since it was listed.
            let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
            let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(place)?;
            let executable = file.metadata()?.permissions().mode() & 0o100 != 0;
            let mut contents = Vec::new();
            file.take(room as u64 + 1).read_to_end(&mut contents)?;
            Ok((executable, contents))
        };
        match read() {
            Ok((executable, contents)) => {
                let length = contents.len();
                self.add(path, Entry::File { executable, contents }, length);
            }
            Err(error) => self.unreadable(&path, &error),
        }
    }

    fn add(&mut self, path: String, entry: Entry, length: usize) {
        // As in the archive: the name, its length, and the kind.
        self.bytes += path.len() + length + 16;
        if self.bytes + 64 > MAX_BYTES {
            self.full = true;
            return self.problem(Problem::TooMuch { most: MAX_BYTES });
        }
        if self.entries.len() == MAX_ENTRIES {
            self.full = true;
            return self.problem(Problem::TooMany { most: MAX_ENTRIES });
        }
        self.entries.insert(path, entry);
    }
}

/// Writes the directory of a charm, completely or not at all, for the given user and group. An
/// existing directory is replaced.
pub fn write(
    directory: &Path,
    entries: &BTreeMap<String, Entry>,
    owner: Option<(u32, u32)>,
) -> io::Result<()> {
    let aside = directory.with_extension("new");
    for old in [&aside, directory] {
        remove_tree(old)?;
    }
    let made = write_entries(&aside, entries, owner).and_then(|()| fs::rename(&aside, directory));
    if made.is_err() {
        // The first error is returned; the next attempt replaces the remains.
        let _ = remove_tree(&aside);
    }
    made
}

fn write_entries(top: &Path, entries: &BTreeMap<String, Entry>, owner: Option<(u32, u32)>) -> io::Result<()> {
    let owned = |path: &Path| match owner {
        Some((user, group)) => std::os::unix::fs::lchown(path, Some(user), Some(group)),
        None => Ok(()),
    };
    DirBuilder::new().mode(0o755).create(top)?;
    owned(top)?;
    for (path, entry) in entries {
        for (at, _) in path.match_indices('/') {
            let directory = top.join(&path[..at]);
            if !directory.is_dir() {
                DirBuilder::new().mode(0o755).create(&directory)?;
                owned(&directory)?;
            }
        }
        let place = top.join(path);
        match entry {
            Entry::Link { target } => symlink(target, &place)?,
            Entry::File { executable, contents } => {
                let mode = if *executable { 0o755 } else { 0o644 };
                let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&place)?;
                file.write_all(contents)?;
                // Independent of the process's umask.
                file.set_permissions(fs::Permissions::from_mode(mode))?;
            }
        }
        owned(&place)?;
    }
    File::open(top)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = "name: web\nsummary: s\ndescription: d\n";

    struct TestCharm(tempfile::TempDir);

    impl TestCharm {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            place.file("metadata.yaml", METADATA, 0o644);
            place
        }

        fn file(&self, path: &str, text: &str, mode: u32) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }

        fn link(&self, path: &str, target: &str) {
            symlink(target, self.0.path().join(path)).unwrap();
        }

        fn problems(&self) -> Vec<String> {
            read(self.0.path()).expect_err("refused").iter().map(ToString::to_string).collect()
        }
    }

    #[test]
    fn a_charm_survives_packing() {
        let place = TestCharm::new();
        place.file("hooks/start", "#!/bin/sh\n", 0o755);
        place.file("notes", "n", 0o600);
        place.link("hooks/stop", "start");
        let (charm, entries) = read(place.0.path()).unwrap();
        assert_eq!(charm.url.to_string(), "local:web-1");
        let copy = tempfile::tempdir().unwrap();
        let copy = copy.path().join("charm");
        write(&copy, &archive::unpack(&archive::pack(&entries)).unwrap(), None).unwrap();
        assert_eq!(read(&copy).unwrap().1, entries);
        // A second write replaces the first, whatever its state.
        fs::write(copy.join("more"), "x").unwrap();
        write(&copy, &entries, None).unwrap();
        assert_eq!(read(&copy).unwrap().1, entries);
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let place = TestCharm::new();
        place.file("metadata.yaml", "name: web\nsummary: s\n", 0o644);
        place.file("hooks/start", "#!/bin/sh\n", 0o644);
        place.file("hooks/exposed", "#!/bin/sh\n", 0o600);
        place.link("etc", "/etc");
        place.link("up", "..");
        let pipe = place.0.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        assert_eq!(
            place.problems(),
            [
                "metadata.yaml has no description",
                "etc is a link that cannot be kept: it leads out of the charm",
                "pipe is neither a file nor a directory",
                "up is a link that cannot be kept: it leads out of the charm",
                "hooks/start is not executable",
                "hooks/exposed is not executable",
            ]
        );
    }

    #[test]
    fn oversized_charms_are_refused_before_they_are_read() {
        let place = TestCharm::new();
        // A sparse file of two gigabytes.
        File::create(place.0.path().join("big")).unwrap().set_len(2 << 30).unwrap();
        assert_eq!(place.problems(), ["the charm has more than 16777216 bytes"]);
        let farm = TestCharm::new();
        for n in 0..=MAX_ENTRIES {
            farm.link(&format!("link-{n:05}"), "metadata.yaml");
        }
        assert_eq!(farm.problems(), ["the charm has more than 1000 files"]);
        let deep = TestCharm::new();
        deep.file(&format!("{}f", "d/".repeat(MAX_DEPTH)), "", 0o644);
        assert!(deep.problems()[0].contains("deeper than 16"), "{:?}", deep.problems());
    }
}
