//! Hooks that misbehave: each puts its unit into an error state with the reason, and other units
//! are not affected.

use std::fs;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;
use std::time::Duration;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{binary, wait_for};
use crate::mounts::Mount;
use crate::world::{DEADLINE, DIG, World, is_alive, reader_of};

on_both_stores![
    failing_hooks_affect_only_their_unit,
    hook_that_kills_its_agent_is_given_up,
    deeply_nested_directories_are_removed_with_their_unit,
    mounts_in_a_unit_directory_are_not_removed,
    unit_removed_during_a_hook,
    hook_log_is_limited_to_a_megabyte,
    full_disk_puts_a_unit_into_an_error_state,
    full_disk_does_not_prevent_the_end_of_a_hook,
    log_reader_program_is_optional,
    process_with_cleared_environment_ends_with_its_unit,
    processes_that_keep_forking_end_with_their_unit,
    missing_control_groups_are_logged,
    unusable_units_directory_is_a_machine_problem,
];

/// Limits of a hook log and of an agent's memory, for any amount of output.
const MAX_LOG_BYTES: u64 = 1024 * 1024;
const MAX_AGENT_KB: u64 = 60 * 1024;

/// The longest time that a test may take: the speed of two gigabytes through pipes is not tested.
const GIGABYTES_DEADLINE: Duration = Duration::from_secs(180);
const LAST_WORD: &[u8; 6] = b"\nlate\n";

/// Changes the charm of the first unit only.
const SELF_CHANGE: &str = concat!(
    r#"[ "$JUJU_UNIT_NAME" != changing/0 ] || "#,
    r#"{ chmod -x hooks/start; echo 'exit 1' >hooks/stop; touch "$CHARM_DIR/new"; }"#
);

fn failing_hooks_affect_only_their_unit(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-timeout", "3"]);
    for (name, hooks, state, reason) in [
        (
            "hanging",
            &[("install", "sleep 1000")][..],
            "install-error",
            "ran for more than 3 s and was killed",
        ),
        ("printing", &[("install", "yes & yes")], "install-error", "ran for more than 3 s and was killed"),
        ("changing", &[("install", SELF_CHANGE)], "start-error", "is not executable"),
        ("emptying", &[("install", "rm -r hooks")], "started", ""),
        ("killing", &[("install", "kill -9 $PPID || exit 9")], "install-error", "exit code 9"),
        ("forking", &[("install", "setsid sleep 1000 & echo $! >left")], "started", ""),
    ] {
        world.deploy(&world.charm(name, hooks), name);
        // A unit with correct hooks, at the same time.
        let good = format!("good-{name}");
        world.deploy(&world.charm(&good, &[]), &good);
        world.wait_for_state(&format!("{good}/0"), "started");
        let unit = world.wait_for_state(&format!("{name}/0"), state);
        let printed = unit["hook-error"].as_str().unwrap_or_default();
        assert!(printed.contains(reason), "{name}: {unit}");
        world.operator.does(&["destroy-service", &good]);
    }
    // A unit changes only its own copy: the next unit gets the charm as it was deployed.
    world.operator.does(&["add-unit", "changing", "--to", "0"]);
    world.wait_for_state("changing/1", "started");
    world.wait_for_state("changing/0", "start-error");
    let left = fs::read_to_string(world.charm_dir("forking/0").join("left")).unwrap();
    assert!(is_alive(&left), "a hook may leave a process behind");
    let log = fs::metadata(world.units_dir().join("runs")).unwrap();
    assert!(log.is_dir());
    for name in ["hanging", "printing", "changing", "emptying", "killing", "forking"] {
        world.operator.does(&["destroy-service", name]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&left), "but not when its unit is removed");
    agent.stop();
}

