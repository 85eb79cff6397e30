//! Measurements of one server. All of them are made from outside: from replies, and from the
//! kernel's statistics of the process.

use std::time::{Duration, Instant};

use crate::harness::wire::{Client, Create, Hello, Put, op};
use crate::harness::{Kind, Options, Store};
use crate::load::{self, Load, Op};

pub(crate) const IN_FLIGHT: [usize; 3] = [1, 64, 512];
pub(crate) const SIZES: [usize; 2] = [100, 1_000];
pub(crate) const SESSIONS: usize = 1_000;
pub(crate) const ZNODES: usize = 100_000;
pub(crate) const ENOUGH_CPU: Duration = Duration::from_millis(400);
pub(crate) const MAX_ROUNDS: usize = 4;

#[derive(Debug)]
pub(crate) struct Throughput {
    pub(crate) op: Op,
    pub(crate) in_flight: usize,
    pub(crate) bytes: usize,
    pub(crate) per_cpu_second: f64,
    pub(crate) per_second: f64,
}

/// The median time from request to reply, with one request at a time.
#[derive(Debug)]
pub(crate) struct Latency {
    pub(crate) op: Op,
    pub(crate) bytes: usize,
    pub(crate) zookeeper: Duration,
    pub(crate) keeper: Duration,
}

#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) throughput: Vec<Throughput>,
    /// From the write to the last of a thousand events, and the server's CPU time for one event.
    pub(crate) fan_out: Duration,
    pub(crate) fan_out_cpu: Duration,
    pub(crate) idle_kb: u64,
    pub(crate) full_kb: u64,
    pub(crate) first_answer: Duration,
    pub(crate) first_answer_full: Duration,
}

pub(crate) fn all(kind: Kind) -> Figures {
    let (first_answer, idle_kb, first_answer_full, full_kb) = start_and_size(kind);
    let store = start(kind);
    warm_up(&store);
    let throughput = throughput(&store);
    let (fan_out, fan_out_cpu) = fan_out(&store);
    Figures { throughput, fan_out, fan_out_cpu, idle_kb, full_kb, first_answer, first_answer_full }
}

fn start(kind: Kind) -> Store {
    Store::start(kind, Options { tuned_for_work: true, ..Options::default() })
}

fn load(op: Op, in_flight: usize, bytes: usize, count: usize, name: &str) -> Load {
    Load { op, in_flight, bytes, count, parent: format!("/{name}") }
}

fn start_and_size(kind: Kind) -> (Duration, u64, Duration, u64) {
    // Measures the second of two starts, because the first one reads the programs from the disk.
    drop(start(kind));
    let begin = Instant::now();
    let mut store = start(kind);
    let first_answer = begin.elapsed();
    let idle_kb = resident_kb(store.pid());

    let fill = load(Op::Create, 256, 100, ZNODES, "full");
    load::prepare(store.addr(), &fill);
    load::run(store.addr(), &fill);
    let full_kb = resident_kb(store.pid());
    store.kill9();
    let begin = Instant::now();
    store.restart();
    let first_answer_full = begin.elapsed();
    let last = Client::connect(store.addr()).get(&format!("/full/{}", ZNODES - 1));
    assert!(last.is_ok(), "some data is missing");
    (first_answer, idle_kb, first_answer_full, full_kb)
}

/// The JVM compiles code while it runs: the measurements use the compiled code.
fn warm_up(store: &Store) {
    for (op, count) in [(Op::Get, 150_000), (Op::Set, 60_000), (Op::Create, 30_000)] {
        let load = load(op, 64, 100, count, &format!("warm-{}", op.name()));
        load::prepare(store.addr(), &load);
        load::run(store.addr(), &load);
    }
}

