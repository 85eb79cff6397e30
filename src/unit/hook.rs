//! Runs one hook in a supervising process of its own, which enforces the time limit and records the
//! result even if the agent that requested the run is gone. The specification and the result are
//! files. Other modules decide which hook runs and what its result means. Blocking, because there
//! is only one thing to wait for.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Gid, Uid, fchown};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::set_no_new_privs;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::cgroup::{self, Enforced};
use super::hook_log::{self, Log, Output};
use super::limits::HookLimits;
use super::workflow::Ended;
use crate::runtime::atomic_file;
use crate::runtime::resource_limits::{limit_open_files, limit_processes};
use watch::{HookEnd, Watch};

mod watch;

/// How long the start of a program that another process still writes to is retried.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a hook is started again whose result was lost, for example because the machine lost
/// power.
const MAX_TRIES: u64 = 2;

/// The size of the reserve: enough for a specification, a result and a state, with a block each for
/// their names.
const RESERVE_BYTES: usize = 64 * 1024;

/// The end of the name of a specification. Older versions read it, too.
const SPEC: &str = "order";

/// The most bytes of a specification or a result.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// The specification of a run. Contains no secret: the credentials are in a file that it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookSpec {
    pub program: PathBuf,
    pub directory: PathBuf,
    /// The complete environment of the hook.
    pub variables: BTreeMap<String, String>,
    /// User and group; `None` means those of the agent.
    pub user: Option<(u32, u32)>,
    pub limit_ms: u64,
    pub log: PathBuf,
    /// The limit of open files; `None` means that of the agent.
    #[serde(default)]
    pub open_files: Option<u64>,
    /// Limits of all of the unit's processes; `None` in specifications of older versions.
    #[serde(default)]
    pub limits: Option<HookLimits>,
    /// Whether no other unit runs as this user, so that a limit for the user is one for the unit.
    #[serde(default)]
    pub has_own_user: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Wire {
    /// `None` if the hook succeeded.
    reason: Option<String>,
    output: String,
    /// Missing in results of older versions.
    #[serde(default)]
    not_begun: bool,
}

/// The files of one unit's runs, in a directory that its hooks cannot access.
#[derive(Debug, Clone)]
pub struct Runs(PathBuf);

