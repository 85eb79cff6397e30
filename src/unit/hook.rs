//! One run of one hook, in a process of its own that does nothing else: so the hook's limits are kept and its end is told
//! also when the agent that ordered it is gone. The order and the end are files; which hook to run and what its end means
//! is decided elsewhere. Blocking, because there is one thing to wait for.

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
use super::limits::HookLimits;
use super::output::{self, Log, Output};
use super::workflow::Ended;
use crate::runtime::files::{limit_open_files, limit_processes};
use watch::{Over, Watch};

mod watch;

/// A program that somebody still writes to is tried again for this long.
const BUSY: Duration = Duration::from_secs(5);

/// A hook that took its agent down with it, or a machine that lost its power, is tried again; but not for ever.
const MAX_TRIES: u64 = 2;

/// Enough for an order, an end and a state, with a block each for their names.
const RESERVE_BYTES: usize = 64 * 1024;

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
    /// How many files it may have open; as many as the agent if it is not said.
    #[serde(default)]
    pub open_files: Option<u64>,
    /// Limits of all of the unit's processes; `None` in orders of older versions without limits.
    #[serde(default)]
    pub limits: Option<HookLimits>,
    /// Whether no other unit runs as this user, so that a limit for the user is one for the unit.
    #[serde(default)]
    pub has_own_user: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Wire {
    /// None if all is well.
    reason: Option<String>,
    output: String,
    /// Left out by versions that did not know.
    #[serde(default)]
    not_begun: bool,
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
    /// Begun too often without anybody seeing its end, and given up. The last of it may still run.
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
        let bytes = serde_json::to_vec(order)?;
        self.with_reserve(|| replace(&self.file(number, "order"), &bytes))
    }

    /// The highest number of those that something is left of; 0 if nothing is.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn last(&self) -> io::Result<u64> {
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.split_once('.')?.0.parse().ok();
        fs::read_dir(&self.0)?
            .try_fold(0, |last, entry| Ok(number(entry?).map_or(last, |found: u64| found.max(last))))
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
            return Ok(Found::Over(match serde_json::from_slice(&bytes) {
                Ok(Wire { reason: None, .. }) => Ended::Well,
                Ok(Wire { reason: Some(reason), not_begun: true, .. }) => Ended::NotBegun { reason },
                Ok(Wire { reason: Some(reason), output, .. }) => Ended::Badly { reason, output },
                // It will not read better the next time; the operator decides.
                Err(error) => badly(format!("how it ended cannot be read: {error}")),
            }));
        }
        if running {
            return Ok(Found::Running);
        }
        match fs::metadata(self.file(number, "tries")) {
            Ok(tries) if tries.len() >= MAX_TRIES => Ok(Found::Lost(Ended::Badly {
                reason: format!("was interrupted {MAX_TRIES} times, and nobody saw its end"),
                output: String::new(),
            })),
            _ => Ok(Found::Nothing),
        }
    }

    /// Keeps a little room, so that a disk that others fill does not keep this unit's hooks from being told of.
    pub fn reserve(&self) {
        let path = self.0.join("reserve");
        if !path.exists() {
            // Without it the unit is as well off as everybody else.
            let _ = fs::write(path, [1; RESERVE_BYTES]);
        }
    }

    /// Gives that room up, if it is what `error` asks for; says whether there was any.
    fn release(&self, error: &io::Error) -> bool {
        is_full(error) && fs::remove_file(self.0.join("reserve")).is_ok()
    }

    /// Does what takes a little room, with the reserve if there is no other.
    ///
    /// # Errors
    /// Those of the work.
    pub fn with_reserve<R>(&self, work: impl Fn() -> io::Result<R>) -> io::Result<R> {
        match work() {
            Err(error) if self.release(&error) => work(),
            done => done,
        }
    }

    /// Asks a run to end soon.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn stop(&self, number: u64) -> io::Result<()> {
        self.with_reserve(|| File::create(self.file(number, "stop")).map(drop))
    }

    /// Moves this process, and thereby the hook that it will run, into the unit's control group if
    /// there can be one, and sets the unit's limits.
    pub fn enter_group(&self, number: u64) {
        // An unreadable order is refused later, when it is run.
        let bytes = read(&self.file(number, "order")).ok().flatten().unwrap_or_default();
        let order: Option<Order> = serde_json::from_slice(&bytes).ok();
        let limits = order.as_ref().and_then(|order| order.limits);
        let limits = limits.unwrap_or(HookLimits { pids: None, memory_bytes: None });
        let enforced = cgroup::join(&self.0, limits).unwrap_or_else(|error| {
            // A process that clears its environment is not found again when the unit is removed.
            debug!(%error, "no control group for the hook");
            Enforced { pids: false, memory: false }
        });
        if let Some(pids) = limits.pids
            && !enforced.pids
            && order.is_some_and(|order| order.has_own_user)
            && let Err(error) = limit_processes(pids)
        {
            warn!(%error, "the number of processes is not limited");
        }
    }

    /// Does what was ordered, unless somebody does it already or it is done. What the hook leaves running may go on
    /// printing: `keep` is given the pipe then, and the log that it belongs in.
    ///
    /// # Errors
    /// Those of the file system: with a full disk, say, the end of a hook cannot be told.
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
        let bytes = read(&self.file(number, "order"))?.ok_or(io::ErrorKind::NotFound)?;
        let order: Order = serde_json::from_slice(&bytes)?;
        self.with_reserve(|| {
            let tries = OpenOptions::new().create(true).append(true).open(self.file(number, "tries"));
            tries?.write_all(b".")
        })?;
        let (ended, rest) = run(&order, &self.file(number, "stop"));
        let wire = match ended {
            Ended::Well => Wire { reason: None, output: String::new(), not_begun: false },
            Ended::Badly { reason, output } => Wire { reason: Some(reason), output, not_begun: false },
            Ended::NotBegun { reason } => {
                Wire { reason: Some(reason), output: String::new(), not_begun: true }
            }
        };
        let bytes = serde_json::to_vec(&wire)?;
        let told = self.with_reserve(|| replace(&self.file(number, "end"), &bytes));
        if let Some(Err(error)) = rest.map(|rest| keep(rest, &order.log)) {
            // The hook has ended as it has; only what it left running is worse off.
            warn!(%error, "what the hook left running cannot print any more");
        }
        told
    }
}

