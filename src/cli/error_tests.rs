//! Exit codes and hints of errors.

use anyhow::Context as _;

use super::*;
use crate::model::ServiceName;

#[test]
fn usage_errors_exit_with_2_and_all_others_with_1() {
    let typed_wrong = anyhow::Error::from(parse_arg::<ServiceName>("a b").expect_err("refused"));
    assert_eq!(code(&typed_wrong), 2);
    assert!(format!("{typed_wrong:#}").starts_with("Invalid service name \"a b\": "), "{typed_wrong:#}");
    let missing: Result<(), _> = Err(store::Error::NotBootstrapped);
    assert_eq!(code(&missing.context("cannot deploy").expect_err("kept")), 1);
}

#[test]
fn host_bits_are_a_usage_error_with_the_canonical_form() {
    let block = "10.0.0.1/8".parse().expect("a block");
    let error = anyhow::Error::from(Refusal::HostBits { text: "10.0.0.1/8".to_owned(), block });
    assert_eq!(code(&error), 2);
    assert_eq!(format!("{error:#}"), "'10.0.0.1/8' has bits set outside its prefix");
    let hint = hint(&error).expect("a hint");
    assert_eq!(hint, "--to 10.0.0.0/8 is the whole block, --to 10.0.0.1 only that address");
}

#[test]
fn failed_handshakes_have_a_hint_that_can_be_typed() {
    let name = "zk1.example".to_owned();
    for (why, part) in [
        (HandshakeFailure::OtherCa, "--ca"),
        (HandshakeFailure::NoCa, "of zk1:2181, as `cat ca.pem >> server.pem`"),
        (HandshakeFailure::Expired, "clock"),
        (HandshakeFailure::NotYetValid, "clock"),
        (HandshakeFailure::OtherName(name), "--tls-name zk1.example"),
        (HandshakeFailure::NotTls, "--zookeeper zk1:2181"),
    ] {
        let host = "zk1:2181".to_owned();
        let token = Refusal::OtherStoreThanToken { machine: MachineId::new(3), host, why: why.clone() };
        let token = hint(&token.into()).expect("a hint");
        let error = store::Error::from(tree::Error::Tls { host: "zk1:2181".to_owned(), why: why.clone() });
        let error = hint(&error.into()).expect("a hint");
        assert!(error.contains(part), "{error}");
        if why == HandshakeFailure::OtherCa {
            assert!(token.contains("`juju machine token 3`"), "{token}");
        } else {
            assert_eq!(token, error);
        }
    }
}

#[test]
fn hints_are_found_under_any_context() {
    let unreachable = tree::Error::Unreachable { hosts: "a:1".to_owned() };
    for error in [
        anyhow::Error::from(unreachable.clone()),
        anyhow::Error::from(store::Error::from(unreachable)).context("cannot deploy"),
    ] {
        assert!(hint(&error).expect("a hint").contains("portcullis up"));
    }
    assert_eq!(hint(&anyhow::anyhow!("else")), None);
}
