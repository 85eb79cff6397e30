//! Hooks that do what no hook should: each ends in a state that says so, and the units beside it go on.

use std::fs;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;
use std::time::Duration;

use crate::harness::scenario::Site;
use crate::harness::{binary, wait_for};
use crate::mounts::Mount;
use crate::world::{DEADLINE, DIG, World, is_alive, reader_of};

/// What a log may have, and what an agent may take, whatever hooks print.
const MAX_LOG_BYTES: u64 = 1024 * 1024;
const MAX_AGENT_KB: u64 = 60 * 1024;

/// As long as a test may take at all: how fast two gigabytes go through pipes is not what is tested.
const GIGABYTES_DEADLINE: Duration = Duration::from_secs(180);
const LAST_WORD: &[u8; 6] = b"\nlate\n";

/// Of the first unit alone.
const SELF_CHANGE: &str = r#"[ "$JUJU_UNIT_NAME" != changing/0 ] || { chmod -x hooks/start; echo 'exit 1' >hooks/stop; touch "$CHARM_DIR/new"; }"#;

pub(crate) fn bad_hooks_are_clear_states_and_nobody_elses_trouble(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-timeout", "3"]);
    for (name, hooks, state, reason) in [
        ("hanging", &[("install", "sleep 1000")][..], "install-error", "ran for more than 3 s and was ended"),
        ("printing", &[("install", "yes & yes")], "install-error", "ran for more than 3 s and was ended"),
        ("changing", &[("install", SELF_CHANGE)], "start-error", "is not executable"),
        ("emptying", &[("install", "rm -r hooks")], "started", ""),
        ("killing", &[("install", "kill -9 $PPID || exit 9")], "install-error", "exit code 9"),
        ("forking", &[("install", "setsid sleep 1000 & echo $! >left")], "started", ""),
    ] {
        world.deploy(&world.charm(name, hooks), name);
        // One that does nothing wrong, at the same time.
        let good = format!("good-{name}");
        world.deploy(&world.charm(&good, &[]), &good);
        world.becomes(&format!("{good}/0"), "started");
        let unit = world.becomes(&format!("{name}/0"), state);
        let said = unit["hook-error"].as_str().unwrap_or_default();
        assert!(said.contains(reason), "{name}: {unit}");
        world.operator.does(&["destroy-service", &good]);
    }
    // What a unit changes is its own copy: the next one of the same charm has it as it was deployed.
    world.operator.does(&["add-unit", "changing", "--to", "0"]);
    world.becomes("changing/1", "started");
    world.becomes("changing/0", "start-error");
    let left = fs::read_to_string(world.charm_dir("forking/0").join("left")).unwrap();
    assert!(is_alive(&left), "a hook may leave a process behind");
    let log = fs::metadata(world.units_dir().join("runs")).unwrap();
    assert!(log.is_dir());
    for name in ["hanging", "printing", "changing", "emptying", "killing", "forking"] {
        world.operator.does(&["destroy-service", name]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&left), "but not when its unit is removed");
    agent.ends();
}

