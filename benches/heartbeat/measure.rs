//! The measurements, each with a store and a tracker of its own.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use portcullis::heartbeat::core::audit::{Audit, Now};
use portcullis::heartbeat::core::mass_outage::HoldPhase;
use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::core::params::Params;
use portcullis::heartbeat::core::sequence::Sequence;

use crate::Row;
use crate::harness::{Store, wait_for};
use crate::load::{self, Shape, name, relay_body};
use crate::manager::Manager;
use crate::process::{Client, Site, Tracker, field, serve, serve_manager};

const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const NAMES: usize = 10_000;

/// Returns the user and system time of a process so far.
fn cpu_parts(pid: u32) -> (Duration, Duration) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let time = |field: &str| Duration::from_millis(field.parse::<u64>().unwrap() * 10);
    (time(fields[11]), time(fields[12]))
}

pub(crate) fn cpu(pid: u32) -> Duration {
    let (own, kernel) = cpu_parts(pid);
    own + kernel
}

fn rss_bytes(pid: &str) -> usize {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn metric(tracker: &Tracker, name: &str) -> u64 {
    let before = format!("portcullis_heartbeat_{name} ");
    wait_for("an answer", DEADLINE, || {
        let (_, text) = tracker.get("/metrics");
        text.lines().find_map(|line| line.strip_prefix(&before)).map(|number| number.parse().unwrap())
    })
}

/// Sends one beat for each name, as fast as a relay can.
pub(crate) fn beat_all(tracker: &Tracker, names: usize) {
    let mut client = Client::connect(tracker.addr).unwrap();
    for first in (0..names).step_by(5_000) {
        let body = relay_body(first..(first + 5_000).min(names));
        let answer = client.ask("POST", "/hmi/v1/heartbeats", &[], &body).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}

pub(crate) fn beats() -> Vec<Row> {
    let site = Site::new(Store::keeper());
    let tracker = site.tracker(&["--open"]);
    beat_all(&tracker, NAMES);
    let mut rows = Vec::new();
    let shapes = [
        ("beats per CPU-second, 64 clients, one at a time", 64, 1, "7.3k", "100k"),
        ("beats per CPU-second, 64 clients, 16 at once", 64, 16, "7.3k", "100k"),
        ("beats per CPU-second, a connection a name", NAMES, 1, "7.3k", "100k"),
    ];
    for (what, connections, pipelined, theirs, goal) in shapes {
        let shape = Shape { threads: 2, connections, pipelined, names: NAMES };
        let mut clients = load::connect(tracker.addr, shape);
        clients.run(Duration::from_secs(1));
        let (before, writes, begun) =
            (cpu_parts(tracker.pid()), metric(&tracker, "store_writes_total"), Instant::now());
        let taken = clients.run(Duration::from_secs(8));
        let (after, time) = (cpu_parts(tracker.pid()), begun.elapsed());
        let (own, kernel) = (after.0 - before.0, after.1 - before.1);
        let used = own + kernel;
        let writes = metric(&tracker, "store_writes_total") - writes;
        let per_cpu = taken as f64 / used.as_secs_f64();
        rows.push(Row {
            what,
            ours: format!("{:.0}k", per_cpu / 1000.0),
            theirs,
            goal,
            met: per_cpu >= 100_000.0,
        });
        let each = |time: Duration| time.as_secs_f64() * 1e6 / taken as f64;
        rows.push(Row {
            what: "  microseconds a beat, ours and the kernel's",
            ours: format!("{:.1} + {:.1}", each(own), each(kernel)),
            theirs: "",
            goal: "",
            met: true,
        });
        rows.push(Row {
            what: "  beats per second, on the wall",
            ours: format!("{:.0}k", taken as f64 / time.as_secs_f64() / 1000.0),
            theirs: "3.1k",
            goal: "",
            met: true,
        });
        rows.push(Row {
            what: "  writes to the store, for that many beats",
            ours: format!("{writes} for {taken}"),
            theirs: "one a beat",
            goal: "none a beat",
            met: writes * 1000 < taken,
        });
    }
    rows.push(relayed_beats(&tracker));
    rows
}

fn relayed_beats(tracker: &Tracker) -> Row {
    let mut client = Client::connect(tracker.addr).unwrap();
    let bodies: Vec<Vec<u8>> =
        (0..NAMES).step_by(1000).map(|first| relay_body(first..first + 1000)).collect();
    let (used, begun) = (cpu(tracker.pid()), Instant::now());
    let mut taken = 0;
    while begun.elapsed() < Duration::from_secs(4) {
        for body in &bodies {
            assert_eq!(client.ask("POST", "/hmi/v1/heartbeats", &[], body).unwrap().status, 200);
            taken += 1000;
        }
    }
    let per_cpu = f64::from(taken) / (cpu(tracker.pid()) - used).as_secs_f64();
    Row {
        what: "beats per CPU-second, 1000 in a call",
        ours: format!("{:.0}k", per_cpu / 1000.0),
        theirs: "",
        goal: "",
        met: true,
    }
}

pub(crate) fn memory() -> Vec<Row> {
    const MILLION: usize = 1_000_000;
    let names: Vec<Name> = (0..MILLION).map(|number| Name::parse(&name(number)).unwrap()).collect();
    let before = rss_bytes("self");
    let mut audit = Audit::new(1, &Params::default(), MILLION);
    audit.start_judging(1, HoldPhase::Quiet);
    for name in &names {
        audit.beat(2, name, false).unwrap();
    }
    let mut sequence = Sequence::above(0, 0);
    let changes = audit.judge(Now { awake: 3, wall: 3 }, 3, &mut sequence).changes.len();
    assert_eq!(changes, MILLION);
    drop(audit.take_unflushed(3, |_| 0));
    for bucket in audit.dirty().clone() {
        audit.written(bucket);
    }
    for name in &names {
        audit.beat(2_000, name, false).unwrap();
    }
    let each = (rss_bytes("self") - before) / MILLION;
    assert_eq!(audit.known(), MILLION);
    let begun = Instant::now();
    let verdict = audit.judge(Now { awake: 3_000, wall: 3_000 }, 3_000, &mut sequence);
    assert!(verdict.changes.is_empty());
    let look = begun.elapsed();
    vec![
        Row {
            what: "bytes per component, of a million",
            ours: format!("{each}"),
            theirs: "2.3k",
            goal: "256",
            met: each <= 256,
        },
        Row {
            what: "one pass over a million, none due",
            ours: format!("{:.3} ms", look.as_secs_f64() * 1000.0),
            theirs: "reads all, every 5 s",
            goal: "due components only",
            met: look < Duration::from_millis(1),
        },
    ]
}

pub(crate) fn states() -> Vec<Row> {
    let site = Site::new(Store::keeper());
    let tracker = site.tracker(&["--open"]);
    beat_all(&tracker, NAMES);
    let names: Vec<String> = (0..NAMES).map(|number| format!("\"{}\"", name(number))).collect();
    let body = format!("{{\"XNames\":[{}]}}", names.join(",")).into_bytes();
    let mut client = Client::connect(tracker.addr).unwrap();
    let mut times: Vec<Duration> = (0..100)
        .map(|_| {
            let begun = Instant::now();
            let answer = client.ask("POST", "/hmi/v1/hbstates", &[], &body).unwrap();
            let time = begun.elapsed();
            assert_eq!(answer.body.matches("true").count(), NAMES);
            time
        })
        .collect();
    times.sort_unstable();
    vec![Row {
        what: "/hbstates of 10,000 names, median (p99)",
        ours: format!("{:.1} ms ({:.1})", ms(times[50]), ms(times[98])),
        theirs: "2190 ms",
        goal: "10 ms",
        met: times[50] <= Duration::from_millis(10),
    }]
}

/// Measures the memory of the whole process with a million components, including the journal, after
/// all changes are written.
pub(crate) fn process() -> Vec<Row> {
    const MILLION: usize = 1_000_000;
    const LONG: Duration = Duration::from_secs(600);
    let site = Site::new(Store::keeper());
    site.juju(&["heartbeat", "params", "Warntime=3000", "Errtime=3600"]);
    let tracker = site.tracker(&["--open"]);
    let pid = tracker.pid().to_string();
    let before = rss_bytes(&pid);
    let begun = Instant::now();
    beat_all(&tracker, MILLION);
    wait_for("all known", LONG, || {
        (metric(&tracker, "components{health=\"ok\"}") == MILLION as u64).then_some(())
    });
    wait_for("all written", LONG, || {
        let writes = metric(&tracker, "store_writes_total");
        std::thread::sleep(Duration::from_secs(2));
        (metric(&tracker, "store_writes_total") == writes).then_some(())
    });
    let (time, each) = (begun.elapsed(), (rss_bytes(&pid) - before) / MILLION);
    vec![Row {
        what: "bytes per component of a million, whole process",
        ours: format!("{each} (in {:.0} s)", time.as_secs_f64()),
        theirs: "2.3k",
        goal: "",
        met: true,
    }]
}

/// Measures the rate of webhook notifications: one change at a time, each recorded before the next
/// one is sent.
pub(crate) fn webhook() -> Vec<Row> {
    const SOME: usize = 5_000;
    let site = Site::new(Store::keeper());
    let manager = Manager::default();
    let heard = manager.clone();
    let hook = serve(move |got| {
        heard.book().take_hook(field(&got.head, "x-portcullis-sequences").unwrap_or_default(), &got.body);
        Some(200)
    });
    let hook = format!("Webhook_url=http://{hook}/told");
    site.juju(&["heartbeat", "params", &hook, "Warntime=3000", "Errtime=3600"]);
    let tracker = site.tracker(&["--open"]);
    let begun = Instant::now();
    beat_all(&tracker, SOME);
    wait_for("all told", DEADLINE * 5, || (manager.book().hooked.len() >= SOME).then_some(()));
    let rate = SOME as f64 / begun.elapsed().as_secs_f64();
    drop(tracker);
    vec![Row {
        what: "changes told to a webhook, per second",
        ours: format!("{rate:.0}"),
        theirs: "",
        goal: "",
        met: true,
    }]
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn awake(params: &[&str]) -> (Site, Manager, Tracker) {
    let site = Site::new(Store::keeper());
    let manager = Manager::default();
    let sm = format!("Sm_url={}", serve_manager(&manager));
    let mut args = vec!["heartbeat", "params", &sm, "Interval=1", "Mass_share=0"];
    args.extend(params);
    site.juju(&args);
    let tracker = site.tracker(&["--open"]);
    (site, manager, tracker)
}

fn count(manager: &Manager, flag: &str) -> usize {
    manager.book().updates.iter().filter(|update| update.flag == flag).count()
}

pub(crate) fn deaths() -> Vec<Row> {
    let (_site, manager, tracker) = awake(&["Warntime=5", "Errtime=9"]);
    beat_all(&tracker, NAMES);
    wait_for("all started", DEADLINE, || (count(&manager, "OK") == NAMES).then_some(()));
    let begun = Instant::now();
    beat_all(&tracker, NAMES);
    let last = Instant::now();
    wait_for("all dead", DEADLINE, || (count(&manager, "Alert") == NAMES).then_some(()));
    let update =
        manager.book().updates.iter().filter(|t| t.flag == "Alert").map(|t| t.at.into_std()).max().unwrap();
    let calls = manager.book().calls;
    let time = update.saturating_duration_since(last + Duration::from_secs(9));
    vec![Row {
        what: "10,000 deaths to the last notification",
        ours: format!("{:.0} ms", ms(time)),
        theirs: "6000 ms",
        goal: "300 ms",
        met: time <= Duration::from_millis(300) && calls < 100 && begun.elapsed() > Duration::from_secs(9),
    }]
}

pub(crate) fn deadlines() -> Vec<Row> {
    const SOME: usize = 400;
    let (_site, manager, tracker) = awake(&["Warntime=5", "Errtime=3600"]);
    let mut client = Client::connect(tracker.addr).unwrap();
    // All names start together: one by one on a busy machine, the first would be late before the
    // last one starts.
    beat_all(&tracker, SOME);
    wait_for("all started", DEADLINE, || (count(&manager, "OK") == SOME).then_some(()));
    let mut last = HashMap::new();
    for number in 0..SOME {
        client.beat(&name(number)).unwrap();
        last.insert(name(number), Instant::now());
        // The beats, and so the deadlines, are a few milliseconds apart.
        std::thread::sleep(Duration::from_millis(7));
    }
    wait_for("all warned", DEADLINE, || (count(&manager, "Warning") == SOME).then_some(()));
    let book = manager.book();
    let mut errors: Vec<Duration> = book
        .updates
        .iter()
        .filter(|update| update.flag == "Warning")
        .map(|update| {
            update.at.into_std().saturating_duration_since(last[&update.name] + Duration::from_secs(5))
        })
        .collect();
    errors.sort_unstable();
    let p99 = errors[SOME * 99 / 100];
    vec![Row {
        what: "deadline error, median (p99)",
        ours: format!("{:.0} ms ({:.0})", ms(errors[SOME / 2]), ms(p99)),
        theirs: "0 to 5000 ms",
        goal: "p99 200 ms",
        met: p99 <= Duration::from_millis(200),
    }]
}

/// The session timeout of the store: a failover after a lost session takes at least as long.
const SESSION: Duration = Duration::from_secs(10);

pub(crate) fn failover() -> Vec<Row> {
    let (site, manager, first) = awake(&["Warntime=4", "Errtime=20"]);
    let second = site.tracker(&["--open"]);
    let (judge, other) = if first.is_judging() { (first, second) } else { (second, first) };
    let mut to_judge = Client::connect(judge.addr).unwrap();
    let mut to_other = Client::connect(other.addr).unwrap();
    let healthy: Vec<String> = (1..100).map(name).collect();
    to_judge.beat(&name(0)).unwrap();
    for name in &healthy {
        to_other.beat(name).unwrap();
    }
    wait_for("all started", DEADLINE, || (count(&manager, "OK") == 100).then_some(()));
    to_judge.beat(&name(0)).unwrap();
    let silent = Instant::now();
    judge.kill9();
    let warned = wait_for("the warning", DEADLINE, || {
        for name in &healthy {
            to_other.beat(name).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
        let book = manager.book();
        book.updates
            .iter()
            .find(|update| update.flag == "Warning")
            .map(|update| (update.name.clone(), update.at.into_std()))
    });
    assert_eq!(warned.0, name(0), "somebody else was called silent");
    let blind = warned.1.saturating_duration_since(silent + Duration::from_secs(4));
    let false_words = manager.book().updates.iter().filter(|t| t.flag != "OK" && t.name != name(0)).count();
    vec![Row {
        what: "failover: blind time (false warnings)",
        ours: format!("{:.1} s ({false_words})", blind.as_secs_f64()),
        theirs: "(15 of 200 wrong)",
        goal: "session + 1 s",
        met: blind <= SESSION + Duration::from_secs(1) && false_words == 0,
    }]
}
