//! Runs the commands of a page in one shell, from top to bottom, as a reader would: with a home
//! directory, a network, a process table and system directories of their own, so that documented
//! ports and paths can be used as they are and the host is not changed. Needs root or user
//! namespaces.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::time::Duration;

use rustix::process::geteuid;
use tempfile::TempDir;

use crate::harness::{binary, groups, poll_until};
use crate::page::{Command, Expected, Page, root};

/// Only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(480);

/// Defines what the script uses. The paths that are mounted over exist on every Linux with systemd.
const PRELUDE: &str = r#"
deadline=120
mount --bind "$HOME/../lib" /var/lib
mount -t tmpfs tmpfs /etc/systemd/system
ip link set lo up
cd

failed() {
    echo "line $1: $2"
    for log in "$LOGS"/*; do echo "--- $log"; tail -n 30 "$log"; done
    exit 1
}

exited() { # LINE EXPECTED ACTUAL
    [ "$2" = "$3" ] || failed "$1" "exit code $3 instead of $2"
}

repeat_until() { # LINE TEXT; the command is on standard input
    local command shown end=$((SECONDS + deadline))
    command=$(cat)
    until shown=$(eval "$command" 2>&1 </dev/null); [[ $shown == *"$2"* ]]; do
        [ $SECONDS -lt $end ] || failed "$1" "no '$2' in: $shown"
        sleep 0.05
    done
}

logged_until() { # LINE TEXT PROCESS
    local end=$((SECONDS + deadline))
    until grep -qF -- "$2" "$LOGS/$1"; do
        kill -0 "$3" 2>/dev/null || failed "$1" "ended without '$2'"
        [ $SECONDS -lt $end ] || failed "$1" "no '$2' in its output"
        sleep 0.05
    done
}
"#;

pub(crate) fn run(page: &Page) {
    let place = PageDirs::new();
    let script = place.dir.path().join("script");
    fs::write(&script, script_of(&page.commands())).unwrap();
    let output = place.dir.path().join("output");
    let file = File::create(&output).unwrap();
    let mut unshare = Process::new("unshare");
    if !geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    unshare.args("--net --mount --pid --fork --kill-child=KILL --mount-proc".split(' '));
    unshare.args(["bash".as_ref(), script.as_os_str()]).env_clear().envs(place.variables());
    unshare.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut child = unshare.spawn().unwrap();
    let status = poll_until("end of the page", DEADLINE, || child.try_wait().unwrap());
    let shown = fs::read_to_string(&output).unwrap();
    assert!(status.success(), "{}: {status}\n{shown}", page.path);
}

fn script_of(commands: &[Command]) -> String {
    let mut script = PRELUDE.to_owned();
    for Command { line, text, expected } in commands {
        let in_background = text.strip_suffix('&').map(str::trim_end);
        script.push_str(&match (in_background, expected) {
            (Some(text), Expected::Exit(_)) => format!("{text} >\"$LOGS/{line}\" 2>&1 &\n"),
            (Some(text), Expected::Shows(shown)) => {
                format!("{text} >\"$LOGS/{line}\" 2>&1 &\nlogged_until {line} {} $!\n", quoted(shown))
            }
            (None, Expected::Exit(code)) => format!("{text}\nexited {line} {code} $?\n"),
            (None, Expected::Shows(shown)) => {
                format!("repeat_until {line} {} <<'END OF COMMAND'\n{text}\nEND OF COMMAND\n", quoted(shown))
            }
        });
    }
    script
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The directories of one page. Dropping it ends what its hooks left in control groups.
struct PageDirs {
    dir: TempDir,
}

impl PageDirs {
    fn new() -> Self {
        let place = Self { dir: tempfile::Builder::new().prefix("portcullis-docs-").tempdir().unwrap() };
        // Hooks of other users pass through.
        fs::set_permissions(place.dir.path(), Permissions::from_mode(0o755)).unwrap();
        for name in ["home", "lib", "logs"] {
            fs::create_dir(place.dir.path().join(name)).unwrap();
        }
        copy(&root().join("fixtures/charms"), &place.dir.path().join("home/fixtures/charms"));
        place
    }

    fn variables(&self) -> [(&'static str, String); 4] {
        let programs = binary("portcullis").parent().unwrap().display().to_string();
        // The agents find the hook tools beside their own program.
        binary("open-port");
        let path = std::env::var("PATH").unwrap();
        let below = |name: &str| self.dir.path().join(name).display().to_string();
        [
            ("HOME", below("home")),
            ("LOGS", below("logs")),
            ("PATH", format!("{programs}:{path}:/usr/sbin:/sbin")),
            ("NO_COLOR", "1".to_owned()),
        ]
    }
}

impl Drop for PageDirs {
    fn drop(&mut self) {
        groups::end_below(self.dir.path());
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).unwrap();
        }
    }
}