fn throughput(store: &Store) -> Vec<Throughput> {
    let mut results = Vec::new();
    for bytes in SIZES {
        for op in Op::ALL {
            for in_flight in IN_FLIGHT {
                let count = match (in_flight, op) {
                    (1, _) => 3_000,
                    (_, Op::Create) => 40_000,
                    _ => 100_000,
                };
                let load = load(op, in_flight, bytes, count, &format!("{}-{bytes}-{in_flight}", op.name()));
                // Several rounds for creates, because not every round includes a snapshot.
                let least = if op == Op::Create { MAX_ROUNDS - 1 } else { 1 };
                let (mut wall, mut used, mut rounds) = (Duration::ZERO, Duration::ZERO, 0);
                // The kernel counts in ticks of 10 ms: a fast server repeats the load until there
                // are enough of them.
                while rounds < least || (used < ENOUGH_CPU && rounds < MAX_ROUNDS) {
                    let parent = format!("{}-{rounds}", load.parent);
                    let load = Load { parent, ..load.clone() };
                    load::prepare(store.addr(), &load);
                    let before = cpu(store.pid());
                    wall += load::run(store.addr(), &load).wall;
                    used += cpu(store.pid()) - before;
                    rounds += 1;
                }
                let per = |time: Duration| (rounds * count) as f64 / time.as_secs_f64().max(1e-3);
                let (per_cpu_second, per_second) = (per(used), per(wall));
                results.push(Throughput { op, in_flight, bytes, per_cpu_second, per_second });
            }
        }
    }
    results
}

/// Measures both servers in turns, so that a slow phase of the disk affects both.
pub(crate) fn latencies() -> Vec<Latency> {
    let stores = [start(Kind::ZooKeeper), start(Kind::Keeper)];
    stores.iter().for_each(warm_up);
    let mut results = Vec::new();
    for bytes in SIZES {
        for op in Op::ALL {
            let mut times = [Vec::new(), Vec::new()];
            for turn in 0..20 {
                for (store, times) in stores.iter().zip(&mut times) {
                    let load = load(op, 1, bytes, 50, &format!("p50-{}-{bytes}-{turn}", op.name()));
                    load::prepare(store.addr(), &load);
                    times.extend(load::run(store.addr(), &load).times);
                }
            }
            let [zookeeper, keeper] = times.map(|mut times| {
                times.sort_unstable();
                times[times.len() / 2]
            });
            results.push(Latency { op, bytes, zookeeper, keeper });
        }
    }
    results
}

fn fan_out(store: &Store) -> (Duration, Duration) {
    const ROUNDS: u32 = 50;
    let mut writer = Client::connect(store.addr());
    writer.create("/fan", b"", Create::Persistent);
    // A long timeout: these clients send no pings, and a thousand sessions take long on a busy
    // machine.
    let patient = Hello { timeout_ms: 40_000, ..Hello::default() };
    let mut watchers: Vec<Client> = (0..SESSIONS)
        .map(|_| {
            let mut client = Client::try_connect(store.addr(), &patient).expect("a session");
            assert_eq!(client.call(op::ADD_WATCH, &Put::new().bytes("/fan").int(0)).err, 0);
            client
        })
        .collect();
    let mut times = Vec::new();
    let mut before = cpu(store.pid());
    for round in 0..2 * ROUNDS {
        if round == ROUNDS {
            // The first half warms up the JVM.
            times.clear();
            before = cpu(store.pid());
        }
        let begin = Instant::now();
        writer.set_if_version("/fan", b"x", -1).expect("written");
        for watcher in &mut watchers {
            assert_eq!(watcher.receive().expect("an event").xid, -1);
        }
        times.push(begin.elapsed());
    }
    let events = ROUNDS * u32::try_from(SESSIONS).expect("a small number");
    let cpu = (cpu(store.pid()) - before) / events;
    times.sort_unstable();
    (times[times.len() / 2], cpu)
}

/// Returns the user and system time of the process so far, in the kernel's ticks of 10 ms.
pub(crate) fn cpu(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a running server");
    let (_, fields) = text.rsplit_once(") ").expect("the end of the name");
    let ticks: u64 =
        fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(10 * ticks)
}

fn resident_kb(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a running server");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim_end_matches("kB").trim().parse().expect("a number")
}