/// A hook kills the machine's agent, not only its own runner. As a user of its own it has no
/// permission; as root it can, its unit ends in an error state with the reason, and other units are
/// not affected.
fn hook_that_kills_its_agent_is_given_up(site: &Site) {
    let world = World::new(site);
    let number = world.agent_number();
    let kill = format!("kill -9 $(cat {})", number.display());
    let mut agent = world.agent(&[]);
    world.deploy(&world.charm("barred", &[("start", &kill)]), "barred");
    let barred = world.wait_for_state("barred/0", "start-error");
    assert!(barred["hook-output"].to_string().contains("Operation not permitted"), "{barred}");
    assert!(agent.is_running(), "{}", agent.log());
    agent.stop();

    // Control, and the consequences: these hooks run as root and can kill the agent.
    let mut agent = world.agent(&["--hook-user", "0:0"]);
    world.deploy(&world.charm("good", &[("start", "setsid sleep 1000 & echo $! >left")]), "good");
    world.wait_for_state("good/0", "started");
    let left = fs::read_to_string(world.charm_dir("good/0").join("left")).unwrap();
    world.deploy(
        &world.charm("once", &[("install", &format!("{kill}; sleep 0.2; echo done >ended"))]),
        "once",
    );
    agent.is_killed();
    agent = world.agent(&["--hook-user", "0:0"]);
    world.wait_for_state("once/0", "started");
    // The hook outlived the agent that started it: its result is recorded, and it does not run
    // again.
    world.runs("once", &["install", "start"]);
    assert!(world.charm_dir("once/0").join("ended").exists());

    // Kills only the runner of the hook.
    world.deploy(&world.charm("alone", &[("install", "echo $$ >pid; kill -9 $PPID; sleep 1000")]), "alone");
    let alone = world.wait_for_state("alone/0", "install-error");
    assert_eq!(alone["hook-error"], "install hook: was interrupted 2 times without a result");
    let last = fs::read_to_string(world.charm_dir("alone/0").join("pid")).unwrap();
    assert!(!is_alive(&last), "given up, and still running");
    // Kills both, so that no process sees the end of the hook: it is retried once and then given
    // up.
    world.deploy(&world.charm("both", &[("install", &format!("{kill} $PPID; sleep 1000"))]), "both");
    for _ in 0..2 {
        agent.is_killed();
        agent = world.agent(&["--hook-user", "0:0"]);
    }
    let both = world.wait_for_state("both/0", "install-error");
    assert_eq!(both["hook-error"], "install hook: was interrupted 2 times without a result");
    world.runs("both", &["install", "install"]);
    assert!(agent.is_running(), "{}", agent.log());
    world.wait_for_state("good/0", "started");
    assert!(is_alive(&left), "another unit's process");
    for (service, hooks) in [("good", &["install", "start"][..]), ("once", &["install", "start"])] {
        assert_eq!(world.ran(service), hooks, "another unit's hooks");
    }
    world.operator.does(&["expose", "good"]);
    world.runs("good", &["install", "start", "exposed"]);
    for service in ["barred", "good", "once", "alone", "both"] {
        world.operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&left));
    agent.stop();
}

