//! Stops a machine's agent after each change to the disk or to the store, and then continues or
//! kills it. `strace` stops it; its own counters are per thread, so the reader of its lines decides
//! at which step to act.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command};

use rustix::process::{Pid, Signal, kill_process};

use crate::world::World;

/// All system calls that can make a change that outlives the process.
const CALLS: &str = "openat,write,writev,sendto,rename,renameat,renameat2,mkdir,mkdirat,unlink,\
unlinkat,rmdir,chmod,\
                     fchmod,fchmodat,chown,fchown,lchown,fchownat,symlink,symlinkat,truncate,ftruncate";

/// Parts of the paths that an agent changes.
const OF_UNITS: &[&str] = &["/units", "/local-machines", "portcullis-unit-", "/portcullis-units/"];

/// The type of a writing store request as `strace` prints it: an agent writes with multi requests
/// only.
const MULTI: &str = r"\0\0\0\16\0\0\0";

/// A change that was just made by a process that is now stopped.
#[derive(Debug)]
pub(crate) struct Step {
    /// A description that is equal for the same step of another process.
    pub(crate) what: String,
    /// The directory and the number of the run, if a hook's runner and not the agent made the
    /// change.
    pub(crate) run: Option<(String, u64)>,
    process: i32,
    /// The control group that the step created, if any.
    pub(crate) made: Option<PathBuf>,
}

pub(crate) struct Stepping {
    strace: Child,
    lines: Lines<BufReader<ChildStdout>>,
    agent: i32,
    /// Parts of the paths whose changes are steps.
    places: &'static [&'static str],
    /// The current or last call of each thread.
    calls: BTreeMap<i32, String>,
    /// The last content of the unit's state file, which distinguishes its many writes.
    state: String,
}

impl Stepping {
    /// Starts the agent. `with_runners` also traces hooks and their runners, which makes them
    /// slower.
    pub(crate) fn start(world: &World, with_runners: bool) -> Self {
        Self::of(world.agent_under(strace(with_runners)), OF_UNITS)
    }

    /// Traces another program: `start` appends it to the command line of `strace`. Changes below
    /// `places` are steps.
    pub(crate) fn of_another(start: impl FnOnce(Command) -> Child, places: &'static [&'static str]) -> Self {
        Self::of(start(strace(false)), places)
    }

    fn of(mut strace: Child, places: &'static [&'static str]) -> Self {
        let mut lines = BufReader::new(strace.stdout.take().expect("its lines")).lines();
        let first = lines.next().expect("a first line").expect("text");
        let agent = split(&first).expect("the agent's number").0;
        Self { strace, lines, agent, places, calls: BTreeMap::new(), state: String::new() }
    }

    pub(crate) fn agent(&self) -> i32 {
        self.agent
    }

    /// Returns the next change; `None` if the agent has ended.
    pub(crate) fn next(&mut self) -> Option<Step> {
        loop {
            let line = self.lines.next()?.expect("text");
            let Some((thread, printed)) = split(&line) else { continue };
            if thread == self.agent && printed.starts_with("+++ ") {
                return None;
            }
            if !printed.starts_with("--- ") {
                self.note(thread, printed);
                continue;
            }
            if !printed.starts_with("--- SIGSTOP ") {
                continue;
            }
            let what = self
                .calls
                .get(&thread)
                .and_then(|call| changed(call, self.places))
                .map(|what| of_any_unit(&what));
            match what.and_then(|what| self.step(thread, what)) {
                Some(step) => return Some(step),
                None => signal(thread, Signal::CONT),
            }
        }
    }

    /// Returns `None` for a change that a hook made, and if the process has ended.
    fn step(&self, thread: i32, what: String) -> Option<Step> {
        let of = |file: &str| std::fs::read_to_string(format!("/proc/{thread}/{file}")).ok();
        let status = of("status")?;
        let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()?;
        let made = self.calls.get(&thread).and_then(|call| call.strip_prefix("mkdir(\"")?.split('"').next());
        let made = made.filter(|path| path.contains("/portcullis-unit-")).map(PathBuf::from);
        let what = if what.ends_with("/state.new") { format!("{what} {}", self.state) } else { what };
        if process == self.agent {
            return Some(Step { what, run: None, process, made });
        }
        let line = of("cmdline")?;
        let ["run-hook", directory, number] = line.split('\0').skip(1).take(3).collect::<Vec<_>>()[..] else {
            return None;
        };
        let what = what.replace(&of_any_unit(directory), "RUNS").replace(&format!("/{number}."), "/N.");
        Some(Step { what, run: Some((directory.to_owned(), number.parse().ok()?)), process, made })
    }

    fn note(&mut self, thread: i32, printed: &str) {
        let resumed = printed.strip_prefix("<... ").and_then(|rest| rest.split_once(" resumed>"));
        let call = match resumed {
            Some((_, rest)) => self.calls.remove(&thread).unwrap_or_default() + rest,
            None => printed.trim_end_matches(" <unfinished ...>").to_owned(),
        };
        if let Some((_, written)) = call.split_once("/state.new>, ")
            && call.starts_with("write(")
        {
            self.state = written.to_owned();
        }
        self.calls.insert(thread, call);
    }

    pub(crate) fn go_on(step: &Step) {
        signal(step.process, Signal::CONT);
    }

    pub(crate) fn kill(step: &Step) {
        signal(step.process, Signal::KILL);
    }
}

