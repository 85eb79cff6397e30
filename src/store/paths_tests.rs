//! The paths of znodes.

use super::*;

#[test]
fn paths_are_as_laid_out() {
    let name: UnitName = "wordpress/3".parse().unwrap();
    for (path, text) in [
        (root().child("x"), "/x"),
        (exposed(ServiceId::new(1)), "/services/service-0000000001/exposed"),
        (service_credentials(ServiceId::new(1)), "/services/service-0000000001/credentials"),
        (machine_firewall(MachineId::new(0)), "/machines/machine-0000000000/firewall"),
        (machine_firewall_log(MachineId::new(0)), "/machines/machine-0000000000/firewall/log"),
        (firewall_log(MachineId::new(0)), "/controller/firewall/machine-0000000000/log"),
        (unit_ports(UnitId::new(2)), "/units/unit-0000000002/ports"),
        (unit_agent(UnitId::new(2)), "/units/unit-0000000002/agent"),
        (unit_state(UnitId::new(2)), "/units/unit-0000000002/state"),
        (unit_credentials(UnitId::new(2)), "/units/unit-0000000002/credentials"),
        (machine_agent(MachineId::new(0)), "/machines/machine-0000000000/agent"),
        (
            machine_stopping_unit(MachineId::new(0), UnitId::new(2)),
            "/machines/machine-0000000000/stopping/unit-0000000002",
        ),
        (machine_problem(MachineId::new(0)), "/machines/machine-0000000000/problem"),
        (authority(), "/authority"),
        (machine_certificate_request(MachineId::new(0)), "/machines/machine-0000000000/certificate-request"),
        (machine_certificate(MachineId::new(0)), "/machines/machine-0000000000/certificate"),
        (machine_credentials(MachineId::new(0)), "/machines/machine-0000000000/credentials"),
        (
            machine_unit(MachineId::new(0), UnitId::new(2)),
            "/machines/machine-0000000000/units/unit-0000000002",
        ),
        (tombstone(MachineId::new(0)), "/tombstones/machine-0000000000"),
        (machine_name(&"web".parse().unwrap()), "/names/machines/web"),
        (service_name(name.service()), "/names/services/wordpress"),
        (unit_name(&name), "/names/units/wordpress/3"),
        (heartbeat_batch("a1", 7), "/controller/heartbeat/beats/a1-0000000007"),
        (heartbeat_bucket(17), "/controller/heartbeat/components/0017"),
        (heartbeat_page(17), "/controller/heartbeat/journal/0000000017"),
    ] {
        assert_eq!(path.as_str(), text);
    }
    assert_eq!(heartbeat_node(&heartbeat_bucket(17)), HeartbeatNode::Bucket(17));
    assert_eq!(heartbeat_node(&heartbeat_page(17)), HeartbeatNode::Page);
    assert_eq!(heartbeat_node(&heartbeat_replica("a1")), HeartbeatNode::Replica);
    assert_eq!(heartbeat_node(&heartbeat_question()), HeartbeatNode::Question);
    assert_eq!(heartbeat_node(&controller()), HeartbeatNode::Other);
    let HeartbeatNode::Batch(batch) = heartbeat_node(&heartbeat_batch("a1", 7)) else { panic!("no batch") };
    assert_eq!(heartbeat_batch_of(&batch), Some(("a1", 7)));
}
