//! The events of a world: calls of clients, changes on nodes, and faults.

use std::time::Duration;

use portcullis::fleet::dbus::values::JobType;
use tokio::time::sleep;

use crate::client::{Client, MANAGER, call};
use crate::world::{Caller, MS, UNITS, World};

const JOBS: [&str; 4] = ["StartUnit", "StopUnit", "RestartUnit", "ReloadUnit"];
const READS: [&str; 3] = ["GetUnitProperties", "GetUnitFileState", "FreezeUnit"];
const PATTERNS: [&str; 4] = ["*", "quick.service", "*low.service", "s*"];

fn node_path(node: &str) -> String {
    format!("{MANAGER}/node/{node}")
}

impl World {
    fn duration(&mut self, most_ms: usize) -> Duration {
        MS * u32::try_from(self.random.below(most_ms)).expect("small")
    }

    pub(crate) async fn event(&mut self) {
        let names = self.names();
        let node = self.random.pick(&names);
        match self.random.below(40) {
            0..12 => self.start_job(node),
            12..15 => self.cancel().await,
            15..17 => self.read(node),
            17..21 => self.change_monitors(node).await,
            21 => {
                self.note("client leaves", "");
                let at = self.random.below(self.callers.len());
                let client = Client::open(&self.network).await;
                self.callers[at] = Caller { client, monitors: Vec::new() };
            }
            22..25 => {
                self.note("local job", node);
                let (unit, kind) =
                    (self.random.pick(&UNITS), self.random.pick(&[JobType::Start, JobType::Stop]));
                self.node(node).start_locally(unit, kind).await;
            }
            25..28 => {
                let time = self.duration(9_000);
                self.note("link held", &format!("{node} for {time:?}"));
                self.network.hold(node, true);
                let network = self.network.clone();
                tokio::spawn(async move {
                    sleep(time).await;
                    network.hold(node, false);
                });
                self.coverage.lost_nodes += usize::from(time > Duration::from_secs(7));
            }
            28..30 => {
                self.note("connection reset", node);
                self.network.reset(node);
            }
            30..32 => {
                let with_signal = self.random.one_in(2);
                self.note(if with_signal { "agent stopped" } else { "agent killed" }, node);
                self.stop_agent(node, with_signal).await;
                sleep(self.duration(2_000)).await;
                self.start_agent(node);
            }
            32 => {
                // The manager notices nothing until the node answers again, or is silent for too
                // long.
                self.note("reboot", node);
                self.network.hold(node, true);
                self.stop_agent(node, false).await;
                sleep(self.duration(9_000)).await;
                self.network.hold(node, false);
                self.start_agent(node);
            }
            33..35 => {
                let with_signal = self.random.one_in(2);
                self.note(if with_signal { "manager stopped" } else { "manager killed" }, "");
                let pause = self.duration(3_000);
                self.restart_manager(with_signal, pause).await;
            }
            35..37 => {
                let time = self.duration(24_000);
                self.note("systemd hangs", &format!("{node} for {time:?}"));
                let systemd = self.node(node).systemd.clone();
                systemd.set_answering(false);
                tokio::spawn(async move {
                    sleep(time).await;
                    systemd.set_answering(true);
                });
            }
            37 => {
                self.note("node removed and added", node);
                let mut rules = self.rules();
                rules.retain(|name, _| name.as_str() != node);
                self.manager.set_nodes(rules);
                sleep(self.duration(200)).await;
                self.manager.set_nodes(self.rules());
            }
            38 => {
                self.note("slow units start", node);
                self.node(node).systemd.let_slow_start();
            }
            _ => {
                let latency = self.duration(100);
                self.note("latency", &format!("{node} {latency:?}"));
                self.network.delay(node, latency);
            }
        }
    }

    fn start_job(&mut self, node: &'static str) {
        let (member, unit) = (self.random.pick(&JOBS), self.random.pick(&UNITS));
        let mode = self.random.pick(&["replace", "fail"]);
        self.note("job", &format!("{member} {unit} on {node}, {mode}"));
        self.node(node).asked += 1;
        let at = self.random.below(self.callers.len());
        let connection = self.callers[at].client.connection.clone();
        self.calls.spawn(async move {
            // A refusal is an answer.
            let _ = call(&connection, &node_path(node), member, &(unit, mode)).await;
        });
    }

    async fn cancel(&mut self) {
        let jobs = self.observer.children("job").await;
        if jobs.is_empty() {
            return;
        }
        let job = &jobs[self.random.below(jobs.len())];
        self.note("cancel", job);
        // The job may have ended.
        let _ = self.observer.call(&format!("{MANAGER}/job/{job}"), "Cancel", &()).await;
    }

    fn read(&mut self, node: &'static str) {
        let (member, unit) = (self.random.pick(&READS), self.random.pick(&UNITS));
        let at = self.random.below(self.callers.len());
        let connection = self.callers[at].client.connection.clone();
        let lists = self.random.one_in(2);
        self.note("read", if lists { "ListUnits" } else { member });
        self.calls.spawn(async move {
            let _ = match lists {
                true => call(&connection, MANAGER, "ListUnits", &()).await,
                false => call(&connection, &node_path(node), member, &unit).await,
            };
        });
    }

    async fn change_monitors(&mut self, node: &'static str) {
        let (at, pattern) = (self.random.below(self.callers.len()), self.random.pick(&PATTERNS));
        let node = if self.random.one_in(2) { "*" } else { node };
        let choice = self.random.below(4);
        self.note("monitor", &format!("{node} {pattern} {choice}"));
        let caller = &mut self.callers[at];
        let Some(path) = caller.monitors.last().cloned() else {
            caller.monitors.push(caller.client.monitor().await.expect("a monitor"));
            return;
        };
        match choice {
            0 | 1 => {
                caller.client.call(&path, "Subscribe", &(node, pattern)).await.expect("a subscription");
            }
            2 => {
                // There may be no such subscription.
                let _ = caller.client.call(&path, "Unsubscribe", &(node, pattern)).await;
            }
            _ => {
                caller.client.call(&path, "Close", &()).await.expect("a reply");
                caller.monitors.pop();
            }
        }
    }
}