/// The program that reads on, beside this one: a small one, since every service that prints has its own.
const READER: &str = "portcullis-keep-log";

/// Starts it deaf to what asks processes to end: what is asked to end may still have something to say, and is cut short if
/// nobody reads it. So the reader ends with the last who could print. Ignored signals stay so across an `exec`.
const DEAF: &str = r#"trap '' TERM INT HUP; exec "$0" keep-log "$1""#;

/// Keeps what comes through the pipe, in a process of its own: whoever waits for the hook waits for this one, and should
/// not wait for what it left running.
///
/// # Errors
/// If it cannot be started.
pub fn keep_on(pipe: PipeReader, log: &Path) -> io::Result<()> {
    // This program does the same, where it is alone; by this name also after it was replaced by a newer one.
    let own = || PathBuf::from(format!("/proc/{}/exe", std::process::id()));
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(READER));
    let reader = beside.filter(|reader| reader.is_file()).unwrap_or_else(own);
    let mut keeper = Command::new("/bin/sh");
    keeper.args(["-c", DEAF]).arg(reader).arg(log);
    keeper.stdin(pipe).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut keeper = keeper.spawn()?;
    // It says so once it reads; what the hook left may be asked to end from then on.
    let ready = keeper.stdout.take().map(|mut stdout| stdout.read_exact(&mut [0]));
    ready.unwrap_or_else(|| Err(io::ErrorKind::BrokenPipe.into()))
}

