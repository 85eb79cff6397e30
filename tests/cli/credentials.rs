//! Credentials: who has access, and that no order of events locks the operator out.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use portcullis::model::UnitId;
use portcullis::model::ports::parse_argument;
use portcullis::store::{Address, Credential, Environment, UnitPorts, ZkTree};
use serde_json::Value;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wire::{Client, Create, Put, create_body, op};
use crate::harness::{Kind, Store, golden};
use crate::operator::{Operator, fixture_charm};

on_both_stores![
    bootstrapping_twice_changes_nothing,
    bootstrap_uses_saved_credentials_without_a_tree,
    of_two_operators_one_creates_the_environment,
    concurrent_bootstraps_of_one_operator_succeed,
    a_unit_can_open_only_its_own_ports,
];

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o777
}

fn bootstrapping_twice_changes_nothing(site: &Site) {
    let operator = Operator::bootstrapped(site);
    let file = operator.config("local.json");
    let first = fs::read_to_string(&file).unwrap();
    assert_eq!((mode(&file), mode(&operator.config(""))), (0o600, 0o700));
    assert_eq!(mode(&operator.config("local-controller.json")), 0o600);
    let again = operator.does(&["bootstrap"]);
    assert_eq!(again.stderr, "Environment 'local' was already bootstrapped.\n");
    assert_eq!(fs::read_to_string(&file).unwrap(), first);

    let other = Operator::at(site);
    other.is_refused(&["bootstrap"], 1, "is already bootstrapped, with credentials other than those in");
    assert!(!other.config("local.json").exists() && !other.config("local-controller.json").exists());

    let elsewhere =
        operator.is_refused(&["--zookeeper", "127.0.0.1:1", "bootstrap"], 1, "belongs to the store at");
    assert!(elsewhere.stderr.contains("choose another name with -e"), "{elsewhere:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), first);

    let wrong_name = operator.juju(&["-e", "prod", "status"]);
    wrong_name.is_refusal(1, "no credentials for environment 'prod'");
    golden::refusals("bootstrap");
}

fn bootstrap_uses_saved_credentials_without_a_tree(site: &Site) {
    let operator = Operator::at(site);
    fs::create_dir_all(operator.config("")).unwrap();
    let file = operator.config("local.json");
    let contents = format!("{{\"zookeeper\": \"{}\", \"auth\": \"operator:kept\"}}", site.connect_string());
    fs::write(&file, &contents).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    operator.is_refused(&["status"], 1, "environment 'local' is not bootstrapped in the store at");
    golden::refusals("not_bootstrapped");
    operator.does(&["bootstrap"]);
    // The same credentials, now with the id of their tree.
    let mut known: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert!(known.as_object_mut().unwrap().remove("cluster-id").is_some());
    assert_eq!(known, serde_json::from_str::<Value>(&contents).unwrap());
    operator.does(&["status"]);
}

/// Runs `juju bootstrap` concurrently. Returns the exit codes and the stderr of the last failure.
fn bootstrap_at_once(operators: &[&Operator]) -> (Vec<i32>, String) {
    let children: Vec<_> = operators
        .iter()
        .map(|operator| {
            operator.command("juju").arg("bootstrap").stderr(Stdio::piped()).spawn().expect("juju")
        })
        .collect();
    let mut printed = String::new();
    let codes = children.into_iter().map(|child| {
        let end = child.wait_with_output().expect("an end");
        let code = end.status.code().expect("an exit code");
        if code != 0 {
            printed = String::from_utf8_lossy(&end.stderr).into_owned();
        }
        code
    });
    (codes.collect(), printed)
}

fn of_two_operators_one_creates_the_environment(site: &Site) {
    let (one, two) = (Operator::at(site), Operator::at(site));
    let (mut codes, printed) = bootstrap_at_once(&[&one, &two]);
    codes.sort_unstable();
    assert_eq!(codes, [0, 1], "{printed}");
    assert!(printed.contains("is already bootstrapped, with credentials other than those in"), "{printed}");
    let entered: Vec<bool> = [&one, &two].iter().map(|who| who.juju(&["status"]).code == 0).collect();
    assert_eq!(entered.iter().filter(|entered| **entered).count(), 1, "{entered:?}");
    for (who, entered) in [&one, &two].iter().zip(entered) {
        assert_eq!(who.config("local.json").exists(), entered, "only who can enter has a file");
    }
}

fn concurrent_bootstraps_of_one_operator_succeed(site: &Site) {
    let operator = Operator::at(site);
    let (codes, printed) = bootstrap_at_once(&[&operator, &operator, &operator]);
    assert_eq!(codes, [0, 0, 0], "{printed}");
    operator.does(&["status"]);
}

/// Evaluates the output of `hook-env` in a shell and returns one variable.
pub(crate) fn hook_variable(operator: &Operator, printed: &str, name: &str) -> String {
    let script = format!("{printed}printf %s \"${name}\"");
    let shell =
        Command::new("sh").args(["-c", &script]).current_dir(operator.home()).output().expect("a shell");
    String::from_utf8(shell.stdout).expect("UTF-8")
}

fn a_unit_can_open_only_its_own_ports(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["deploy", &fixture_charm("wordpress"), "-n", "2"]);
    operator.does(&["expose", "wordpress"]);
    let printed = operator.does(&["hook-env", "wordpress/1"]).stdout;
    let variable = |name: &str| hook_variable(&operator, &printed, name);
    assert_eq!(variable("JUJU_UNIT_NAME"), "wordpress/1");
    assert_eq!(variable("JUJU_ZOOKEEPER"), site.connect_string());
    assert_eq!(variable("JUJU_ENV"), "local");
    assert_eq!(
        variable("CHARM_DIR"),
        fs::canonicalize(fixture_charm("wordpress")).unwrap().to_str().unwrap()
    );
    let tools = crate::harness::binary("juju").parent().unwrap().to_str().unwrap().to_owned();
    assert!(variable("PATH").starts_with(&format!("{tools}:")));

    let file = variable("JUJU_CREDENTIALS");
    let file = Path::new(&file);
    assert_eq!((mode(file), mode(file.parent().unwrap())), (0o600, 0o700));
    let held: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let auth = held["auth"].as_str().unwrap();
    assert_eq!(
        (held["unit"].as_str(), auth.split(':').next()),
        (Some("wordpress/1"), Some("unit-0000000001"))
    );
    assert!(!printed.contains(auth.split(':').nth(1).unwrap()), "the secret was printed");

    let address: Address = site.connect_string().parse().unwrap();
    let credential = Credential::parse(auth).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let tree = ZkTree::connect(&address, Some(&credential)).await.unwrap();
        let port = parse_argument("80").unwrap();
        UnitPorts::new(&tree, UnitId::new(1)).open(port).await.unwrap();
        let others = UnitPorts::new(&tree, UnitId::new(0)).open(port).await.unwrap_err();
        assert!(others.to_string().contains("does not allow this with these credentials"), "{others}");
        let entered = Environment::open(tree).await.unwrap_err();
        assert_eq!(entered.to_string(), "the store refuses these credentials");
    });
    let status = operator.status();
    let units = &status["services"]["wordpress"]["units"];
    assert_eq!(units["wordpress/1"]["open-ports"], serde_json::json!(["80/tcp"]));
    assert_eq!(units["wordpress/0"]["open-ports"], serde_json::json!([]));
}

