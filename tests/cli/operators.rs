//! Several operators of one environment.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use portcullis::net::tls::authority::Names;
use portcullis::net::tls::certificate::Certificate;
use portcullis::net::tls::key::PrivateKey;

use crate::harness::golden;
use crate::harness::scenario::{Site, on_both_stores};
use crate::operator::{Operator, fixture_charm};

on_both_stores![operators_have_credentials_of_their_own_and_are_named_in_the_log];

fn operators_have_credentials_of_their_own_and_are_named_in_the_log(site: &Site) {
    let first = Operator::bootstrapped(site);
    first.does(&["deploy", &fixture_charm("wordpress")]);
    // Without a file for the credentials there is no entry.
    let directory = first.config("local-operators");
    fs::write(&directory, "").unwrap();
    let refused = first.juju(&["operator", "add", "alice"]);
    assert!(refused.code == 1 && refused.stderr.contains("cannot write"), "{refused:?}");
    assert_eq!(first.does(&["operator", "list"]).stdout, "operator\n");
    fs::remove_file(&directory).unwrap();
    let added = first.does(&["operator", "add", "alice"]);
    assert!(!added.stderr.contains("hint"), "{added:?}");
    assert_eq!(first.does(&["operator", "list"]).stdout, "operator\nalice\n");
    let file = first.config("local-operators/alice.json");
    let secrets = [&file, &first.config("local.json")].map(|path| {
        let json: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        json["auth"].as_str().unwrap().to_owned()
    });
    assert!(secrets[0].starts_with("operator-alice:") && secrets[0] != secrets[1]);
    assert!(first.config("local-operators/alice.pem").exists(), "a certificate");

    let alice = Operator::at(site);
    fs::create_dir_all(alice.config("")).unwrap();
    fs::copy(&file, alice.config("local.json")).unwrap();
    alice.does(&["expose", "wordpress"]);
    first.does(&["unexpose", "wordpress"]);
    alice.does(&["expose", "wordpress", "--to", "192.0.2.0/24"]);
    let log = first.does(&["firewall", "log"]).stdout;
    let lines: Vec<&str> =
        log.lines().filter_map(|line| line.split_once("  ").map(|(_, rest)| rest)).collect();
    assert_eq!(
        lines,
        [
            "service wordpress  exposed to everyone by alice",
            "service wordpress  unexposed by operator",
            "service wordpress  exposed to 192.0.2.0/24 by alice",
        ]
    );
    // An added operator may add others, here without the authority's key.
    let added = alice.does(&["operator", "add", "bob"]);
    assert!(added.stderr.contains("hint: no certificate was issued"), "{added:?}");

    // A renewed certificate has a new key, and the credentials stay the same.
    let [key, certificate] = ["key", "pem"].map(|end| first.config(&format!("local-operators/alice.{end}")));
    let files = || [&file, &key, &certificate].map(|path| fs::read_to_string(path).unwrap());
    let [credentials, old_key, old] = files();
    let renewed = first.does(&["operator", "renew", "alice"]);
    assert!(renewed.stderr.contains("Operator 'alice' has a new certificate, valid until 2"), "{renewed:?}");
    let [same, new_key, new] = files();
    assert!(same == credentials && new_key != old_key && new != old);
    let issued = Certificate::parse(&new).unwrap();
    assert!(PrivateKey::parse(&new_key).unwrap().matches(&issued));
    assert_eq!(issued.names(), &Names::of(["operator-alice"]));
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    first.is_refused(&["operator", "renew", "carol"], 1, "Operator 'carol' was not found");
    alice.is_refused(&["operator", "renew", "bob"], 1, "no certificate was issued, because");

    let before = fs::read(&file).unwrap();
    first.is_refused(&["operator", "add", "alice"], 1, "Operator 'alice' already exists");
    assert_eq!(fs::read(&file).unwrap(), before, "credentials in use are not replaced");
    first.is_refused(&["operator", "add", "Al/ice"], 2, "Invalid operator name");
    let removed = first.does(&["operator", "remove", "alice"]);
    assert!(removed.stderr.contains("stays valid"), "{removed:?}");
    first.is_refused(&["operator", "remove", "alice"], 1, "Operator 'alice' was not found");
    alice.is_refused(&["expose", "wordpress"], 1, "operator 'alice' was removed from the environment");
    assert_eq!(first.does(&["operator", "list"]).stdout, "operator\nbob\n");
    golden::refusals("operators");
}
