//! An operator: a home directory, a store, and the programs run with them. Checks exit codes,
//! stdout and stderr.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::scenario::Site;
use crate::harness::{binary, golden, groups};

pub(crate) struct Operator {
    home: TempDir,
    store: String,
}

/// One command line and its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) line: String,
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Operator {
    pub(crate) fn at(site: &Site) -> Self {
        Self::with_store(&site.connect_string())
    }

    /// An operator with a bootstrapped environment.
    pub(crate) fn bootstrapped(site: &Site) -> Self {
        let operator = Self::at(site);
        operator.does(&["bootstrap"]);
        operator
    }

    pub(crate) fn with_store(store: &str) -> Self {
        let home = tempfile::tempdir().expect("a home");
        // Hooks of other users have to reach their files.
        for place in [home.path(), &home.path().join("data")] {
            fs::create_dir_all(place).expect("a directory");
            fs::set_permissions(place, fs::Permissions::from_mode(0o755)).expect("permissions");
        }
        golden::placeholder(home.path().to_str().expect("UTF-8"), "HOME");
        golden::placeholder(store, "STORE");
        golden::placeholder(store.split('/').next().unwrap_or_default(), "HOSTS");
        Self { home, store: store.to_owned() }
    }

    /// Runs `work` with the same home and another address of the store.
    pub(crate) fn over<R>(&self, store: &str, work: impl FnOnce(&dyn Fn(&[&str]) -> Output) -> R) -> R {
        work(&|args| output_of(self.command("juju").env("JUJU_ZOOKEEPER", store).args(args)))
    }

    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    pub(crate) fn config(&self, file: &str) -> PathBuf {
        self.home().join("config/portcullis").join(file)
    }

    /// The list of UIDs of units, separate for each operator.
    pub(crate) fn users(&self) -> PathBuf {
        self.home().join("data/portcullis-units/users.json")
    }

    /// A program with this operator's environment variables only.
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

    pub(crate) fn juju(&self, args: &[&str]) -> Output {
        output_of(self.command("juju").args(args))
    }

    /// Runs a command that must succeed.
    #[track_caller]
    pub(crate) fn does(&self, args: &[&str]) -> Output {
        let output = self.juju(args);
        assert_eq!(output.code, 0, "juju {args:?}: {output:?}");
        output
    }

    /// Runs a command that must fail with one line of error that contains `text`, and at most one
    /// hint.
    #[track_caller]
    pub(crate) fn is_refused(&self, args: &[&str], code: i32, text: &str) -> Output {
        let output = self.juju(args);
        output.is_refusal(code, text);
        output
    }

    pub(crate) fn status(&self) -> Value {
        let output = self.does(&["status", "--format", "json"]);
        serde_json::from_str(&output.stdout).expect("JSON")
    }

    /// Creates a charm directory.
    pub(crate) fn charm(&self, name: &str, metadata: &str) -> String {
        let directory = self.home().join("charms").join(name);
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("metadata.yaml"), metadata).expect("a file");
        directory.to_str().expect("UTF-8").to_owned()
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // All agents have stopped. The names of their control groups are in the home, which is
        // removed next.
        groups::end_below(self.home());
        if env!("CARGO_CRATE_NAME") == "cli" && !std::thread::panicking() {
            golden::all_compared();
        }
    }
}

impl Output {
    /// As [`Output::fails_with`]; the whole output goes to the golden file of this test.
    #[track_caller]
    pub(crate) fn is_refusal(&self, code: i32, text: &str) {
        self.fails_with(code, text);
        golden::record(&self.line, &self.stdout, &self.stderr, self.code);
    }

    /// Asserts one line of error that contains `text`, with at most one hint after it.
    #[track_caller]
    pub(crate) fn fails_with(&self, code: i32, text: &str) {
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

pub(crate) fn output_of(command: &mut Command) -> Output {
    let std::process::Output { status, stdout, stderr } = command.output().expect("a program that runs");
    Output {
        line: line_of(command),
        code: status.code().expect("an exit code"),
        stdout: String::from_utf8(stdout).expect("UTF-8"),
        stderr: String::from_utf8(stderr).expect("UTF-8"),
    }
}

/// The program's name and its arguments, as they would be typed.
pub(crate) fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().expect("a program").to_string_lossy();
    let args = command.get_args().map(|arg| shown(&arg.to_string_lossy()));
    std::iter::once(program.into_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

pub(crate) fn fixture_charm(name: &str) -> String {
    format!("{}/fixtures/charms/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Commands with their output, as in a terminal.
pub(crate) struct Transcript<'a> {
    operator: &'a Operator,
    text: String,
}

impl<'a> Transcript<'a> {
    pub(crate) fn of(operator: &'a Operator) -> Self {
        Self { operator, text: String::new() }
    }

    pub(crate) fn juju(&mut self, args: &[&str]) {
        let output = self.operator.juju(args);
        self.text.push_str(&golden::entry(&output.line, &output.stdout, &output.stderr, output.code));
    }

    /// Compares with the golden file of that name.
    pub(crate) fn is(self, name: &str) {
        golden::check(name, &self.text);
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