/// The machine's own agent, not just whoever watches over the hook: a user of its own cannot, one who can ends in a state
/// that says so, and others lose nothing by it.
pub(crate) fn hooks_that_kill_their_machines_agent(site: &Site) {
    let world = World::new(site);
    let number = world.agent_number();
    let kill = format!("kill -9 $(cat {})", number.display());
    let mut agent = world.agent(&["--hook-user", "200000+"]);
    world.deploy(&world.charm("barred", &[("start", &kill)]), "barred");
    let barred = world.becomes("barred/0", "start-error");
    assert!(barred["hook-output"].to_string().contains("Operation not permitted"), "{barred}");
    assert!(agent.is_there(), "{}", agent.said());
    agent.ends();

    // The control, and what comes of it: nothing keeps these from it.
    let mut agent = world.agent(&["--hook-user", "0:0"]);
    world.deploy(&world.charm("good", &[("start", "setsid sleep 1000 & echo $! >left")]), "good");
    world.becomes("good/0", "started");
    let left = fs::read_to_string(world.charm_dir("good/0").join("left")).unwrap();
    world.deploy(
        &world.charm("once", &[("install", &format!("{kill}; sleep 0.2; echo done >ended"))]),
        "once",
    );
    agent.is_killed();
    agent = world.agent(&["--hook-user", "0:0"]);
    world.becomes("once/0", "started");
    // The hook outlived who ordered it: what it did is known, and not done again.
    world.runs("once", &["install", "start"]);
    assert!(world.charm_dir("once/0").join("ended").exists());

    // Only who watches over the hook.
    world.deploy(&world.charm("alone", &[("install", "echo $$ >pid; kill -9 $PPID; sleep 1000")]), "alone");
    let alone = world.becomes("alone/0", "install-error");
    assert_eq!(alone["hook-error"], "install hook: was interrupted 2 times, and nobody saw its end");
    let last = fs::read_to_string(world.charm_dir("alone/0").join("pid")).unwrap();
    assert!(!is_alive(&last), "given up, and still running");
    // Both together, so that nobody saw its end: tried once more, and not for ever.
    world.deploy(&world.charm("both", &[("install", &format!("{kill} $PPID; sleep 1000"))]), "both");
    for _ in 0..2 {
        agent.is_killed();
        agent = world.agent(&["--hook-user", "0:0"]);
    }
    let both = world.becomes("both/0", "install-error");
    assert_eq!(both["hook-error"], "install hook: was interrupted 2 times, and nobody saw its end");
    world.runs("both", &["install", "install"]);
    assert!(agent.is_there(), "{}", agent.said());
    world.becomes("good/0", "started");
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
    agent.ends();
}

