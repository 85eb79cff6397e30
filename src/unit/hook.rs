//! One run of one hook, in a process of its own that does nothing else: so the hook's limits are kept and its end is told
//! also when the agent that ordered it is gone. The order and the end are files; which hook to run and what its end means
//! is decided elsewhere. Blocking, because there is one thing to wait for.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};

use super::workflow::Ended;

/// A hook that is asked to end has this long before it is made to.
const GRACE: Duration = Duration::from_secs(5);

/// What is kept of a hook's output while it runs. More is thrown away, the oldest first.
pub const MAX_OUTPUT_BYTES: u64 = 1024 * 1024;

/// What is told of the output of a hook that failed.
const TAIL_BYTES: u64 = 4096;
const TAIL_LINES: usize = 10;
const TAIL_LINE_CHARS: usize = 200;

/// A hook that took its agent down with it, or a machine that lost its power, is tried again; but not for ever.
const MAX_TRIES: u64 = 2;

/// How often a running hook is looked at: often at first, because most are short.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const SLOWEST_LOOK: Duration = Duration::from_millis(50);

/// What an order or an end may have at most.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// What a run is made of. Holds no secret: the credentials are in a file that is only named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub program: PathBuf,
    pub directory: PathBuf,
    /// All of the hook's environment.
    pub variables: BTreeMap<String, String>,
    /// User and group; those of the agent if there are none.
    pub user: Option<(u32, u32)>,
    pub limit_ms: u64,
    pub log: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Wire {
    /// None if all is well.
    reason: Option<String>,
    output: String,
}

/// The files of one unit's runs, in a directory that its hooks have no business in.
#[derive(Debug, Clone)]
pub struct Runs(PathBuf);

/// How a run is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Nothing,
    Running,
    Over(Ended),
}

impl Runs {
    pub fn at(directory: PathBuf) -> Self {
        Self(directory)
    }

    fn file(&self, number: u64, kind: &str) -> PathBuf {
        self.0.join(format!("{number}.{kind}"))
    }

    fn lock(&self) -> io::Result<File> {
        OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(self.0.join("lock"))
    }

    /// Writes an order down. What is left of runs before is removed.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn order(&self, number: u64, order: &Order) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).create(&self.0)?;
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            let name = entry.file_name();
            let old = name.to_str().and_then(|name| name.split_once('.')).map(|(number, _)| number.parse());
            if matches!(old, Some(Ok::<u64, _>(old)) if old < number) {
                fs::remove_file(entry.path())?;
            }
        }
        replace(&self.file(number, "order"), &serde_json::to_vec(order)?)
    }

    /// Whether a run was begun, as far as can be told: its processes may still be there.
    pub fn was_tried(&self, number: u64) -> bool {
        self.file(number, "tries").exists()
    }

    /// What became of a run.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn find(&self, number: u64) -> io::Result<Found> {
        // Asked first: a run that ends in between is found to be over.
        let running = match self.lock().map(|lock| lock.try_lock()) {
            Ok(Ok(())) => false,
            Ok(Err(TryLockError::WouldBlock)) => true,
            Ok(Err(TryLockError::Error(error))) => return Err(error),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(error),
        };
        if let Some(bytes) = read(&self.file(number, "end"))? {
            let wire: Wire = serde_json::from_slice(&bytes)?;
            return Ok(Found::Over(match wire.reason {
                None => Ended::Well,
                Some(reason) => Ended::Badly { reason, output: wire.output },
            }));
        }
        if running {
            return Ok(Found::Running);
        }
        match fs::metadata(self.file(number, "tries")) {
            Ok(tries) if tries.len() >= MAX_TRIES => Ok(Found::Over(Ended::Badly {
                reason: format!("was interrupted {MAX_TRIES} times, together with its agent"),
                output: String::new(),
            })),
            _ => Ok(Found::Nothing),
        }
    }

    /// Asks a run to end soon.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn stop(&self, number: u64) -> io::Result<()> {
        File::create(self.file(number, "stop")).map(drop)
    }

    /// Does what was ordered, unless somebody does it already or it is done.
    ///
    /// # Errors
    /// Those of the file system: with a full disk, say, the end of a hook cannot be told.
    pub fn carry_out(&self, number: u64) -> io::Result<()> {
        let lock = self.lock()?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if self.file(number, "end").exists() {
            return Ok(());
        }
        let bytes = read(&self.file(number, "order"))?.ok_or(io::ErrorKind::NotFound)?;
        let order: Order = serde_json::from_slice(&bytes)?;
        let mut tries = OpenOptions::new().create(true).append(true).open(self.file(number, "tries"))?;
        tries.write_all(b".")?;
        let ended = run(&order, &self.file(number, "stop"));
        let wire = match ended {
            Ended::Well => Wire { reason: None, output: String::new() },
            Ended::Badly { reason, output } => Wire { reason: Some(reason), output },
        };
        replace(&self.file(number, "end"), &serde_json::to_vec(&wire)?)
    }
}

