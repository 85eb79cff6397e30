//! The four-letter words: what an operator's `nc` and monitoring ask. Pure text from a few figures.

use std::fmt::Write as _;

/// ZooKeeper's version whose behaviour this server has; clients choose features by it.
pub const ZOOKEEPER_VERSION: &str = "3.8.0";

/// What the answers are made of.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub zxid: i64,
    pub node_count: usize,
    pub data_bytes: usize,
    pub ephemerals: usize,
    pub watches: usize,
    pub sessions: usize,
    pub connections: usize,
    pub connections_refused: u64,
    pub outstanding_closed: u64,
    /// Connections that were closed because they did not authenticate in time.
    pub strangers_closed: u64,
    pub rights_refused: u64,
    pub bad_frames: u64,
    /// Requests that were refused because of a limit on identities, watches or answers.
    pub limits_refused: u64,
    /// Changes are refused until the disk has room again.
    pub disk_full: bool,
    pub buffer_bytes: usize,
    /// Connections that were closed because the buffers of all were full.
    pub buffers_closed: u64,
    pub watch_path_bytes: usize,
    pub identities: usize,
    pub max_connections_per_address: usize,
    pub received: u64,
    pub sent: u64,
    pub uptime_ms: i64,
    pub port: u16,
    pub tls_port: Option<u16>,
    pub data_dir: String,
    pub tick_ms: i32,
    pub max_connections: usize,
    pub min_timeout_ms: i32,
    pub max_timeout_ms: i32,
    /// `address[session]` of each connection.
    pub clients: Vec<String>,
}

/// Whether the first bytes of a connection are a word that we answer.
pub fn is_word(bytes: [u8; 4]) -> bool {
    matches!(&bytes, b"ruok" | b"srvr" | b"stat" | b"mntr" | b"conf" | b"envi" | b"isro")
}

fn version() -> String {
    format!("{ZOOKEEPER_VERSION}-portcullis-{}", env!("CARGO_PKG_VERSION"))
}

pub fn answer(word: [u8; 4], facts: &Facts) -> String {
    match &word {
        b"ruok" => "imok".to_owned(),
        b"isro" => "rw".to_owned(),
        b"srvr" => server(facts, false),
        b"stat" => server(facts, true),
        b"mntr" => monitor(facts),
        b"conf" => configuration(facts),
        b"envi" => format!("Environment:\nzookeeper.version={}\nhost.name={}\n", version(), host_name()),
        _ => String::new(),
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |s| s.trim().to_owned())
}

fn server(facts: &Facts, clients: bool) -> String {
    let mut text = format!("Zookeeper version: {}\n", version());
    if clients {
        text.push_str("Clients:\n");
        for client in &facts.clients {
            let _infallible = writeln!(text, " /{client}");
        }
        text.push('\n');
    }
    let _infallible = write!(
        text,
        "Latency min/avg/max: 0/0.0/0\nReceived: {}\nSent: {}\nConnections: {}\nOutstanding: 0\nZxid: {:#x}\n\
         Mode: standalone\nNode count: {}\n",
        facts.received, facts.sent, facts.connections, facts.zxid, facts.node_count
    );
    text
}

fn monitor(facts: &Facts) -> String {
    let rows = [
        ("version", version()),
        ("server_state", "standalone".to_owned()),
        ("uptime", facts.uptime_ms.to_string()),
        ("num_alive_connections", facts.connections.to_string()),
        ("connection_rejected", facts.connections_refused.to_string()),
        ("outstanding_closed", facts.outstanding_closed.to_string()),
        ("unauthenticated_closed", facts.strangers_closed.to_string()),
        ("disk_full", u8::from(facts.disk_full).to_string()),
        ("buffers_closed", facts.buffers_closed.to_string()),
        ("buffer_bytes", facts.buffer_bytes.to_string()),
        ("rights_refused", facts.rights_refused.to_string()),
        ("limits_refused", facts.limits_refused.to_string()),
        ("bad_frames", facts.bad_frames.to_string()),
        ("identities", facts.identities.to_string()),
        ("watch_path_bytes", facts.watch_path_bytes.to_string()),
        ("outstanding_requests", "0".to_owned()),
        ("packets_received", facts.received.to_string()),
        ("packets_sent", facts.sent.to_string()),
        ("znode_count", facts.node_count.to_string()),
        ("watch_count", facts.watches.to_string()),
        ("ephemerals_count", facts.ephemerals.to_string()),
        ("approximate_data_size", facts.data_bytes.to_string()),
        ("global_sessions", facts.sessions.to_string()),
    ];
    rows.iter().map(|(name, value)| format!("zk_{name}\t{value}\n")).collect()
}

fn configuration(facts: &Facts) -> String {
    let tls = facts.tls_port.map_or_else(String::new, |port| format!("secureClientPort={port}\n"));
    format!(
        "clientPort={}\n{tls}dataDir={}\ntickTime={}\nmaxClientCnxns={}\nmaxCnxns={}\nminSessionTimeout={}\nmaxSessionTimeout={}\n\
         serverId=0\n",
        facts.port,
        facts.data_dir,
        facts.tick_ms,
        facts.max_connections_per_address,
        facts.max_connections,
        facts.min_timeout_ms,
        facts.max_timeout_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_an_answer() {
        for word in [b"ruok", b"srvr", b"stat", b"mntr", b"conf", b"envi", b"isro"] {
            assert!(is_word(*word) && !answer(*word, &Facts::default()).is_empty());
        }
        assert!(!is_word([0, 0, 0, 45]));
    }

    #[test]
    fn clients_find_the_version_where_they_look_for_it() {
        assert!(answer(*b"envi", &Facts::default()).contains("\nzookeeper.version=3.8.0-"));
        assert!(answer(*b"srvr", &Facts::default()).contains("\nMode: standalone\n"));
    }
}
