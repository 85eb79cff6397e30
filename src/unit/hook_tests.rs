//! Tests with real hooks in a real shell: correct hooks, and every kind of failure.

use super::super::hook_log::{MAX_LOG_BYTES, TAIL_LINE_CHARS, TAIL_LINES};
use super::*;

/// Longer than any hook here takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

struct Bench {
    home: tempfile::TempDir,
    runs: Runs,
}

impl Bench {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let runs = Runs::at(home.path().join("runs"));
        Self { home, runs }
    }

    fn spec(&self, script: &str) -> HookSpec {
        let program = self.home.path().join("hook");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let path = std::env::var("PATH").unwrap();
        HookSpec {
            program,
            directory: self.home.path().to_owned(),
            variables: BTreeMap::from([("PATH".to_owned(), path), ("UNIT".to_owned(), "web/0".to_owned())]),
            user: None,
            limit_ms: 60_000,
            log: self.home.path().join("log"),
            open_files: None,
            limits: None,
            has_own_user: false,
        }
    }

    fn ends(&self, number: u64, spec: &HookSpec) -> Ended {
        self.runs.write_spec(number, spec).unwrap();
        assert_eq!(self.runs.find(number).unwrap(), RunState::Nothing);
        self.carry_out(number);
        match self.runs.find(number).unwrap() {
            RunState::Finished(ended) => ended,
            other => panic!("{other:?}"),
        }
    }

    fn carry_out(&self, number: u64) {
        // In production the log is written by a separate process.
        let keep = |pipe: PipeReader, log: &Path| {
            let log = log.to_owned();
            std::thread::spawn(move || hook_log::keep(pipe, &log));
            Ok(())
        };
        // Stops a hook that does not end in time, which changes its result: a failed test does not
        // hang.
        let (done, waited) = std::sync::mpsc::channel::<()>();
        let runs = self.runs.clone();
        let guard = std::thread::spawn(move || {
            if waited.recv_timeout(TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                runs.stop(number).unwrap();
            }
        });
        self.runs.carry_out(number, keep).unwrap();
        drop(done);
        guard.join().unwrap();
    }

    fn fails(&self, script: &str) -> (String, String) {
        match self.ends(1, &self.spec(script)) {
            Ended::Badly { reason, output } => (reason, output),
            Ended::Well | Ended::NotBegun { .. } => panic!("{script} is well, or was not run"),
        }
    }

    fn waits_for(&self, last: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.log().ends_with(last) {
            assert!(Instant::now() < deadline, "no {last:?}");
            sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap()
    }
}

#[test]
fn a_hook_gets_only_its_own_directory_and_environment() {
    let bench = Bench::new();
    let spec = bench.spec("pwd; env | sort; cat; id -u");
    assert_eq!(bench.ends(1, &spec), Ended::Well);
    let log = bench.log();
    let here = bench.home.path().canonicalize().unwrap();
    assert!(log.starts_with(&format!("{}\n", here.display())), "{log}");
    assert!(log.contains("UNIT=web/0\n"), "{log}");
    assert!(!log.contains("HOME=") && !log.contains("CARGO"), "{log}");
}

#[test]
fn failures_are_reported_with_the_last_lines_of_output() {
    let said = |script: &str| Bench::new().fails(script);
    assert_eq!(said("echo one; echo two >&2; exit 3"), ("exit code 3".into(), "one\ntwo\n".into()));
    assert_eq!(said("kill -9 $$"), ("signal 9 (SIGKILL)".into(), String::new()));
    assert_eq!(said("exit 137").0, "exit code 137");
    let (_, lines) = said("seq 100; printf 'a\\033[2Jb\\377'; exit 1");
    assert_eq!(lines, "92\n93\n94\n95\n96\n97\n98\n99\n100\na[2Jb\u{fffd}\n");
    let (_, long) = said("head -c 100000 /dev/zero | tr '\\0' x; exit 1");
    assert_eq!(long.len(), TAIL_LINE_CHARS + 1);
}

#[test]
fn only_the_output_of_the_same_run_is_reported() {
    let bench = Bench::new();
    assert_eq!(bench.ends(1, &bench.spec("echo before")), Ended::Well);
    let Ended::Badly { output, .. } = bench.ends(2, &bench.spec("echo after; exit 1")) else { panic!() };
    assert_eq!(output, "after\n");
    assert_eq!(bench.log(), "before\nafter\n");
}

