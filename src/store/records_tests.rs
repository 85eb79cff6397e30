//! Records are parsed and written back with unknown keys, and refused if they are invalid.

use super::*;
use crate::store::acl::Roles;
use crate::store::paths;
use proptest::prelude::*;

fn said<V: std::fmt::Debug>(result: Result<V, Error>) -> String {
    result.unwrap_err().to_string()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn records_keep_unknown_keys() {
    let path = paths::services();
    let given = r#"{"later":[1],"name":"web","charm":"local:web-3","summary":"x"}"#;
    let service = Service::parse(&path, given.as_bytes()).unwrap();
    assert_eq!((service.name.as_str(), service.charm.revision()), ("web", 3));
    assert_eq!(text(service.to_bytes()), r#"{"name":"web","charm":"local:web-3","later":[1],"summary":"x"}"#);

    let given = r#"{"name":"web/0","service":"service-0000000001","machine":null,"x":{"y":null}}"#;
    let unit = Unit::parse(&path, given.as_bytes()).unwrap();
    assert_eq!(unit.machine, None);
    assert_eq!(text(unit.to_bytes()), given);

    let given = r#"{"instance-id":"i-1","addresses":["a","b"],"adopted":true,"zone":"z"}"#;
    let machine = Machine::parse(&path, given.as_bytes()).unwrap();
    assert_eq!((machine.instance_id.as_ref().unwrap().as_str(), machine.adopted), ("i-1", true));
    assert_eq!(text(machine.to_bytes()), given);
    let pending = Machine::parse(&path, br#"{"instance-id": null}"#).unwrap();
    assert_eq!(text(pending.to_bytes()), r#"{"instance-id":null,"addresses":[]}"#);
}

#[test]
fn known_keys_take_precedence_over_unknown_ones() {
    let rest = Map::from_iter([("name".to_owned(), Value::from("evil"))]);
    let service = Service { name: "web".parse().unwrap(), charm: "local:web-1".parse().unwrap(), rest };
    assert_eq!(text(service.to_bytes()), r#"{"name":"web","charm":"local:web-1"}"#);
}

#[test]
fn errors_of_invalid_records_name_znode_and_key() {
    let path = paths::unit(UnitId::new(3));
    let at = "/units/unit-0000000003";
    for (data, problem) in [
        (r#""#, "not JSON: EOF while parsing a value at line 1 column 0"),
        (r#"null"#, "not a JSON object"),
        (r#"{}"#, "\"name\" is missing"),
        (r#"{"name": 1}"#, "\"name\" is not a text"),
        (
            r#"{"name": "web"}"#,
            "\"name\" is wrong: Invalid unit name \"web\": it has the form SERVICE/NUMBER",
        ),
        (r#"{"name": "web/0"}"#, "\"service\" is missing"),
        (
            r#"{"name": "web/0", "service": "service-0000000000", "machine": "0"}"#,
            "\"machine\" is wrong: '0' is not a machine id",
        ),
    ] {
        assert_eq!(said(Unit::parse(&path, data.as_bytes())), format!("{at}: {problem}"));
    }
    for (data, problem) in [
        (r#"{"addresses": [1]}"#, "\"addresses\" holds what is not a text"),
        (r#"{"adopted": "yes"}"#, "\"adopted\" is neither true nor false"),
        (
            r#"{"instance-id": "a b"}"#,
            "\"instance-id\" is wrong: Invalid instance name \"a b\": it takes letters, digits, \
             '-', '_', '.' and ':'",
        ),
    ] {
        assert_eq!(said(Machine::parse(&path, data.as_bytes())), format!("{at}: {problem}"));
    }
    let large = format!("{{\"x\": \"{}\"}}", "y".repeat(MAX_RECORD));
    assert_eq!(
        said(Service::parse(&path, large.as_bytes())),
        format!("{at}: {} bytes are more than the 65536 allowed", large.len())
    );
    assert_eq!(
        said(parse_counter(&path, br#"{"next": -1}"#)),
        format!("{at}: \"next\" is not a number of 32 bits")
    );
    assert_eq!(
        said(parse_counter(&path, br#"{"next": 4294967296}"#)),
        format!("{at}: \"next\" is not a number of 32 bits")
    );
}

#[test]
fn errors_do_not_contain_secrets() {
    let path = paths::unit_credentials(UnitId::new(0));
    for data in [r#"{"auth": "hunter2"}"#, r#"{"auth": ["hunter2"]}"#, "hunter2", r#"{"auth": "a:hunter2"#] {
        let refusal = said(parse_credentials(&path, data.as_bytes()));
        assert!(refusal.starts_with("/units/unit-0000000000/credentials: "), "{refusal}");
        assert!(!refusal.contains("hunter2"), "{refusal}");
    }
}

#[test]
fn the_environments_record_round_trips() {
    let credential = Credential::generate("operator").unwrap();
    for placement in [Placement::Local, Placement::Unassigned] {
        let info = Initialized {
            environment: "prod".parse().unwrap(),
            cluster_id: "abc".to_owned(),
            placement,
            roles: Roles { operator: credential.identity(), controller: credential.identity() },
        };
        assert_eq!(Initialized::parse(&paths::initialized(), &info.to_bytes()).unwrap(), info);
    }
    let later = br#"{"format": 2, "all": "new"}"#;
    assert_eq!(
        said(Initialized::parse(&paths::initialized(), later)),
        "/initialized: \"format\" is 2; this version knows 1"
    );
}

proptest! {
    #[test]
    fn parsing_never_panics(data in prop::collection::vec(any::<u8>(), 0..100)) {
        let path = paths::units();
        let named = |e: Error| e.to_string().starts_with("/units: ");
        prop_assert!(Unit::parse(&path, &data).err().is_none_or(named));
        prop_assert!(Service::parse(&path, &data).err().is_none_or(named));
        prop_assert!(Machine::parse(&path, &data).err().is_none_or(named));
        prop_assert!(Initialized::parse(&path, &data).err().is_none_or(named));
    }
}