/// `bootstrap` closes the root of a keeper above a chroot, and does not change the root of an
/// ensemble.
#[test]
fn the_root_of_a_keeper_is_closed() {
    bootstrap_closes_the_root_of_a_keeper(&Store::keeper());
}

#[test]
fn the_root_of_zookeeper_stays_open() {
    bootstrap_closes_the_root_of_a_keeper(&Store::zookeeper());
}

fn bootstrap_closes_the_root_of_a_keeper(store: &Store) {
    const NO_AUTH: i32 = -102;
    let site = Site { kind: store.kind(), addr: store.addr(), chroot: "/env".to_owned() };
    let mut stranger = Client::connect(store.addr());
    let create = |client: &mut Client, path: &str| {
        client.call(op::CREATE, &create_body(path, b"", Create::Persistent)).err
    };
    assert_eq!(create(&mut stranger, "/before"), 0, "open before");
    let operator = Operator::bootstrapped(&site);
    let expected = if store.kind() == Kind::Keeper { NO_AUTH } else { 0 };
    assert_eq!(create(&mut stranger, "/after"), expected, "create at the root");
    let listed = stranger.call(op::GET_CHILDREN, &Put::new().bytes("/").bool(false)).err;
    assert_eq!(listed, expected, "list the root");
    // The operator has access, at the root and below.
    operator.does(&["status"]);
    let known: Value = serde_json::from_slice(&fs::read(operator.config("local.json")).unwrap()).unwrap();
    let auth = Put::new().int(0).bytes("digest").bytes(known["auth"].as_str().unwrap());
    stranger.send_as(-4, op::AUTH, &auth).expect("sent");
    assert_eq!(stranger.receive().expect("an answer").err, 0);
    assert_eq!(create(&mut stranger, "/by-the-operator"), 0);
    operator.does(&["bootstrap"]);
}