/// Kills the agent at its current step and continues all other processes without tracing.
impl Drop for Stepping {
    fn drop(&mut self) {
        signal(self.agent, Signal::KILL);
        // SIGTERM is not enough: `strace` would wait for every traced process, and for ever if one
        // of them waits for another.
        signal(self.strace.id().cast_signed(), Signal::KILL);
        self.strace.wait().expect("an end of strace");
        for thread in self.calls.keys() {
            signal(*thread, Signal::CONT);
        }
        for line in self.lines.by_ref().map_while(Result::ok) {
            if let Some((thread, _)) = split(&line) {
                signal(thread, Signal::CONT);
            }
        }
    }
}

fn strace(with_runners: bool) -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-s", "300", "-o", "/dev/stdout"]);
    strace.args(["-e", &format!("trace=execve,{CALLS}"), "-e", &format!("inject={CALLS}:signal=STOP")]);
    if !with_runners {
        strace.args(["-b", "execve"]);
    }
    strace
}

fn split(line: &str) -> Option<(i32, &str)> {
    let (number, printed) = line.split_once(' ')?;
    Some((number.parse().ok()?, printed.trim_start()))
}

/// Sends a signal; a process that has ended is not an error.
fn signal(number: i32, signal: Signal) {
    let _ = Pid::from_raw(number).map(|pid| kill_process(pid, signal));
}

/// Describes the change that a call made, without the parts that differ between processes; `None`
/// if it changed nothing.
fn changed(call: &str, places: &[&str]) -> Option<String> {
    let (name, arguments) = call.split_once('(')?;
    let result = call.rsplit_once(" = ")?.1;
    if result.starts_with('-') || result.starts_with('?') || (name == "openat" && !call.contains("O_CREAT")) {
        return None;
    }
    if arguments.split_once('>').is_some_and(|(target, _)| target.contains("<socket:")) {
        let (_, request) = arguments.split_once(MULTI)?;
        let (_, path) = request.split_once('/')?;
        // For a unit's state the description has the content, for other nodes only the path.
        let end = if path.contains("/state") { '}' } else { '\\' };
        return Some(format!("store /{}", path.split(end).next()?));
    }
    let arguments = arguments
        .strip_prefix("AT_FDCWD<")
        .and_then(|rest| rest.split_once(">, "))
        .map_or(arguments, |(_, rest)| rest);
    let at = ["\"/", "</"].iter().filter_map(|start| arguments.find(start)).min()?;
    let path = arguments[at + 1..].split(['"', '>']).next()?;
    let ours = places.iter().any(|part| path.contains(part));
    if !ours || path.starts_with("/proc/") || path.ends_with(".journal") {
        return None;
    }
    // Removes process numbers and random suffixes.
    let path = path.trim_end_matches(|c: char| c.is_ascii_digit() && path.contains(".json."));
    let path = match path.find("portcullis-unit-") {
        Some(at) => format!("group {}", path[at..].split_once('/').map_or("", |(_, file)| file)),
        None => path.to_owned(),
    };
    let file = arguments
        .split_once(">, \"")
        .filter(|_| name == "unlinkat")
        .and_then(|(_, file)| file.split('"').next());
    Some(format!("{name} {path}{}", file.map_or_else(String::new, |file| format!("/{file}"))))
}

/// Removes unit numbers from a text.
fn of_any_unit(text: &str) -> String {
    let mut parts = text.split("unit-0");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + "unit" + part.trim_start_matches(|c: char| c.is_ascii_digit()))
}