/// A file is there whole or not at all.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, bytes)?;
    fs::rename(aside, path)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(bytes))
}

fn badly(reason: impl Into<String>) -> Ended {
    Ended::Badly { reason: reason.into(), output: String::new() }
}

fn run(order: &Order, stop: &Path) -> Ended {
    // Read as well, for the last lines; appended to, so that cutting it leaves no hole.
    let opened = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(&order.log);
    let mut log = match opened {
        Ok(log) => log,
        Err(error) => return badly(format!("its output cannot be kept: {error}")),
    };
    let begin = log.metadata().map_or(0, |log| log.len());
    let child = match start(order, &log) {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return badly("is not executable"),
        Err(error) => return badly(format!("cannot be run: {error}")),
    };
    let reason = match wait(child, order, stop, &log) {
        Ok(Over::By(status)) if status.success() => return Ended::Well,
        Ok(Over::By(status)) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}{}", signal_name(signal)),
            (None, None) => "ended in a way that nobody knows".to_owned(),
        },
        Ok(Over::Late) => format!("ran for more than {} s and was ended", order.limit_ms.div_ceil(1000)),
        Ok(Over::Stopped) => "was ended, because its unit was removed".to_owned(),
        Err(error) => format!("cannot be waited for: {error}"),
    };
    // The last lines are a help; without them the reason stands all the same.
    let output = tail(&mut log, begin).unwrap_or_default();
    Ended::Badly { reason, output }
}

fn start(order: &Order, log: &File) -> io::Result<Child> {
    let mut command = Command::new(&order.program);
    command
        .current_dir(&order.directory)
        .env_clear()
        .envs(&order.variables)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?)
        .process_group(0);
    if let Some((user, group)) = order.user {
        command.uid(user).gid(group);
    }
    let patience = Instant::now() + GRACE;
    loop {
        match command.spawn() {
            // Written a moment ago, and still open in a process that another hook was just started with.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && Instant::now() < patience => {
                sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

enum Over {
    By(ExitStatus),
    Late,
    Stopped,
}

fn wait(mut child: Child, order: &Order, stop: &Path, log: &File) -> io::Result<Over> {
    let limit = Instant::now() + Duration::from_millis(order.limit_ms);
    let mut pause = FIRST_LOOK;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Over::By(status));
        }
        if log.metadata()?.len() > MAX_OUTPUT_BYTES {
            log.set_len(0)?;
        }
        let late = Instant::now() >= limit;
        if late || stop.exists() {
            end(&mut child)?;
            return Ok(if late { Over::Late } else { Over::Stopped });
        }
        sleep(pause);
        pause = (pause * 2).min(SLOWEST_LOOK);
    }
}

/// Asks the hook and everything that it started and that is still in its group to end, and then makes it.
fn end(child: &mut Child) -> io::Result<()> {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let tell = |signal| {
        if let Some(group) = group {
            // All of them may have ended by themselves meanwhile.
            let _ = kill_process_group(group, signal);
        }
    };
    tell(Signal::TERM);
    let patience = Instant::now() + GRACE;
    while Instant::now() < patience && child.try_wait()?.is_none() {
        sleep(Duration::from_millis(10));
    }
    tell(Signal::KILL);
    child.wait().map(drop)
}

fn signal_name(number: i32) -> &'static str {
    match number {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        6 => " (SIGABRT)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// The last lines of what was written since `begin`, fit to be shown.
fn tail(log: &mut File, begin: u64) -> io::Result<String> {
    let end = log.metadata()?.len();
    // Cut meanwhile: all of it is of this run.
    let begin = if begin > end { 0 } else { begin };
    log.seek(SeekFrom::Start(begin.max(end.saturating_sub(TAIL_BYTES))))?;
    let mut bytes = Vec::new();
    log.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let shown = lines[lines.len().saturating_sub(TAIL_LINES)..].iter().map(|line| {
        let plain = line.chars().filter(|c| !c.is_control()).take(TAIL_LINE_CHARS);
        plain.chain(['\n']).collect::<String>()
    });
    Ok(shown.collect())
}

#[cfg(test)]
#[path = "hook_tests.rs"]
mod tests;
