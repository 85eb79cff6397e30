//! Someone who types: a home of their own, a store to work on, and an eye for exit codes and both outputs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::scenario::Site;
use crate::harness::{binary, groups};

pub(crate) struct Operator {
    home: TempDir,
    store: String,
}

/// What came of one command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Came {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Operator {
    pub(crate) fn at(site: &Site) -> Self {
        Self::with_store(&site.connect_string())
    }

    /// One who has made an environment there.
    pub(crate) fn bootstrapped(site: &Site) -> Self {
        let operator = Self::at(site);
        operator.does(&["bootstrap"]);
        operator
    }

    pub(crate) fn with_store(store: &str) -> Self {
        let home = tempfile::tempdir().expect("a home");
        // Hooks of other users have to get to their files.
        for place in [home.path(), &home.path().join("data")] {
            fs::create_dir_all(place).expect("a directory");
            fs::set_permissions(place, fs::Permissions::from_mode(0o755)).expect("an open door");
        }
        Self { home, store: store.to_owned() }
    }

    /// The same person with the same memory, by another way to the store.
    pub(crate) fn over<R>(&self, store: &str, work: impl FnOnce(&dyn Fn(&[&str]) -> Came) -> R) -> R {
        work(&|args| came(self.command("juju").env("JUJU_ZOOKEEPER", store).args(args)))
    }

    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    pub(crate) fn config(&self, file: &str) -> PathBuf {
        self.home().join("config/portcullis").join(file)
    }

    /// Who was given to units, on a host that this person has alone.
    pub(crate) fn users(&self) -> PathBuf {
        self.home().join("data/portcullis-units/users.json")
    }

    /// A program with this person's environment and nobody else's.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(binary(program));
        command
            .env_clear()
            .env("HOME", self.home())
            .env("XDG_CONFIG_HOME", self.home().join("config"))
            .env("XDG_DATA_HOME", self.home().join("data"))
            .env("PORTCULLIS_UNIT_USERS", self.users())
            .env("PATH", std::env::var_os("PATH").expect("a PATH"))
            .env("JUJU_ZOOKEEPER", &self.store)
            .current_dir(self.home())
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn juju(&self, args: &[&str]) -> Came {
        came(self.command("juju").args(args))
    }

    /// A command that must succeed.
    #[track_caller]
    pub(crate) fn does(&self, args: &[&str]) -> Came {
        let came = self.juju(args);
        assert_eq!(came.code, 0, "juju {args:?}: {came:?}");
        came
    }

    /// A command that must fail, and say so in one line that contains `text`, with at most a hint behind it.
    #[track_caller]
    pub(crate) fn is_refused(&self, args: &[&str], code: i32, text: &str) -> Came {
        let came = self.juju(args);
        came.is_refusal(code, text);
        came
    }

    pub(crate) fn status(&self) -> Value {
        let came = self.does(&["status", "--format", "json"]);
        serde_json::from_str(&came.stdout).expect("JSON")
    }

    /// A charm directory of this person's own.
    pub(crate) fn charm(&self, name: &str, metadata: &str) -> String {
        let directory = self.home().join("charms").join(name);
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("metadata.yaml"), metadata).expect("a file");
        directory.to_str().expect("UTF-8").to_owned()
    }

    /// A text without what differs from run to run.
    pub(crate) fn without_places(&self, text: &str) -> String {
        text.replace(self.home().to_str().expect("UTF-8"), "HOME")
            .replace(&self.store, "STORE")
            .replace(self.store.split('/').next().unwrap_or_default(), "HOSTS")
            .replace(env!("CARGO_MANIFEST_DIR"), "REPO")
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // Agents are gone by now, and with the home goes what says which groups were theirs.
        groups::end_below(self.home());
    }
}

impl Came {
    #[track_caller]
    pub(crate) fn is_refusal(&self, code: i32, text: &str) {
        let lines: Vec<&str> = self.stderr.lines().collect();
        let one_line =
            matches!(lines[..], [error] | [error, _] if error.starts_with("error: ") && error.contains(text));
        let hinted = lines.get(1).is_none_or(|line| line.starts_with("hint: "));
        assert!(
            self.code == code && one_line && hinted && self.stdout.is_empty(),
            "wanted {code}, {text}: {self:?}"
        );
        assert!(!self.stderr.trim_end_matches('\n').chars().any(|c| c != '\n' && c.is_control()), "{self:?}");
    }
}

pub(crate) fn came(command: &mut Command) -> Came {
    let Output { status, stdout, stderr } = command.output().expect("a program that runs");
    Came {
        code: status.code().expect("an exit code"),
        stdout: String::from_utf8(stdout).expect("UTF-8"),
        stderr: String::from_utf8(stderr).expect("UTF-8"),
    }
}

pub(crate) fn fixture_charm(name: &str) -> String {
    format!("{}/fixtures/charms/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Commands with what came of them, as they would stand in a terminal.
pub(crate) struct Transcript<'a> {
    operator: &'a Operator,
    text: String,
}

impl<'a> Transcript<'a> {
    pub(crate) fn of(operator: &'a Operator) -> Self {
        Self { operator, text: String::new() }
    }

    pub(crate) fn juju(&mut self, args: &[&str]) {
        let came = self.operator.juju(args);
        let typed: Vec<String> = args.iter().map(|arg| shown(arg)).collect();
        self.text.push_str(&format!("$ juju {}\n{}{}", typed.join(" "), came.stdout, came.stderr));
        if came.code != 0 {
            self.text.push_str(&format!("[exit {}]\n", came.code));
        }
    }

    /// Compares with the file of that name; `BLESS=1` writes it anew.
    pub(crate) fn is(self, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/transcripts").join(name);
        let text = self.operator.without_places(&self.text);
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &text).expect("a transcript");
        }
        let wanted = fs::read_to_string(&path).expect("a transcript");
        assert_eq!(text, wanted, "{name} differs; BLESS=1 writes it anew");
    }
}

fn shown(arg: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=".contains(c);
    match arg {
        long if long.len() > 120 && !long.contains('/') => format!("{}...", &long[..20]),
        plain_arg if !plain_arg.is_empty() && plain_arg.chars().all(plain) => plain_arg.to_owned(),
        other => format!("{other:?}"),
    }
}