/// Within each other, as deep as a hook likes, and shut to everybody.
pub(crate) fn directories_without_end_go_with_their_unit(site: &Site) {
    let world = World::new(site);
    let mut agent = world.agent(&[]);
    let start = format!(
        "{DIG}\nmkdir -p shut/inner && touch shut/inner/file && chmod 500 shut/inner && chmod 0 shut"
    );
    world.deploy(&world.charm("digging", &[("start", &start)]), "digging");
    world.deploy(&world.charm("good", &[]), "good");
    world.becomes("digging/0", "started");
    world.becomes("good/0", "started");
    assert!(world.charm_dir("digging/0").join("deep/deep/deep").exists());
    world.operator.does(&["remove-unit", "digging/0"]);
    wait_for("an end of the digging", DEADLINE, || (!world.is_here("digging/0")).then_some(()));
    assert!(agent.is_there(), "{}", agent.said());
    assert_eq!(world.unit("good/0")["agent-state"], "started");
    world.operator.does(&["destroy-service", "good"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.ends();
}

/// A hook of root's may mount what it likes: what is mounted is not the unit's, and stays.
pub(crate) fn what_is_mounted_is_not_removed(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-user", "0:0"]);
    let kept = world.operator.home().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "kept").unwrap();
    // Where others see it as well, as on most hosts.
    let start = format!("mkdir here && mount --bind {} here", kept.display());
    world.deploy(&world.charm("mounting", &[("start", &start)]), "mounting");
    world.becomes("mounting/0", "started");
    let here = world.charm_dir("mounting/0").join("here");
    assert!(here.join("file").exists(), "the control: it is mounted");
    world.operator.does(&["destroy-service", "mounting"]);
    wait_for("a reason", DEADLINE, || agent.said().contains("here is a mount of its own").then_some(()));
    let problem = || world.operator.status()["machines"]["0"]["problem"].as_str().map(str::to_owned);
    let told = wait_for("a problem", DEADLINE, problem);
    assert!(told.contains(" was removed and is not cleared away: ") && told.contains("a mount of"), "{told}");
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    assert!(Command::new("umount").arg(&here).status().unwrap().success());
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    wait_for("nothing more to say", DEADLINE, || problem().is_none().then_some(()));
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
    agent.ends();
}

pub(crate) fn removed_in_the_middle_of_a_hook(site: &Site) {
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
            // Its agent is dead, and the unit is removed before there is another.
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
    // Neither was started, so there was nothing to stop.
    world.runs("endless", &["install", "start", "install", "start"]);
    agent.ends();
}

pub(crate) fn a_gigabyte_of_output_is_a_megabyte_of_log(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    // The second one is printed by what the hook leaves behind.
    let start = "setsid sh -c 'head -c 1000000000 /dev/zero; echo; echo late; sleep 1000' & echo started";
    let install = "head -c 1000000000 /dev/zero; echo; echo early";
    world.deploy(&world.charm("loud", &[("install", install), ("start", start)]), "loud");
    world.deploy(&world.charm("quiet", &[]), "quiet");
    world.becomes("quiet/0", "started");
    let log = world.units_dir().join("runs/unit-0000000000/log");
    let (mut most, mut kept) = (0, 0);
    wait_for("the last word", GIGABYTES_DEADLINE, || {
        let mut log = fs::File::open(&log).ok()?;
        kept = log.metadata().ok()?.len();
        most = most.max(kept);
        // Only its end, since it is asked for often.
        let mut end = [0; LAST_WORD.len()];
        log.seek(SeekFrom::End(-i64::try_from(end.len()).unwrap())).ok()?;
        log.read_exact(&mut end).ok()?;
        (end == *LAST_WORD).then_some(())
    });
    assert!(most <= MAX_LOG_BYTES && kept >= MAX_LOG_BYTES / 2, "{most} and {kept} bytes");
    assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());
    assert_eq!(reader_of(&log), Some(binary("portcullis-keep-log")), "the small one");
    world.becomes("loud/0", "started");
    assert_eq!(world.unit("quiet/0")["agent-state"], "started");
    world.operator.does(&["destroy-service", "loud"]);
    world.operator.does(&["destroy-service", "quiet"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.ends();
}

pub(crate) fn a_full_disk_is_a_clear_state(site: &Site) {
    let small = Mount::tmpfs("3m");
    let world = World::new(site).with_units_in(small.path());
    let operator = &world.operator;
    let agent = world.agent(&[]);
    world.deploy(&world.charm("good", &[]), "good");
    world.becomes("good/0", "started");
    let fill = "cat /dev/zero >fill; echo full; exit 7";
    world.deploy(&world.charm("hog", &[("install", fill)]), "hog");
    let hog = world.becomes("hog/0", "install-error");
    assert_eq!(hog["hook-error"], "install hook: exit code 7");
    assert!(hog["hook-output"].to_string().contains("No space left on device"), "{hog}");
    // What room the end of that took is gone as well.
    let mut rest = fs::File::create(small.path().join("rest")).unwrap();
    while rest.write_all(&[1; 512]).is_ok() {}
    // A unit that comes now finds no room for anything.
    world.deploy(&world.charm("late", &[]), "late");
    let late = world.becomes("late/0", "install-error");
    let said = late["hook-error"].as_str().unwrap();
    assert!(said.starts_with("install hook: ") && said.contains("No space left on device"), "{said}");
    // One that was there before has kept a little, and lives on.
    operator.does(&["expose", "good"]);
    world.runs("good", &["install", "start", "exposed"]);
    assert_eq!(world.unit("good/0")["agent-state"], "started");
    // A full disk does not keep what fills it from being removed; then there is room again.
    operator.does(&["destroy-service", "hog"]);
    wait_for("an end of the hog", DEADLINE, || (!world.is_here("hog/0")).then_some(()));
    operator.does(&["resolved", "--retry", "late/0"]);
    world.becomes("late/0", "started");
    operator.does(&["unexpose", "good"]);
    world.runs("good", &["install", "start", "exposed", "unexposed"]);
    for service in ["good", "late"] {
        operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    world.runs("good", &["install", "start", "exposed", "unexposed", "stop"]);
    agent.ends();
}

/// Not a file more can be made, and a hook that is to end has to be told so by one.
pub(crate) fn a_full_disk_keeps_no_hook_from_being_ended(site: &Site) {
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
    agent.ends();
}

/// One that clears its environment, leaves its session and lets its parent go is found all the same.
pub(crate) fn what_forgets_where_it_came_from_ends_with_its_unit(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    let start = "env -i setsid sh -c 'echo $$ >left; exec sleep 1000' &";
    let charm = world.charm("forgetful", &[("start", start)]);
    let pid = |service: &str| {
        world.deploy(&charm, service);
        world.becomes(&format!("{service}/0"), "started");
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
    assert!(!is_alive(&first) && is_alive(&second), "its own, and nobody else's");
    world.operator.does(&["destroy-service", "second"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&second));
    agent.ends();
}

/// Without control groups it is said once what that costs; what has kept its environment is found all the same.
pub(crate) fn where_there_are_no_groups_it_is_said(site: &Site) {
    let world = World::new(site);
    let warning = "no control groups: a process that clears its environment outlives its unit, and memory is not limited";
    let agent = world.agent(&[]);
    let left = |service: &str| {
        world.deploy(&world.charm(service, &[("start", "setsid sleep 1000 & echo $! >left")]), service);
        world.becomes(&format!("{service}/0"), "started");
        fs::read_to_string(world.charm_dir(&format!("{service}/0")).join("left")).unwrap()
    };
    let with = left("with");
    assert!(!agent.said().contains(warning), "the control: {}", agent.said());
    agent.ends();
    let agent = world.agent_without_groups();
    let without = left("without");
    assert_eq!(agent.said().matches(warning).count(), 1, "{}", agent.said());
    for service in ["with", "without"] {
        world.operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&with) && !is_alive(&without));
    agent.ends();
}

/// The small program that keeps logs is not there: the daemon does it itself.
pub(crate) fn a_daemon_that_is_alone_keeps_logs_itself(site: &Site) {
    let world = World::new(site);
    let agent = world.agent_alone();
    let start =
        "setsid sh -c 'while [ ! -e go ]; do sleep 0.05; done; echo late; exec sleep 1000' & echo early";
    world.deploy(&world.charm("late", &[("start", start)]), "late");
    world.becomes("late/0", "started");
    let log = world.units_dir().join("runs/unit-0000000000/log");
    assert_eq!(fs::read_to_string(&log).unwrap(), "early\n");
    fs::write(world.charm_dir("late/0").join("go"), "").unwrap();
    wait_for("a late word", DEADLINE, || {
        (fs::read_to_string(&log).unwrap() == "early\nlate\n").then_some(())
    });
    assert_eq!(reader_of(&log), Some(world.operator.home().join("alone/portcullis")));
    world.operator.does(&["destroy-service", "late"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.ends();
}

/// Whatever it does to be somewhere else at each look: what starts another and ends, without end, is gone with its unit.
pub(crate) fn what_never_holds_still_ends_with_its_unit(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    // Whoever hops holds the writing end, and there is no other: so its last one is told for certain.
    let (held, ground) = (world.operator.home().join("held"), world.operator.home().join("ground"));
    assert!(Command::new("mkfifo").arg(&held).status().unwrap().success());
    world.share(&held);
    fs::write(&ground, "").unwrap();
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap();
    let mut held_by = fs::File::options().read(true).custom_flags(nonblocking).open(&held).unwrap();
    // A test that fails takes the ground away with its directory.
    let hop = format!(r#"[ -e {} ] && sh -c "$HOP" &"#, ground.display());
    let start = format!(
        r#"env -i PATH="$PATH" HOP='{hop}' setsid sh -c 'echo up >&9; eval "$HOP"' 9>>{} >/dev/null 2>&1 &"#,
        held.display()
    );
    world.deploy(&world.charm("hopping", &[("start", &start)]), "hopping");
    world.becomes("hopping/0", "started");
    let mut said = [0; 3];
    wait_for("the first hop", DEADLINE, || held_by.read(&mut said).ok().filter(|read| *read == 3));
    let hops = held_by.read(&mut said).map_err(|error| error.kind());
    assert_eq!(hops, Err(ErrorKind::WouldBlock), "it goes on");
    world.operator.does(&["destroy-service", "hopping"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert_eq!(held_by.read(&mut said).map_err(|error| error.kind()), Ok(0), "nobody is left to hold it");
    agent.ends();
}

/// What keeps an agent from all of its units is shown where one looks for them, and goes when it is put right.
pub(crate) fn units_without_a_place_are_a_problem(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    fs::write(world.units_dir(), "in the way").unwrap();
    let agent = world.agent(&[]);
    world.deploy(&world.charm("patient", &[]), "patient");
    let problem = || operator.status()["machines"]["0"]["problem"].as_str().map(str::to_owned);
    let said = wait_for("a problem", DEADLINE, problem);
    let place = world.units_dir().display().to_string();
    assert_eq!(
        said,
        format!("units are not looked after: cannot use {place} for units: File exists (os error 17)")
    );
    assert_eq!(world.unit("patient/0")["agent-state"], "pending");
    fs::remove_file(world.units_dir()).unwrap();
    world.becomes("patient/0", "started");
    wait_for("no problem", DEADLINE, || problem().is_none().then_some(()));
    assert_eq!(agent.said().matches("units are not looked after").count(), 1, "{}", agent.said());
    agent.ends();
}