/// The state of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    Nothing,
    Running,
    Finished(Ended),
    /// Started too often without a result, and given up. The last attempt may still run.
    Lost(Ended),
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

    /// Writes a specification, and removes the files of earlier runs.
    pub fn write_spec(&self, number: u64, spec: &HookSpec) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).create(&self.0)?;
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            let name = entry.file_name();
            let old = name.to_str().and_then(|name| name.split_once('.')).map(|(number, _)| number.parse());
            if matches!(old, Some(Ok::<u64, _>(old)) if old < number) {
                fs::remove_file(entry.path())?;
            }
        }
        let bytes = serde_json::to_vec(spec)?;
        self.with_reserve(|| replace(&self.file(number, SPEC), &bytes))
    }

    /// Returns the highest number of a run that has files; 0 if there is none.
    pub fn last(&self) -> io::Result<u64> {
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.split_once('.')?.0.parse().ok();
        fs::read_dir(&self.0)?
            .try_fold(0, |last, entry| Ok(number(entry?).map_or(last, |found: u64| found.max(last))))
    }

    /// Whether a run may have started: its processes may still exist.
    pub fn was_tried(&self, number: u64) -> bool {
        self.file(number, "tries").exists()
    }

    /// Returns the state of a run.
    pub fn find(&self, number: u64) -> io::Result<RunState> {
        // Checked first: a run that ends in between is then found to have ended.
        let running = match self.lock().map(|lock| lock.try_lock()) {
            Ok(Ok(())) => false,
            Ok(Err(TryLockError::WouldBlock)) => true,
            Ok(Err(TryLockError::Error(error))) => return Err(error),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(RunState::Nothing),
            Err(error) => return Err(error),
        };
        if let Some(bytes) = read(&self.file(number, "end"))? {
            return Ok(RunState::Finished(match serde_json::from_slice(&bytes) {
                Ok(Wire { reason: None, .. }) => Ended::Well,
                Ok(Wire { reason: Some(reason), not_begun: true, .. }) => Ended::NotBegun { reason },
                Ok(Wire { reason: Some(reason), output, .. }) => Ended::Badly { reason, output },
                // Another read would fail in the same way; the operator decides.
                Err(error) => Ended::badly(format!("its result cannot be read: {error}")),
            }));
        }
        if running {
            return Ok(RunState::Running);
        }
        match fs::metadata(self.file(number, "tries")) {
            Ok(tries) if tries.len() >= MAX_TRIES => Ok(RunState::Lost(Ended::Badly {
                reason: format!("was interrupted {MAX_TRIES} times without a result"),
                output: String::new(),
            })),
            _ => Ok(RunState::Nothing),
        }
    }

    /// Reserves a little disk space, so that results of hooks can be recorded when the disk is
    /// full.
    pub fn reserve(&self) {
        let path = self.0.join("reserve");
        if !path.exists() {
            // Without the reserve, the unit only loses this protection.
            let _ = fs::write(path, [1; RESERVE_BYTES]);
        }
    }

    /// Frees the reserve if `error` is about a full disk. Returns whether there was a reserve.
    fn release(&self, error: &io::Error) -> bool {
        is_full(error) && fs::remove_file(self.0.join("reserve")).is_ok()
    }

    /// Runs work that needs a little disk space, and frees the reserve if the disk is full.
    ///
    /// # Errors
    /// Those of the work.
    pub fn with_reserve<R>(&self, work: impl Fn() -> io::Result<R>) -> io::Result<R> {
        match work() {
            Err(error) if self.release(&error) => work(),
            done => done,
        }
    }

    /// Requests the end of a run.
    pub fn stop(&self, number: u64) -> io::Result<()> {
        self.with_reserve(|| File::create(self.file(number, "stop")).map(drop))
    }

    /// Moves this process, and thereby the hook that it will run, into the unit's control group if
    /// one is possible, and sets the unit's limits.
    pub fn enter_group(&self, number: u64) {
        // An unreadable specification is refused later, when it is run.
        let bytes = read(&self.file(number, SPEC)).ok().flatten().unwrap_or_default();
        let spec: Option<HookSpec> = serde_json::from_slice(&bytes).ok();
        let limits = spec.as_ref().and_then(|spec| spec.limits);
        let limits = limits.unwrap_or(HookLimits { pids: None, memory_bytes: None });
        let enforced = cgroup::join(&self.0, limits).unwrap_or_else(|error| {
            // A process that clears its environment is not found again when the unit is removed.
            debug!(%error, "no control group for the hook");
            Enforced { pids: false, memory: false }
        });
        if let Some(pids) = limits.pids
            && !enforced.pids
            && spec.is_some_and(|spec| spec.has_own_user)
            && let Err(error) = limit_processes(pids)
        {
            warn!(%error, "the number of processes is not limited");
        }
    }

    /// Runs the specified hook, unless it already runs or has ended. If processes that the hook
    /// started can still print, `keep` receives the pipe and the log for their output.
    ///
    /// # Errors
    /// Errors of the file system: with a full disk, for example, the result cannot be recorded.
    pub fn carry_out(
        &self,
        number: u64,
        keep: impl FnOnce(PipeReader, &Path) -> io::Result<()>,
    ) -> io::Result<()> {
        let lock = self.lock()?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if self.file(number, "end").exists() {
            return Ok(());
        }
        let bytes = read(&self.file(number, SPEC))?.ok_or(io::ErrorKind::NotFound)?;
        let spec: HookSpec = serde_json::from_slice(&bytes)?;
        self.with_reserve(|| {
            let tries = OpenOptions::new().create(true).append(true).open(self.file(number, "tries"));
            tries?.write_all(b".")
        })?;
        let (ended, rest) = run(&spec, &self.file(number, "stop"));
        let wire = match ended {
            Ended::Well => Wire { reason: None, output: String::new(), not_begun: false },
            Ended::Badly { reason, output } => Wire { reason: Some(reason), output, not_begun: false },
            Ended::NotBegun { reason } => {
                Wire { reason: Some(reason), output: String::new(), not_begun: true }
            }
        };
        let bytes = serde_json::to_vec(&wire)?;
        let recorded = self.with_reserve(|| replace(&self.file(number, "end"), &bytes));
        if let Some(Err(error)) = rest.map(|rest| keep(rest, &spec.log)) {
            // The hook's result stands; only the output of its remaining processes is lost.
            warn!(%error, "output of processes that the hook left running is lost");
        }
        recorded
    }
}

/// The program that keeps reading the pipe. It is small, because every service that prints has its
/// own.
const READER: &str = "portcullis-keep-log";

/// Starts the reader with termination signals ignored: a process that is asked to end may still
/// print, and would be killed by a closed pipe. The reader ends when no process can write any more.
/// Ignored signals stay ignored across `exec`.
const IGNORE_SIGNALS: &str = r#"trap '' TERM INT HUP; exec "$0" keep-log "$1""#;

