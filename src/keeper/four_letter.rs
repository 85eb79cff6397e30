//! ZooKeeper's four-letter commands (`ruok`, `mntr`, ...), which operators and monitoring send
//! without a session. Formats statistics as text; collecting them does not belong here.

use std::fmt::Write as _;

/// The ZooKeeper version that this server implements. Clients select features by it.
pub const ZOOKEEPER_VERSION: &str = "3.8.0";

/// The statistics that the commands report.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    pub zxid: i64,
    pub node_count: usize,
    pub data_bytes: usize,
    pub ephemerals: usize,
    pub watches: usize,
    pub sessions: usize,
    pub connections: usize,
    pub connections_refused: u64,
    pub outstanding_closed: u64,
    /// Connections closed because they did not authenticate in time.
    pub unauthenticated_closed: u64,
    pub rights_refused: u64,
    pub bad_frames: u64,
    /// Requests refused because of a limit on identities, watches or reply size.
    pub limits_refused: u64,
    /// Whether writes are refused because the disk is full.
    pub disk_full: bool,
    pub buffer_bytes: usize,
    /// Connections closed because the buffers of all connections were full.
    pub buffers_closed: u64,
    pub watch_path_bytes: usize,
    pub identities: usize,
    pub max_connections_per_address: usize,
    pub received: u64,
    pub sent: u64,
    /// Syncs of the log.
    pub syncs: u64,
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

/// Returns whether the first bytes of a connection are a supported command.
pub fn is_command(bytes: [u8; 4]) -> bool {
    matches!(&bytes, b"ruok" | b"srvr" | b"stat" | b"mntr" | b"conf" | b"envi" | b"isro")
}

fn version() -> String {
    format!("{ZOOKEEPER_VERSION}-portcullis-{}", env!("CARGO_PKG_VERSION"))
}

pub fn answer(command: [u8; 4], stats: &Stats) -> String {
    match &command {
        b"ruok" => "imok".to_owned(),
        b"isro" => "rw".to_owned(),
        b"srvr" => server(stats, false),
        b"stat" => server(stats, true),
        b"mntr" => monitor(stats),
        b"conf" => configuration(stats),
        b"envi" => format!("Environment:\nzookeeper.version={}\nhost.name={}\n", version(), host_name()),
        _ => String::new(),
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |s| s.trim().to_owned())
}

fn server(stats: &Stats, clients: bool) -> String {
    let mut text = format!("Zookeeper version: {}\n", version());
    if clients {
        text.push_str("Clients:\n");
        for client in &stats.clients {
            let _infallible = writeln!(text, " /{client}");
        }
        text.push('\n');
    }
    let _infallible = write!(
        text,
        "Latency min/avg/max: 0/0.0/0\nReceived: {}\nSent: {}\nConnections: {}\nOutstanding: 0\nZxid: {:#x}\n\
         Mode: standalone\nNode count: {}\n",
        stats.received, stats.sent, stats.connections, stats.zxid, stats.node_count
    );
    text
}

fn monitor(stats: &Stats) -> String {
    let rows = [
        ("version", version()),
        ("server_state", "standalone".to_owned()),
        ("uptime", stats.uptime_ms.to_string()),
        ("num_alive_connections", stats.connections.to_string()),
        ("connection_rejected", stats.connections_refused.to_string()),
        ("outstanding_closed", stats.outstanding_closed.to_string()),
        ("unauthenticated_closed", stats.unauthenticated_closed.to_string()),
        ("disk_full", u8::from(stats.disk_full).to_string()),
        ("buffers_closed", stats.buffers_closed.to_string()),
        ("buffer_bytes", stats.buffer_bytes.to_string()),
        ("rights_refused", stats.rights_refused.to_string()),
        ("limits_refused", stats.limits_refused.to_string()),
        ("bad_frames", stats.bad_frames.to_string()),
        ("identities", stats.identities.to_string()),
        ("watch_path_bytes", stats.watch_path_bytes.to_string()),
        ("outstanding_requests", "0".to_owned()),
        ("packets_received", stats.received.to_string()),
        ("packets_sent", stats.sent.to_string()),
        ("fsync_count", stats.syncs.to_string()),
        ("znode_count", stats.node_count.to_string()),
        ("watch_count", stats.watches.to_string()),
        ("ephemerals_count", stats.ephemerals.to_string()),
        ("approximate_data_size", stats.data_bytes.to_string()),
        ("global_sessions", stats.sessions.to_string()),
    ];
    rows.iter().map(|(name, value)| format!("zk_{name}\t{value}\n")).collect()
}

fn configuration(stats: &Stats) -> String {
    let tls = stats.tls_port.map_or_else(String::new, |port| format!("secureClientPort={port}\n"));
    format!(
        "clientPort={}\n{tls}dataDir={}\ntickTime={}\nmaxClientCnxns={}\nmaxCnxns={}\n\
         minSessionTimeout={}\nmaxSessionTimeout={}\n\
         serverId=0\n",
        stats.port,
        stats.data_dir,
        stats.tick_ms,
        stats.max_connections_per_address,
        stats.max_connections,
        stats.min_timeout_ms,
        stats.max_timeout_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_an_answer() {
        for command in [b"ruok", b"srvr", b"stat", b"mntr", b"conf", b"envi", b"isro"] {
            assert!(is_command(*command) && !answer(*command, &Stats::default()).is_empty());
        }
        assert!(!is_command([0, 0, 0, 45]));
    }

    #[test]
    fn version_and_mode_are_reported_as_in_zookeeper() {
        assert!(answer(*b"envi", &Stats::default()).contains("\nzookeeper.version=3.8.0-"));
        assert!(answer(*b"srvr", &Stats::default()).contains("\nMode: standalone\n"));
    }
}
