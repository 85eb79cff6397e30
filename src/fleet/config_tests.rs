//! Tests of the configuration files.

use super::*;

const MANAGER: &str = "\
[hirte]
ManagerPort=1842
AllowedNodeNames=n1,
   n2,
   node-3
HeartbeatInterval=1000
NodeHeartbeatThreshold=3000
LogLevel=DEBUG
LogTarget=journald

[node n1]
Certificate=/etc/hirte/n1.pem
AllowDependenciesOn=n2, node-3

[node n4]
";

#[test]
fn a_file_of_hirte_is_read() {
    let read = ManagerFile::read(MANAGER).unwrap();
    assert_eq!(read.port, Some(1842));
    assert_eq!(read.heartbeat_interval, Some(Duration::from_secs(1)));
    assert_eq!(read.silence_limit, Some(Duration::from_secs(3)));
    assert_eq!(read.log_level, Some("debug"));
    let names: Vec<&str> = read.nodes.keys().map(NodeName::as_str).collect();
    assert_eq!(names, ["n1", "n2", "n4", "node-3"]);
    let n1 = &read.nodes[&"n1".parse::<NodeName>().unwrap()];
    assert_eq!(n1.certificate, Some((PathBuf::from("/etc/hirte/n1.pem"), 12)));
    let on: Vec<&str> = n1.may_depend_on.iter().map(NodeName::as_str).collect();
    assert_eq!(on, ["n2", "node-3"]);
    let bluechi = MANAGER.replace("[hirte]", "[bluechi-controller]").replace("ManagerPort", "ControllerPort");
    assert_eq!(ManagerFile::read(&bluechi).unwrap(), read);
}

#[test]
fn errors_of_a_managers_file_name_the_line() {
    for (text, expected) in [
        ("[hirte]\nManagerPort=0", "line 2: ManagerPort: expected a port, 1 to 65535"),
        ("[hirte]\nManagerPort=70000", "line 2: ManagerPort: expected a port, 1 to 65535"),
        ("[hirte]\n\nManagerPort=abc", "line 3: ManagerPort: expected a port, 1 to 65535"),
        (
            "[hirte]\nAllowedNodeNames=a, operator",
            "line 2: AllowedNodeNames: the name 'operator' is reserved",
        ),
        ("[node operator-ann]", "line 1: the name 'operator-ann' is reserved"),
        ("[node localhost]", "line 1: the name 'localhost' is reserved"),
        ("[hirte]\nHeartbeatInterval=0", "line 2: HeartbeatInterval: expected milliseconds, 100 to 600000"),
        ("[hirte]\nLogLevel=LOUD", "line 2: LogLevel: expected DEBUG, INFO, WARN or ERROR"),
        ("[hirte]\nPort=1", "line 2: unknown key 'Port'"),
        ("[node a]\nPort=1", "line 2: unknown key 'Port'"),
        ("[node a]\nCertificate=", "line 2: Certificate: expected the path of a PEM file"),
        ("[hirte-agent]\nNodeName=a", "line 1: unknown section [hirte-agent]"),
    ] {
        assert_eq!(ManagerFile::read(text).unwrap_err().to_string(), expected);
    }
    assert_eq!(ManagerFile::read("[node a_b]").unwrap_err().line, 1);
    assert_eq!(ManagerFile::read("[hirte]\nAllowedNodeNames=a,\n b,\n c_d").unwrap_err().line, 4);
}

#[test]
fn three_heartbeats_fit_into_the_threshold() {
    for (interval, threshold, line) in [
        (None, None, None),
        (Some(2_000), Some(6_000), None),
        (Some(2_000), None, None),
        (Some(2_001), None, Some(2)),
        (Some(6_000), None, Some(2)),
        (None, Some(5_000), Some(2)),
        (Some(3_000), Some(3_000), Some(3)),
        (Some(10_000), Some(30_000), None),
    ] {
        for (section, name) in [("hirte", "Node"), ("bluechi-agent", "Controller")] {
            let entry = |key: &str, ms: Option<u32>| ms.map(|ms| format!("{key}={ms}\n")).unwrap_or_default();
            let interval = entry("HeartbeatInterval", interval);
            let text =
                format!("[{section}]\n{interval}{}", entry(&format!("{name}HeartbeatThreshold"), threshold));
            let found =
                if name == "Node" { ManagerFile::read(&text).err() } else { AgentFile::read(&text).err() };
            assert_eq!(found.as_ref().map(|error| error.line), line, "{text}");
            if let Some(error) = found {
                assert!(error.reason.contains("may be at most a third of the threshold"), "{error}");
            }
        }
    }
}

#[test]
fn an_agents_file_is_read() {
    for (text, manager) in [
        ("[hirte-agent]\nNodeName=n1\nManagerHost=192.0.2.1\nManagerPort=1842", "192.0.2.1:1842"),
        ("[bluechi-agent]\nNodeName=n1\nControllerHost=manager.example\n", "manager.example:842"),
        ("[hirte-agent]\nNodeName=n1\nManagerAddress=tcp:host=10.0.0.1,port=99", "10.0.0.1:99"),
        (
            "[bluechi-agent]\nNodeName=n1\nControllerHost=a\nControllerAddress=unix:path=/run/m.sock",
            "unix:/run/m.sock",
        ),
    ] {
        let read = AgentFile::read(text).unwrap();
        assert_eq!(read.name.unwrap().as_str(), "n1");
        assert_eq!(read.manager.unwrap().to_string(), manager);
    }
    for (text, line) in [
        ("[hirte-agent]\nNodeName=a_b", 2),
        ("[hirte-agent]\n\nManagerAddress=no such host", 3),
        ("[hirte-agent]\nManagerHost=", 2),
        ("[hirte]\n", 1),
        ("[hirte-agent]\nHeartbeatInterval=1s", 2),
    ] {
        assert_eq!(AgentFile::read(text).unwrap_err().line, line, "{text}");
    }
}
