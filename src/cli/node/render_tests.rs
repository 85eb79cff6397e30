//! The exact output of `juju node`.

use super::*;
use crate::fleet::dbus::values::{JobMode, JobType};

const NOW: u64 = 1_794_814_812_000;

fn two_nodes() -> Vec<Node> {
    let (name, status) = ("web1".to_owned(), "online".to_owned());
    let address = Some("192.0.2.1".to_owned());
    let online = Node { name, status, address, last_seen_ms: Some(NOW) };
    let (name, status) = ("0".to_owned(), "offline".to_owned());
    vec![online, Node { name, status, address: None, last_seen_ms: None }]
}

fn state(active: &str, file: &str, result: Option<&str>) -> UnitState {
    let text = str::to_owned;
    let (load, sub) = (text("loaded"), text("running"));
    UnitState { load, active: text(active), sub, file: text(file), result: result.map(text) }
}

#[test]
fn nodes_are_printed_as_a_table_or_as_json() {
    assert_eq!(
        nodes(&two_nodes()),
        "\
NODE  STATUS   ADDRESS    LAST-SEEN
web1  online   192.0.2.1  2026-11-16T07:40:12Z
0     offline  -          -
"
    );
    assert_eq!(
        nodes_json(&two_nodes()),
        "[{\"node\":\"web1\",\"status\":\"online\",\"address\":\"192.0.2.1\",\
         \"last-seen\":\"2026-11-16T07:40:12Z\"},\
         {\"node\":\"0\",\"status\":\"offline\",\"address\":null,\"last-seen\":null}]\n"
    );
    assert_eq!((nodes(&[]).lines().count(), nodes_json(&[])), (1, "[]\n".to_owned()));
}

#[test]
fn units_are_printed_as_a_table_or_as_json() {
    let text = str::to_owned;
    let (node, name, description) = (text("web1"), text("a.service"), text("A \u{1b}[2J thing"));
    let (load, active, sub) = (text("loaded"), text("active"), text("running"));
    let all = [Unit { node, name, description, load, active, sub }];
    assert_eq!(
        units(&all),
        "\
NODE  SYSTEMD-UNIT  LOAD    ACTIVE  SUB      DESCRIPTION
web1  a.service     loaded  active  running  A ?[2J thing
"
    );
    assert_eq!(
        units_json(&all),
        "[{\"node\":\"web1\",\"systemd-unit\":\"a.service\",\"load\":\"loaded\",\"active\":\"active\",\
         \"sub\":\"running\",\"description\":\"A \\u001b[2J thing\"}]\n"
    );
}

#[test]
fn states_are_printed_as_a_table_or_as_json() {
    let all =
        [("a.service", state("active", "enabled", Some("success"))), ("b.target", state("active", "", None))];
    assert_eq!(
        states(&all),
        "\
SYSTEMD-UNIT  LOAD    ACTIVE  SUB      UNIT-FILE  RESULT
a.service     loaded  active  running  enabled    success
b.target      loaded  active  running  -          -
"
    );
    assert_eq!(
        states_json("web1", &all[1..]),
        "[{\"node\":\"web1\",\"systemd-unit\":\"b.target\",\"load\":\"loaded\",\"active\":\"active\",\
         \"sub\":\"running\",\"unit-file\":null,\"result\":null}]\n"
    );
}

#[test]
fn jobs_outcomes_and_unit_file_changes_are_printed_as_json() {
    let request =
        JobRequest { node: "web1", unit: "a.service", kind: JobType::Start, mode: JobMode::Replace };
    let job = Job { id: 7, result: Some("failed".to_owned()) };
    assert_eq!(
        job_json(request, &job),
        "{\"job\":7,\"type\":\"start\",\"node\":\"web1\",\"systemd-unit\":\"a.service\",\
         \"result\":\"failed\"}\n"
    );
    let failed = Some(("not found".to_owned(), Some("org.x.No".to_owned())));
    assert_eq!(
        outcome_json("web1", "a.service", failed).to_string(),
        "{\"node\":\"web1\",\"systemd-unit\":\"a.service\",\"error\":\"not found\",\
         \"error-name\":\"org.x.No\"}"
    );
    let changes = [("symlink".to_owned(), "/etc/a".to_owned(), "/lib/a".to_owned())];
    assert_eq!(file_changes(&changes), "CHANGE   LINK    TARGET\nsymlink  /etc/a  /lib/a\n");
    assert_eq!(file_changes(&[]), "");
    assert_eq!(
        file_changes_json("web1", &changes),
        "{\"node\":\"web1\",\"changes\":[{\"change\":\"symlink\",\"link\":\"/etc/a\",\
         \"target\":\"/lib/a\"}]}\n"
    );
}

#[test]
fn each_change_is_one_line() {
    let (node, unit) = ("web1".to_owned(), "a\n.service".to_owned());
    let changed =
        Change::Unit { node: node.clone(), unit: unit.clone(), state: state("active", "", Some("success")) };
    let removed = |is_node_lost| Change::Removed { node: node.clone(), unit: unit.clone(), is_node_lost };
    let online = Change::Node { node: node.clone(), status: "online".to_owned() };
    for (reported, text, document) in [
        (
            changed,
            "web1  a?.service  active  running  load=loaded  result=success",
            "{\"node\":\"web1\",\"systemd-unit\":\"a\\n.service\",\"load\":\"loaded\",\"active\":\"active\",\
             \"sub\":\"running\",\"unit-file\":null,\"result\":\"success\",\"event\":\"unit\"",
        ),
        (
            removed(true),
            "web1  a?.service  lost",
            "{\"node\":\"web1\",\"systemd-unit\":\"a\\n.service\",\"event\":\"unit-lost\"",
        ),
        (
            removed(false),
            "web1  a?.service  unloaded",
            "{\"node\":\"web1\",\"systemd-unit\":\"a\\n.service\",\"event\":\"unit-unloaded\"",
        ),
        (online, "web1  online", "{\"node\":\"web1\",\"status\":\"online\",\"event\":\"node\""),
    ] {
        assert_eq!(change(&reported, NOW), format!("2026-11-16T07:40:12Z  {text}\n"));
        let expected = format!("{document},\"time\":\"2026-11-16T07:40:12Z\"}}\n");
        assert_eq!(change_json(&reported, NOW), expected);
    }
}

#[test]
fn entries_of_a_journal_are_lines_without_escape_sequences() {
    for (entry, line) in [
        (
            r#"{"__REALTIME_TIMESTAMP":"1700000000123456","SYSLOG_IDENTIFIER":"nginx","_PID":"7",
               "MESSAGE":"up"}"#,
            "2023-11-14T22:13:20Z nginx[7]: up\n",
        ),
        (r#"{"_COMM":"sh","MESSAGE":"a\u001b[31mb"}"#, "- sh: a\u{fffd}[31mb\n"),
        (r#"{"MESSAGE":[104,105,255]}"#, "- -: hi\u{fffd}\n"),
        (r#"{"MESSAGE":null}"#, "- -: (a message that is too large)\n"),
        ("not JSON", "not JSON\n"),
    ] {
        assert_eq!(journal_entry(entry), line);
    }
    assert_eq!(cursor(r#"{"__CURSOR":"s=1"}"#).as_deref(), Some("s=1"));
    assert_eq!(cursor("{}"), None);
}