#[test]
fn a_hook_that_cannot_be_started_gives_the_reason() {
    let bench = Bench::new();
    let spec = bench.spec("true");
    fs::set_permissions(&spec.program, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(bench.ends(1, &spec), not_begun("is not executable"));
    fs::set_permissions(&spec.program, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(&spec.program, "#!/no/such/interpreter\n").unwrap();
    let Ended::NotBegun { reason } = bench.ends(2, &spec) else { panic!() };
    assert!(reason.starts_with("cannot be run: "), "{reason}");
    // The interpreter, not the hook, lacks the executable bit.
    let interpreter = bench.home.path().join("interpreter");
    fs::write(&interpreter, "").unwrap();
    fs::write(&spec.program, format!("#!{}\n", interpreter.display())).unwrap();
    assert_eq!(bench.ends(3, &spec), not_begun("cannot be run: Permission denied (os error 13)"));
    let spec = HookSpec { log: bench.home.path().join("no/such/log"), ..spec };
    let Ended::NotBegun { reason } = bench.ends(4, &spec) else { panic!() };
    assert!(reason.starts_with("its output cannot be kept: "), "{reason}");
}

#[test]
fn a_hanging_hook_is_killed_with_its_processes() {
    let bench = Bench::new();
    let spec = bench.spec("trap '' HUP; sleep 1000 & echo $! >child; echo waiting; wait");
    let spec = HookSpec { limit_ms: 300, ..spec };
    let Ended::Badly { reason, output } = bench.ends(1, &spec) else { panic!() };
    assert_eq!((reason.as_str(), output.as_str()), ("ran for more than 1 s and was killed", "waiting\n"));
    let child = fs::read_to_string(bench.home.path().join("child")).unwrap();
    // The signal was sent before this; the process may take a moment to end on a busy machine.
    let deadline = Instant::now() + TIMEOUT;
    while is_alive(child.trim()) {
        assert!(Instant::now() < deadline, "{child} was left behind");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_hook_stops_on_request() {
    let bench = Bench::new();
    let spec = bench.spec("sleep 1000");
    bench.runs.write_spec(1, &spec).unwrap();
    bench.runs.stop(1).unwrap();
    bench.carry_out(1);
    let stopped = Ended::badly("was ended, because its unit was removed");
    assert_eq!(bench.runs.find(1).unwrap(), RunState::Finished(stopped));
}

#[test]
fn endless_output_of_a_hook_is_limited() {
    let bench = Bench::new();
    let spec = HookSpec { limit_ms: 1500, ..bench.spec("yes 'all work and no play' & yes; wait") };
    let Ended::Badly { reason, output } = bench.ends(1, &spec) else { panic!() };
    assert!(reason.starts_with("ran for more than"), "{reason}");
    assert!(output.len() <= TAIL_LINES * (TAIL_LINE_CHARS + 1), "{output}");
    let kept = fs::metadata(bench.home.path().join("log")).unwrap().len();
    assert!((MAX_LOG_BYTES / 2..=MAX_LOG_BYTES).contains(&kept), "{kept} bytes are kept");
}

#[test]
fn output_of_background_processes_is_limited() {
    let bench = Bench::new();
    let script = "setsid sh -c 'head -c 50000000 /dev/zero; echo; echo last' & echo early";
    assert_eq!(bench.ends(1, &bench.spec(script)), Ended::Well);
    bench.waits_for("last\n");
    let kept = fs::metadata(bench.home.path().join("log")).unwrap().len();
    assert!(kept <= MAX_LOG_BYTES, "{kept} bytes are kept");
}

#[test]
fn a_background_process_keeps_its_output() {
    let bench = Bench::new();
    let script = "setsid sh -c 'while [ ! -e go ]; do sleep 0.02; done; : >done; echo late' & echo early";
    assert_eq!(bench.ends(1, &bench.spec(script)), Ended::Well);
    assert_eq!(bench.log(), "early\n");
    fs::write(bench.home.path().join("go"), "").unwrap();
    bench.waits_for("late\n");
    assert_eq!(bench.log(), "early\nlate\n");
    assert!(bench.home.path().join("done").exists());
}

#[test]
fn a_run_is_executed_once() {
    let bench = Bench::new();
    let spec = bench.spec("echo ran");
    assert_eq!(bench.ends(7, &spec), Ended::Well);
    bench.carry_out(7);
    assert_eq!(bench.log(), "ran\n", "a second time does nothing");
    // Another process holds the lock.
    bench.runs.write_spec(8, &spec).unwrap();
    let theirs = bench.runs.lock().unwrap();
    theirs.lock().unwrap();
    assert_eq!(bench.runs.find(8).unwrap(), RunState::Running);
    bench.carry_out(8);
    assert_eq!(bench.log(), "ran\n");
    drop(theirs);
    bench.carry_out(8);
    assert_eq!(bench.log(), "ran\nran\n");
    let mut left: Vec<_> = fs::read_dir(&bench.runs.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["8.end", "8.order", "8.tries", "lock"], "earlier runs are cleared away");
}

#[test]
fn a_run_that_is_always_interrupted_is_given_up() {
    let bench = Bench::new();
    bench.runs.write_spec(1, &bench.spec("true")).unwrap();
    for tries in [".", ".."] {
        assert_eq!(bench.runs.find(1).unwrap(), RunState::Nothing);
        fs::write(bench.runs.file(1, "tries"), tries).unwrap();
    }
    let given_up = Ended::badly("was interrupted 2 times without a result");
    assert_eq!(bench.runs.find(1).unwrap(), RunState::Lost(given_up));
}

#[test]
fn an_unreadable_result_is_reported_as_a_failure() {
    let bench = Bench::new();
    bench.runs.write_spec(1, &bench.spec("true")).unwrap();
    for end in ["", "{\"reason\": nu"] {
        fs::write(bench.runs.file(1, "end"), end).unwrap();
        let RunState::Finished(Ended::Badly { reason, .. }) = bench.runs.find(1).unwrap() else {
            panic!("{end:?}")
        };
        assert!(reason.starts_with("its result cannot be read: "), "{reason}");
    }
}

#[test]
fn a_hook_succeeds_although_its_log_cannot_be_written() {
    let bench = Bench::new();
    let script = "setsid sh -c 'while [ ! -e go ]; do sleep 0.02; done; : >done' & echo early";
    bench.runs.write_spec(1, &bench.spec(script)).unwrap();
    bench.runs.carry_out(1, |_, _| Err(io::ErrorKind::NotFound.into())).unwrap();
    assert_eq!(bench.runs.find(1).unwrap(), RunState::Finished(Ended::Well));
    fs::write(bench.home.path().join("go"), "").unwrap();
    // Waits for the process: if its directory were removed first, it would poll for `go` for ever.
    let deadline = Instant::now() + TIMEOUT;
    while !bench.home.path().join("done").exists() {
        assert!(Instant::now() < deadline, "it does not go");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_late_hook_is_terminated_and_then_killed() {
    let bench = Bench::new();
    // The hook and its child process handle SIGTERM by writing a line, and continue to run.
    let stays = "trap 'echo asked >>asked' TERM; while :; do sleep 0.05; done";
    let script = format!("( {stays} ) & echo $! >left; {stays}");
    let spec = HookSpec { limit_ms: 300, ..bench.spec(&script) };
    let ended = bench.ends(1, &spec);
    assert!(
        matches!(&ended, Ended::Badly { reason, .. } if reason.starts_with("ran for more than")),
        "{ended:?}"
    );
    let asked = fs::read_to_string(bench.home.path().join("asked")).unwrap_or_default();
    assert!(asked.lines().count() >= 2, "both are asked first: {asked}");
    let left = fs::read_to_string(bench.home.path().join("left")).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while is_alive(left.trim()) {
        assert!(Instant::now() < deadline, "what it started goes on");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_hook_without_a_watcher_is_killed_with_its_group() {
    let mut command = Command::new("sh");
    command.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().unwrap();
    let mut started = String::new();
    io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut started).unwrap();
    assert!(is_alive(started.trim()));
    abandon(&mut child);
    assert_eq!(child.try_wait().unwrap().and_then(|status| status.signal()), Some(9));
    let deadline = Instant::now() + TIMEOUT;
    while is_alive(started.trim()) {
        assert!(Instant::now() < deadline, "what it started goes on");
        sleep(Duration::from_millis(5));
    }
    // A second call finds no process to kill.
    abandon(&mut child);
}

#[test]
fn a_hook_has_the_configured_limit_of_open_files() {
    let bench = Bench::new();
    let spec = HookSpec { open_files: Some(234), ..bench.spec("ulimit -Sn; exit 1") };
    let ended = bench.ends(1, &spec);
    assert_eq!(ended, Ended::Badly { reason: "exit code 1".to_owned(), output: "234\n".to_owned() });
}

#[test]
fn a_full_disk_uses_the_reserve_for_each_record() {
    for error in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
        let bench = Bench::new();
        fs::create_dir_all(&bench.runs.0).unwrap();
        bench.runs.reserve();
        let tries = std::cell::Cell::new(0);
        let full = || {
            tries.set(tries.get() + 1);
            if bench.runs.0.join("reserve").exists() { Err(error.into()) } else { Ok(()) }
        };
        assert!(bench.runs.with_reserve(full).is_ok(), "{error}");
        assert_eq!(tries.get(), 2);
    }
}

#[test]
fn a_hook_runs_as_its_configured_user() {
    let bench = Bench::new();
    // Only root can change to another user; any user can keep its own.
    let (user, group) = match rustix::process::getuid().as_raw() {
        0 => (65534, 65534),
        user => (user, rustix::process::getgid().as_raw()),
    };
    fs::set_permissions(bench.home.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let spec =
        HookSpec { user: Some((user, group)), ..bench.spec("id -u; id -g; id -G; echo last >/dev/stderr") };
    assert_eq!(bench.ends(1, &spec), Ended::Well);
    let log = bench.log();
    assert!(log.ends_with("\nlast\n"), "the pipe is its own: {log}");
    assert!(log.starts_with(&format!("{user}\n{group}\n")), "{log}");
}

fn is_alive(pid: &str) -> bool {
    // A zombie counts as dead: it stays until its parent waits for it.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}
