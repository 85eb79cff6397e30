//! A ZooKeeper ensemble of three members on the hub, each on an address of its own. Tests kill
//! members and start them again.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::harness::{START_DEADLINE, wait_for};
use crate::net::{Net, store_address};

const MEMBERS: usize = 3;
const TIMEOUT: Duration = Duration::from_millis(500);

pub(crate) struct Ensemble<'a> {
    net: &'a Net,
    dir: TempDir,
    members: Vec<Option<Child>>,
}

impl<'a> Ensemble<'a> {
    pub(crate) fn start(net: &'a Net) -> Self {
        let dir = tempfile::Builder::new().prefix("portcullis-test-").tempdir().unwrap();
        let mut ensemble = Self { net, dir, members: (0..MEMBERS).map(|_| None).collect() };
        for member in 0..MEMBERS {
            ensemble.start_member(member);
        }
        ensemble.is_whole();
        ensemble
    }

    /// Returns the connect string for clients.
    pub(crate) fn hosts() -> String {
        (0..MEMBERS).map(|member| format!("{}:2181", store_address(member))).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn start_member(&mut self, member: usize) {
        let data = self.data(member);
        fs::create_dir_all(&data).unwrap();
        fs::write(data.join("myid"), (member + 1).to_string()).unwrap();
        let mut text = format!(
            "tickTime=1000\ninitLimit=20\nsyncLimit=10\ndataDir={}\nclientPort=2181\nclientPortAddress={}\n\
             maxClientCnxns=0\n4lw.commands.whitelist=*\nadmin.enableServer=false\n",
            data.display(),
            store_address(member)
        );
        for other in 0..MEMBERS {
            text.push_str(&format!("server.{}={}:2888:3888\n", other + 1, store_address(other)));
        }
        let config = data.join("zoo.cfg");
        fs::write(&config, text).unwrap();
        let mut command = Command::new("java");
        command.args(["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
        // Without it an election can take half a minute.
        command.arg("-Dzookeeper.fastleader.maxNotificationInterval=1000");
        command.args(["-cp", "/usr/share/java/zookeeper.jar"]);
        command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain").arg(config);
        command.env("PATH", std::env::var_os("PATH").unwrap());
        let mut command = self.net.on_hub(&command);
        // Without a logger the server prints nothing.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.members[member] = Some(command.spawn().unwrap());
    }

    fn data(&self, member: usize) -> PathBuf {
        self.dir.path().join(member.to_string())
    }

    fn ask(&self, member: usize, word: &str) -> Option<String> {
        let to = format!("{}:2181", store_address(member)).parse().unwrap();
        self.net.hub().enter(|| {
            let mut stream = TcpStream::connect_timeout(&to, TIMEOUT).ok()?;
            stream.set_read_timeout(Some(TIMEOUT)).ok()?;
            stream.write_all(word.as_bytes()).ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            Some(answer)
        })
    }

    fn leader(&self) -> Option<usize> {
        let leads =
            |member: &usize| self.ask(*member, "srvr").is_some_and(|said| said.contains("Mode: leader"));
        (0..MEMBERS).find(leads)
    }

    /// Waits until there is a leader and all other members follow it.
    pub(crate) fn is_whole(&self) {
        wait_for("whole ensemble", START_DEADLINE, || {
            let said = self.ask(self.leader()?, "mntr")?;
            said.lines().any(|line| line == "zk_synced_followers\t2").then_some(())
        });
    }

    /// Kills the leader and returns its number.
    pub(crate) fn kill_leader(&mut self) -> usize {
        let leader = wait_for("a leader", START_DEADLINE, || self.leader());
        let mut child = self.members[leader].take().expect("a member that runs");
        child.kill().unwrap();
        child.wait().unwrap();
        leader
    }
}

impl Drop for Ensemble<'_> {
    fn drop(&mut self) {
        for mut member in self.members.iter_mut().filter_map(Option::take) {
            // The member may have ended already.
            let _ = (member.kill(), member.wait());
        }
    }
}