/// Starts a process that writes the output from the pipe to the log, so that the caller waits only
/// for the hook and not for processes that it left running.
///
/// # Errors
/// If it cannot be started.
pub fn keep_on(pipe: PipeReader, log: &Path) -> io::Result<()> {
    // If the small program is missing, this program does the same; this path works even if its file
    // was replaced.
    let own = || PathBuf::from(format!("/proc/{}/exe", std::process::id()));
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(READER));
    let reader = beside.filter(|reader| reader.is_file()).unwrap_or_else(own);
    let mut keeper = Command::new("/bin/sh");
    keeper.args(["-c", IGNORE_SIGNALS]).arg(reader).arg(log);
    keeper.stdin(pipe).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut keeper = keeper.spawn()?;
    // The reader confirms that it reads; from then on the remaining processes may be asked to end.
    let ready = keeper.stdout.take().map(|mut stdout| stdout.read_exact(&mut [0]));
    ready.unwrap_or_else(|| Err(io::ErrorKind::BrokenPipe.into()))
}

/// Writes standard input to the log until no process can write to it any more. Confirms on standard
/// output before it starts, because the caller waits for that. Kept small, see above.
///
/// # Errors
/// If the log cannot be opened, or the pipe cannot be read.
pub fn keep_standard_input(log: &Path) -> io::Result<()> {
    // Without the buffers of the standard handles.
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    (&stdout).write_all(b"\n")?;
    hook_log::keep(File::from(io::stdin().as_fd().try_clone_to_owned()?), log)
}

/// Whether the error means that the disk or the quota is full.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Writes a file completely or not at all. The name is not synced: a lost run is repeated.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    atomic_file::build_aside(path, |aside| {
        let mut file = File::create(aside)?;
        file.write_all(bytes)?;
        // After a power cut the name must not exist without the contents.
        file.sync_all()
    })
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

fn not_begun(reason: impl Into<String>) -> Ended {
    Ended::NotBegun { reason: reason.into() }
}

/// Runs a hook to its end. Returns the pipe if other processes may still write to it.
fn run(spec: &HookSpec, stop: &Path) -> (Ended, Option<PipeReader>) {
    let opened = Log::open(&spec.log).and_then(|log| {
        let (reader, writer) = io::pipe()?;
        Ok((Output::new(reader, log)?, writer))
    });
    let (mut output, writer) = match opened {
        Ok(opened) => opened,
        Err(error) => return (not_begun(format!("its output cannot be kept: {error}")), None),
    };
    let mut child = match start(spec, writer) {
        Ok(child) => child,
        // The kernel returns the same error for a directory or an interpreter that the hook's user
        // cannot access.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_executable(&spec.program) => {
            return (not_begun("is not executable"), None);
        }
        Err(error) => return (not_begun(format!("cannot be run: {error}")), None),
    };
    let end = Watch::new(&mut child, &mut output).and_then(|mut watch| watch.wait(spec, stop));
    let reason = match end {
        Ok(HookEnd::Exited(status)) if status.success() => return (Ended::Well, output.rest()),
        Ok(HookEnd::Exited(status)) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}{}", signal_name(signal)),
            (None, None) => "ended in a way that nobody knows".to_owned(),
        },
        Ok(HookEnd::TimedOut) => {
            format!("ran for more than {} s and was killed", spec.limit_ms.div_ceil(1000))
        }
        Ok(HookEnd::Stopped) => "was ended, because its unit was removed".to_owned(),
        Err(error) => {
            abandon(&mut child);
            format!("cannot be waited for, and was killed: {error}")
        }
    };
    (Ended::Badly { reason, output: output.tail() }, output.rest())
}

/// Whether any execute bit is set. A file that cannot be examined counts as executable.
fn is_executable(program: &Path) -> bool {
    fs::metadata(program).map_or(true, |found| found.permissions().mode() & 0o111 != 0)
}

/// Kills a hook that cannot be supervised: it must not run beside the next one.
fn abandon(child: &mut Child) {
    // After the hook has ended, its process id may belong to another process.
    if let (Ok(None), Ok(group)) = (child.try_wait(), pid(child)) {
        // It may have ended by itself meanwhile.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.wait();
    }
}

fn start(spec: &HookSpec, output: PipeWriter) -> io::Result<Child> {
    if let Some((user, group)) = spec.user {
        // For `>/dev/stderr`, which opens the pipe again and needs its owner's permission.
        fchown(&output, Some(Uid::from_raw(user)), Some(Gid::from_raw(group))).map_err(io::Error::other)?;
    }
    let mut command = Command::new(&spec.program);
    command
        .current_dir(&spec.directory)
        .env_clear()
        .envs(&spec.variables)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .process_group(0);
    if let Some((user, group)) = spec.user {
        command.uid(user).gid(group);
    }
    if let Some(most) = spec.open_files {
        // This process needs few files, too.
        limit_open_files(most)?;
    }
    // Programs with a set-user-id bit or capabilities give the hook and its children no further
    // privileges.
    set_no_new_privs(true)?;
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match command.spawn() {
            // The file was just written, and a process that another hook was started with still has
            // it open.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && Instant::now() < deadline => {
                sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

fn pid(child: &Child) -> io::Result<Pid> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("a process without a number"))
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

#[cfg(test)]
#[path = "hook_tests.rs"]
mod tests;
