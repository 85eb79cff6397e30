//! Four-letter commands for monitoring.

use std::collections::HashMap;
use std::io::Read;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, dial, send};

on_both_stores![
    crate::with_super_user;
    ruok_and_isro_are_answered,
    srvr_and_stat_report_the_server,
    mntr_reports_counts,
    conf_and_envi_report_the_configuration,
    commands_may_arrive_in_pieces
];

fn ask(site: &Site, command: &str) -> String {
    let mut stream = dial(site.addr).expect("a connection");
    send(&mut stream, command.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer, and the end");
    answer
}

fn pairs(text: &str, separator: char) -> HashMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(separator)).collect()
}

fn ruok_and_isro_are_answered(site: &Site) {
    assert_eq!(ask(site, "ruok"), "imok");
    assert_eq!(ask(site, "isro"), "rw");
}

fn srvr_and_stat_report_the_server(site: &Site) {
    let client = Client::connect(site.addr);
    for command in ["srvr", "stat"] {
        let text = ask(site, command);
        assert!(text.starts_with("Zookeeper version: 3.8"), "{text}");
        for field in ["Latency min/avg/max: ", "Received: ", "Sent: ", "Connections: ", "Outstanding: "] {
            assert!(text.lines().any(|line| line.starts_with(field)), "{command} has no {field}: {text}");
        }
        assert!(text.lines().any(|line| line.starts_with("Zxid: 0x")), "{text}");
        assert!(text.lines().any(|line| line == "Mode: standalone"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("Node count: ")), "{text}");
    }
    let me = client.stream.local_addr().expect("an address").to_string();
    assert!(ask(site, "stat").contains(&format!("/{me}[")), "stat does not list the connection of {me}");
}

fn mntr_reports_counts(site: &Site) {
    let mut client = Client::connect(site.addr);
    let count = |key: &str| -> i64 {
        let text = ask(site, "mntr");
        let value = *pairs(&text, '\t').get(key).unwrap_or_else(|| panic!("no {key} in {text}"));
        value.parse().unwrap_or_else(|_| panic!("{key} is {value}"))
    };
    let (nodes, ephemerals) = (count("zk_znode_count"), count("zk_ephemerals_count"));
    client.create(&site.path("/a"), b"", Create::Persistent);
    client.create(&site.path("/b"), b"", Create::Ephemeral);
    assert_eq!(count("zk_znode_count"), nodes + 2);
    assert_eq!(count("zk_ephemerals_count"), ephemerals + 1);
    assert!(count("zk_num_alive_connections") >= 1);
    for key in ["zk_watch_count", "zk_outstanding_requests", "zk_packets_received", "zk_packets_sent"] {
        assert!(count(key) >= 0, "{key}");
    }
    assert!(count("zk_approximate_data_size") > 0);
    let text = ask(site, "mntr");
    assert_eq!(pairs(&text, '\t').get("zk_server_state"), Some(&"standalone"));
    assert!(pairs(&text, '\t')["zk_version"].starts_with("3.8"));
}

fn conf_and_envi_report_the_configuration(site: &Site) {
    let text = ask(site, "conf");
    let conf = pairs(&text, '=');
    assert_eq!(conf.get("clientPort"), Some(&site.addr.port().to_string().as_str()), "{text}");
    assert_eq!(conf.get("tickTime"), Some(&"2000"), "{text}");
    assert_eq!(conf.get("minSessionTimeout"), Some(&"4000"), "{text}");
    assert_eq!(conf.get("maxSessionTimeout"), Some(&"40000"), "{text}");
    assert!(conf.contains_key("dataDir"), "{text}");

    let text = ask(site, "envi");
    assert!(text.starts_with("Environment:\n"), "{text}");
    assert!(pairs(&text, '=')["zookeeper.version"].starts_with("3.8"), "{text}");
    assert!(pairs(&text, '=').contains_key("host.name"), "{text}");
}

fn commands_may_arrive_in_pieces(site: &Site) {
    let mut stream = dial(site.addr).expect("a connection");
    for byte in b"ruok" {
        send(&mut stream, &[*byte]).expect("sent");
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer, and the end");
    assert_eq!(answer, "imok");
}