/// Nested directories of any depth, and directories without permissions.
fn deeply_nested_directories_are_removed_with_their_unit(site: &Site) {
    let world = World::new(site);
    let mut agent = world.agent(&[]);
    let start = format!(
        "{DIG}\nmkdir -p shut/inner && touch shut/inner/file && chmod 500 shut/inner && chmod 0 shut"
    );
    world.deploy(&world.charm("digging", &[("start", &start)]), "digging");
    world.deploy(&world.charm("good", &[]), "good");
    world.wait_for_state("digging/0", "started");
    world.wait_for_state("good/0", "started");
    assert!(world.charm_dir("digging/0").join("deep/deep/deep").exists());
    world.operator.does(&["remove-unit", "digging/0"]);
    wait_for("an end of the digging", DEADLINE, || (!world.is_here("digging/0")).then_some(()));
    assert!(agent.is_running(), "{}", agent.log());
    assert_eq!(world.unit("good/0")["agent-state"], "started");
    world.operator.does(&["destroy-service", "good"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.stop();
}

/// A hook that runs as root may mount a file system: its files do not belong to the unit and are
/// kept.
fn mounts_in_a_unit_directory_are_not_removed(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-user", "0:0"]);
    let kept = world.operator.home().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "kept").unwrap();
    // In the shared mount namespace, as on most hosts.
    let start = format!("mkdir here && mount --bind {} here", kept.display());
    world.deploy(&world.charm("mounting", &[("start", &start)]), "mounting");
    world.wait_for_state("mounting/0", "started");
    let here = world.charm_dir("mounting/0").join("here");
    assert!(here.join("file").exists(), "the control: it is mounted");
    world.operator.does(&["destroy-service", "mounting"]);
    wait_for("a reason", DEADLINE, || agent.log().contains("here is a mount point").then_some(()));
    let problem = || world.operator.status()["machines"]["0"]["problem"].as_str().map(str::to_owned);
    let told = wait_for("a problem", DEADLINE, problem);
    assert!(
        told.contains("was removed, but its files or processes remain: ")
            && told.contains("is a mount point"),
        "{told}"
    );
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    assert!(Command::new("umount").arg(&here).status().unwrap().success());
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    wait_for("no problem", DEADLINE, || problem().is_none().then_some(()));
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    agent.stop();
}

fn unit_removed_during_a_hook(site: &Site) {
    let world = World::new(site);
    let mut agent = world.agent(&[]);
    let charm = world.charm("endless", &[("start", "echo $$ >pid; sleep 1000")]);
    for killed in [false, true] {
        let service = if killed { "second" } else { "first" };
        world.deploy(&charm, service);
        let pid = wait_for("a hook that runs", DEADLINE, || {
            let pid = fs::read_to_string(
                world.units_dir().join("units").read_dir().ok()?.next()?.ok()?.path().join("charm/pid"),
            );
            pid.ok().filter(|pid| pid.ends_with('\n'))
        });
        if killed {
            // The unit is removed after its agent was killed and before the next one starts.
            agent.kill9();
        }
        world.operator.does(&["destroy-service", service]);
        if killed {
            assert!(is_alive(&pid), "a hook outlives its agent");
            agent = world.agent(&[]);
        }
        wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
        assert!(!is_alive(&pid));
    }
    // Neither unit was started, so no stop hook runs.
    world.runs("endless", &["install", "start", "install", "start"]);
    agent.stop();
}

fn hook_log_is_limited_to_a_megabyte(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    // The second gigabyte is printed by a process that the hook leaves running.
    let start = "setsid sh -c 'head -c 1000000000 /dev/zero; echo; echo late; sleep 1000' & echo started";
    let install = "head -c 1000000000 /dev/zero; echo; echo early";
    world.deploy(&world.charm("loud", &[("install", install), ("start", start)]), "loud");
    world.deploy(&world.charm("quiet", &[]), "quiet");
    world.wait_for_state("quiet/0", "started");
    let log = world.units_dir().join("runs/unit-0000000000/log");
    let (mut most, mut kept) = (0, 0);
    wait_for("the last word", GIGABYTES_DEADLINE, || {
        let mut log = fs::File::open(&log).ok()?;
        kept = log.metadata().ok()?.len();
        most = most.max(kept);
        // Reads only the end of the log, because it is polled often.
        let mut end = [0; LAST_WORD.len()];
        log.seek(SeekFrom::End(-i64::try_from(end.len()).unwrap())).ok()?;
        log.read_exact(&mut end).ok()?;
        (end == *LAST_WORD).then_some(())
    });
    assert!(most <= MAX_LOG_BYTES && kept >= MAX_LOG_BYTES / 2, "{most} and {kept} bytes");
    assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());
    assert_eq!(reader_of(&log), Some(binary("portcullis-keep-log")), "the small one");
    world.wait_for_state("loud/0", "started");
    assert_eq!(world.unit("quiet/0")["agent-state"], "started");
    world.operator.does(&["destroy-service", "loud"]);
    world.operator.does(&["destroy-service", "quiet"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.stop();
}

fn full_disk_puts_a_unit_into_an_error_state(site: &Site) {
    let small = Mount::tmpfs("3m");
    let world = World::new(site).with_units_in(small.path());
    let operator = &world.operator;
    let agent = world.agent(&[]);
    world.deploy(&world.charm("good", &[]), "good");
    world.wait_for_state("good/0", "started");
    let fill = "cat /dev/zero >fill; echo full; exit 7";
    world.deploy(&world.charm("hog", &[("install", fill)]), "hog");
    let hog = world.wait_for_state("hog/0", "install-error");
    assert_eq!(hog["hook-error"], "install hook: exit code 7");
    assert!(hog["hook-output"].to_string().contains("No space left on device"), "{hog}");
    // Fills the space that was left for the result of that hook as well.
    let mut rest = fs::File::create(small.path().join("rest")).unwrap();
    while rest.write_all(&[1; 512]).is_ok() {}
    // A unit that is deployed now has no space for any file.
    world.deploy(&world.charm("late", &[]), "late");
    let late = world.wait_for_state("late/0", "install-error");
    let printed = late["hook-error"].as_str().unwrap();
    assert!(
        printed.starts_with("install hook: ") && printed.contains("No space left on device"),
        "{printed}"
    );
    // An earlier unit has reserved some space and continues to work.
    operator.does(&["expose", "good"]);
    world.runs("good", &["install", "start", "exposed"]);
    assert_eq!(world.unit("good/0")["agent-state"], "started");
    // The unit that fills the disk can be removed in spite of it; then there is space again.
    operator.does(&["destroy-service", "hog"]);
    wait_for("an end of the hog", DEADLINE, || (!world.is_here("hog/0")).then_some(()));
    operator.does(&["resolved", "--retry", "late/0"]);
    world.wait_for_state("late/0", "started");
    operator.does(&["unexpose", "good"]);
    world.runs("good", &["install", "start", "exposed", "unexposed"]);
    for service in ["good", "late"] {
        operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    world.runs("good", &["install", "start", "exposed", "unexposed", "stop"]);
    agent.stop();
}

/// No file can be created, and the request to end a hook is a file.
fn full_disk_does_not_prevent_the_end_of_a_hook(site: &Site) {
    let small = Mount::tmpfs("3m,nr_inodes=100");
    let world = World::new(site).with_units_in(small.path());
    let agent = world.agent(&[]);
    world.deploy(&world.charm("endless", &[("start", "echo $$ >pid; exec sleep 1000")]), "endless");
    let pid = wait_for("a hook that runs", DEADLINE, || {
        let pid = fs::read_to_string(small.path().join("units/unit-0000000000/charm/pid"));
        pid.ok().filter(|pid| pid.ends_with('\n'))
    });
    let full = (0..).find_map(|n| fs::File::create(small.path().join(format!("fill-{n}"))).err()).unwrap();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    world.operator.does(&["destroy-service", "endless"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&pid));
    agent.stop();
}

/// A process with a cleared environment, a session of its own and an ended parent is found.
fn process_with_cleared_environment_ends_with_its_unit(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    let start = "env -i setsid sh -c 'echo $$ >left; exec sleep 1000' &";
    let charm = world.charm("forgetful", &[("start", start)]);
    let pid = |service: &str| {
        world.deploy(&charm, service);
        world.wait_for_state(&format!("{service}/0"), "started");
        let left = world.charm_dir(&format!("{service}/0")).join("left");
        let pid = wait_for("a number", DEADLINE, || {
            fs::read_to_string(&left).ok().filter(|pid| pid.ends_with('\n'))
        });
        assert!(is_alive(&pid));
        pid
    };
    let (first, second) = (pid("first"), pid("second"));
    world.operator.does(&["destroy-service", "first"]);
    wait_for("an end of the first", DEADLINE, || (!world.is_here("first/0")).then_some(()));
    assert!(!is_alive(&first) && is_alive(&second), "only the processes of the removed unit end");
    world.operator.does(&["destroy-service", "second"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&second));
    agent.stop();
}

/// Without control groups the agent logs the limitation once; processes that kept their environment
/// are still found.
fn missing_control_groups_are_logged(site: &Site) {
    let world = World::new(site);
    let warning = "no control groups: a process that clears its environment outlives its unit, and \
                   memory is not limited";
    let agent = world.agent(&[]);
    let left = |service: &str| {
        world.deploy(&world.charm(service, &[("start", "setsid sleep 1000 & echo $! >left")]), service);
        world.wait_for_state(&format!("{service}/0"), "started");
        fs::read_to_string(world.charm_dir(&format!("{service}/0")).join("left")).unwrap()
    };
    let with = left("with");
    assert!(!agent.log().contains(warning), "the control: {}", agent.log());
    agent.stop();
    let agent = world.agent_without_groups();
    let without = left("without");
    assert_eq!(agent.log().matches(warning).count(), 1, "{}", agent.log());
    for service in ["with", "without"] {
        world.operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&with) && !is_alive(&without));
    agent.stop();
}

/// Without the separate program for logs, the daemon's own program writes them.
fn log_reader_program_is_optional(site: &Site) {
    let world = World::new(site);
    let agent = world.agent_alone();
    let start =
        "setsid sh -c 'while [ ! -e go ]; do sleep 0.05; done; echo late; exec sleep 1000' & echo early";
    world.deploy(&world.charm("late", &[("start", start)]), "late");
    world.wait_for_state("late/0", "started");
    let log = world.units_dir().join("runs/unit-0000000000/log");
    assert_eq!(fs::read_to_string(&log).unwrap(), "early\n");
    fs::write(world.charm_dir("late/0").join("go"), "").unwrap();
    wait_for("a late word", DEADLINE, || {
        (fs::read_to_string(&log).unwrap() == "early\nlate\n").then_some(())
    });
    assert_eq!(reader_of(&log), Some(world.operator.home().join("alone/portcullis")));
    world.operator.does(&["destroy-service", "late"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.stop();
}

/// A chain of processes that each start the next one and end is killed with its unit, although
/// every scan finds another process.
fn processes_that_keep_forking_end_with_their_unit(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    // Only the processes of the chain hold the writing end, so end of file means that none is left.
    let (held, ground) = (world.operator.home().join("held"), world.operator.home().join("ground"));
    assert!(Command::new("mkfifo").arg(&held).status().unwrap().success());
    world.share(&held);
    fs::write(&ground, "").unwrap();
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap();
    let mut held_by = fs::File::options().read(true).custom_flags(nonblocking).open(&held).unwrap();
    // The chain ends without this file: a failed test removes it with its directory.
    let hop = format!(r#"[ -e {} ] && sh -c "$HOP" &"#, ground.display());
    let start = format!(
        r#"env -i PATH="$PATH" HOP='{hop}' setsid sh -c 'echo up >&9; eval "$HOP"' 9>>{} >/dev/null 2>&1 &"#,
        held.display()
    );
    world.deploy(&world.charm("hopping", &[("start", &start)]), "hopping");
    world.wait_for_state("hopping/0", "started");
    let mut printed = [0; 3];
    wait_for("the first hop", DEADLINE, || held_by.read(&mut printed).ok().filter(|read| *read == 3));
    let hops = held_by.read(&mut printed).map_err(|error| error.kind());
    assert_eq!(hops, Err(ErrorKind::WouldBlock), "it goes on");
    world.operator.does(&["destroy-service", "hopping"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert_eq!(
        held_by.read(&mut printed).map_err(|error| error.kind()),
        Ok(0),
        "no process has the pipe open"
    );
    agent.stop();
}

/// An error that affects all units of an agent is shown in the machine's status, until it is
/// corrected.
fn unusable_units_directory_is_a_machine_problem(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    fs::write(world.units_dir(), "in the way").unwrap();
    let agent = world.agent(&[]);
    world.deploy(&world.charm("patient", &[]), "patient");
    let problem = || operator.status()["machines"]["0"]["problem"].as_str().map(str::to_owned);
    let printed = wait_for("a problem", DEADLINE, problem);
    let place = world.units_dir().display().to_string();
    assert_eq!(
        printed,
        format!("units are not managed: cannot use {place} for units: File exists (os error 17)")
    );
    assert_eq!(world.unit("patient/0")["agent-state"], "pending");
    fs::remove_file(world.units_dir()).unwrap();
    world.wait_for_state("patient/0", "started");
    wait_for("no problem", DEADLINE, || problem().is_none().then_some(()));
    assert_eq!(agent.log().matches("units are not managed").count(), 1, "{}", agent.log());
    agent.stop();
}
