//! The EC2 driver against LocalStack, with a proxy between them that adds EC2's other behaviour.
//! All scenarios are one test that shares one LocalStack, because it takes seconds to start, and
//! because the actions that all scenarios use together must equal those that the policy allows.
//! `SCENARIO=duplicate cargo test --test ec2` runs the scenarios whose name contains that text.

#![cfg(feature = "ec2")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "all of it is test code, and times are worth seeing"
)]

#[allow(dead_code, reason = "the tests of the whole use the rest")]
mod cloud;
mod scenarios;
mod suite;

use cloud::localstack::{LocalStack, project};
use cloud::{Account, warm_up};
use scenarios::ALL;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::Semaphore;

/// Concurrent scenarios: enough to keep two cores and one LocalStack busy.
const AT_ONCE: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_scenarios_pass() {
    let localstack = tokio::task::spawn_blocking(LocalStack::start).await.unwrap();
    warm_up(localstack.address).await;
    println!("LocalStack started in {:?}", localstack.started_in);
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = Vec::new();
    let only = std::env::var("SCENARIO").ok();
    let chosen = |name: &str| only.as_ref().is_none_or(|only| name.contains(only));
    for (name, scenario) in ALL.iter().filter(|(name, _)| chosen(name)) {
        let account = Arc::new(Account::new(localstack.address).await);
        let (turns, own) = (Arc::clone(&turns), Arc::clone(&account));
        let task = tokio::spawn(async move {
            let _turn = turns.acquire_owned().await.unwrap();
            let began = Instant::now();
            scenario(own).await;
            began.elapsed()
        });
        running.push((name, account, task));
    }
    let (mut failed, mut used) = (Vec::new(), BTreeSet::new());
    for (name, account, task) in running {
        match task.await {
            Ok(took) => println!("{name}: {took:?}"),
            Err(error) => failed.push(format!("{name}: {error}")),
        }
        used.extend(account.front.all_actions());
    }
    assert!(failed.is_empty(), "failed: {failed:#?}");
    assert!(only.is_some() || used == allowed(), "{used:?}: the policy allows what is used, and no more");
}

/// Returns the actions of the policy that operators install.
fn allowed() -> BTreeSet<String> {
    let text = std::fs::read_to_string(project().join("fixtures/ec2/iam-policy.json")).unwrap();
    let policy: serde_json::Value = serde_json::from_str(&text).unwrap();
    let statements = policy["Statement"].as_array().unwrap();
    let actions = statements.iter().flat_map(|statement| statement["Action"].as_array().unwrap());
    actions.map(|action| action.as_str().unwrap().strip_prefix("ec2:").unwrap().to_owned()).collect()
}

mod bad_input {
    use aws_config::{BehaviorVersion, Region, SdkConfig};
    use aws_credential_types::provider::error::CredentialsError;
    use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
    use aws_sdk_ec2::config::Credentials;
    use portcullis_provider::Error;
    use portcullis_provider::ec2::{Access, Ec2, Ec2Settings, Environment, Timeouts};
    use portcullis_provider::provider::{Firewall, MachineNumber};
    use std::collections::BTreeSet;
    use std::net::TcpListener;
    use std::time::Duration;

    #[derive(Debug)]
    struct Nobody;

    impl ProvideCredentials for Nobody {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            future::ProvideCredentials::ready(Err(CredentialsError::not_loaded("none set")))
        }
    }

    fn settings() -> Ec2Settings {
        let timeouts = Timeouts { first_pause: Duration::from_millis(1), ..Timeouts::default() };
        Ec2Settings { timeouts, ..Ec2Settings::new(Environment::new("prod", "6f1c").unwrap()) }
    }

    fn config(credentials: impl ProvideCredentials + 'static) -> SdkConfig {
        SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .region(Region::new("us-east-1"))
            .build()
    }

    fn static_credentials() -> Credentials {
        Credentials::new("100000000000", "hunter2", None, None, "test")
    }

    async fn failure(ec2: &Ec2) -> Error {
        ec2.observe(&BTreeSet::from([MachineNumber::new(1)])).await.unwrap_err()
    }

    #[tokio::test]
    async fn unreachable_endpoint_is_named() {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoint = format!("http://{nobody}");
        let ec2 = Ec2::with_config(
            Ec2Settings { endpoint_url: Some(endpoint.clone()), ..settings() },
            &config(static_credentials()),
        );
        let error = failure(&ec2.unwrap()).await;
        assert_eq!(error.kind(), "unavailable");
        let text = error.to_string();
        assert!(
            text.contains(&format!("cannot reach EC2 at {endpoint}")) && text.contains("refused"),
            "{text}"
        );
        assert!(!text.contains("hunter2"));
    }

    #[tokio::test]
    async fn unknown_region_is_named() {
        let ec2 = Ec2::with_config(
            Ec2Settings { region: Some("no-where-1".to_owned()), ..settings() },
            &config(static_credentials()),
        );
        let error = failure(&ec2.unwrap()).await;
        assert_eq!(error.kind(), "unavailable");
        assert!(error.to_string().contains("region 'no-where-1' (is that the right one?)"), "{error}");
    }

    #[tokio::test]
    async fn expired_credentials_are_reported_as_missing() {
        let endpoint_url = Some("http://127.0.0.1".to_owned());
        let ec2 = Ec2::with_config(Ec2Settings { endpoint_url, ..settings() }, &config(Nobody)).unwrap();
        let error = failure(&ec2).await;
        assert_eq!(error.kind(), "unusable");
        assert!(error.to_string().contains("no credentials for EC2"), "{error}");
    }

    /// Runs this test again as a separate process with a chosen environment.
    #[tokio::test]
    async fn region_and_credentials_come_from_the_environment() {
        const AGAIN: &str = "PORTCULLIS_TEST_AGAIN";
        if std::env::var_os(AGAIN).is_some() {
            let error = match Access::find().await {
                Ok(access) => failure(&Ec2::connect(settings(), &access).unwrap()).await,
                Err(error) => error,
            };
            return println!("outcome: {error}");
        }
        let key = [("AWS_ACCESS_KEY_ID", "100000000000"), ("AWS_SECRET_ACCESS_KEY", "hunter2")];
        for (given, expected) in [
            (vec![("AWS_REGION", "us-east-1"), key[0], key[1]], "cannot reach EC2 at http://127.0.0.1"),
            (vec![key[0], key[1]], "no region for EC2"),
            (vec![("AWS_REGION", "us-east-1")], "no credentials for EC2: set AWS_ACCESS_KEY_ID"),
            (vec![("AWS_REGION", "US EAST"), key[0], key[1]], "no region of EC2 is called \"US EAST\""),
        ] {
            let again = std::process::Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "bad_input::region_and_credentials_come_from_the_environment",
                    "--nocapture",
                ])
                .env_clear()
                .env(AGAIN, "1")
                .env("AWS_EC2_METADATA_DISABLED", "true")
                .env("AWS_ENDPOINT_URL", "http://127.0.0.1")
                .envs(given)
                .output()
                .unwrap();
            let shown = String::from_utf8_lossy(&again.stdout);
            assert!(shown.contains(expected), "{expected}: {shown}");
            assert!(
                !shown.contains("hunter2") && !String::from_utf8_lossy(&again.stderr).contains("hunter2")
            );
        }
    }
}