/// Keeps what comes through standard input, until nobody is left who could print, and says on standard output that it is
/// about to: whoever started this waits for it. Small on purpose, see above.
///
/// # Errors
/// If the log cannot be opened, or the pipe cannot be read.
pub fn keep_standard_input(log: &Path) -> io::Result<()> {
    // Without the buffers that the standard ones have.
    let said = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    (&said).write_all(b"\n")?;
    output::keep(File::from(io::stdin().as_fd().try_clone_to_owned()?), log)
}

/// The disk is, or our part of it.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A file is there whole or not at all.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let aside = path.with_extension("new");
    let mut file = File::create(&aside)?;
    file.write_all(bytes)?;
    // The name must not come before the contents when the power goes.
    file.sync_all()?;
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

fn not_begun(reason: impl Into<String>) -> Ended {
    Ended::NotBegun { reason: reason.into() }
}

/// Runs a hook to its end; returns the pipe that it wrote to if somebody else may still write to it.
fn run(order: &Order, stop: &Path) -> (Ended, Option<PipeReader>) {
    let opened = Log::open(&order.log).and_then(|log| {
        let (reader, writer) = io::pipe()?;
        Ok((Output::new(reader, log)?, writer))
    });
    let (mut output, writer) = match opened {
        Ok(opened) => opened,
        Err(error) => return (not_begun(format!("its output cannot be kept: {error}")), None),
    };
    let mut child = match start(order, writer) {
        Ok(child) => child,
        // The same is said of a directory, or an interpreter, that is closed to the hook's user.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_executable(&order.program) => {
            return (not_begun("is not executable"), None);
        }
        Err(error) => return (not_begun(format!("cannot be run: {error}")), None),
    };
    let over = Watch::over(&mut child, &mut output).and_then(|mut watch| watch.wait(order, stop));
    let reason = match over {
        Ok(Over::By(status)) if status.success() => return (Ended::Well, output.rest()),
        Ok(Over::By(status)) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}{}", signal_name(signal)),
            (None, None) => "ended in a way that nobody knows".to_owned(),
        },
        Ok(Over::Late) => format!("ran for more than {} s and was ended", order.limit_ms.div_ceil(1000)),
        Ok(Over::Stopped) => "was ended, because its unit was removed".to_owned(),
        Err(error) => {
            abandon(&mut child);
            format!("cannot be waited for, and was ended: {error}")
        }
    };
    (Ended::Badly { reason, output: output.tail() }, output.rest())
}

/// Whether it has the bit for anybody. What cannot be looked at is not said to lack it.
fn is_executable(program: &Path) -> bool {
    fs::metadata(program).map_or(true, |found| found.permissions().mode() & 0o111 != 0)
}

/// Ends a hook that nobody can watch over: it must not go on while the unit does.
fn abandon(child: &mut Child) {
    // Of one that has ended, the number may be somebody else's by now.
    if let (Ok(None), Ok(group)) = (child.try_wait(), pid(child)) {
        // It may end by itself meanwhile, which is as good.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.wait();
    }
}

fn start(order: &Order, output: PipeWriter) -> io::Result<Child> {
    if let Some((user, group)) = order.user {
        // For `>/dev/stderr`, which opens the pipe anew, by its owner's right.
        fchown(&output, Some(Uid::from_raw(user)), Some(Gid::from_raw(group))).map_err(io::Error::other)?;
    }
    let mut command = Command::new(&order.program);
    command
        .current_dir(&order.directory)
        .env_clear()
        .envs(&order.variables)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .process_group(0);
    if let Some((user, group)) = order.user {
        command.uid(user).gid(group);
    }
    if let Some(most) = order.open_files {
        // This process needs few as well.
        limit_open_files(most)?;
    }
    // No program with a set-user-id bit or with capabilities gives the hook, or what it starts,
    // more rights than it has.
    set_no_new_privs(true)?;
    let patience = Instant::now() + BUSY;
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
