//! The real `portcullis controller` with a store and an account in a cloud.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use portcullis::store::{Address, Credential, Environment, ZkTree};
use serde_json::Value;

use crate::cloud::{Account, REGION};
use crate::harness::wait_for;
use crate::operator::Operator;

/// Longer than the session of a killed leader.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Returns `portcullis controller` with the region and credentials of this account.
pub(crate) fn command(operator: &Operator, account: &Account, provider: &str, args: &[&str]) -> Command {
    let mut command = operator.command("portcullis");
    command
        .env("AWS_REGION", REGION)
        .env("AWS_ACCESS_KEY_ID", &account.number)
        .env("AWS_SECRET_ACCESS_KEY", "hunter2")
        .env("AWS_ENDPOINT_URL", format!("http://{}", account.front.address))
        .args(["--log-level", "info", "controller", "--provider", provider])
        .args(args);
    command
}

/// Opens the operator's environment, for thousands of operations that would each need a command.
pub(crate) async fn environment(operator: &Operator, address: &str) -> Environment<ZkTree> {
    let held = fs::read_to_string(operator.config("local.json")).unwrap();
    let held: Value = serde_json::from_str(&held).unwrap();
    let credential = Credential::parse(held["auth"].as_str().unwrap()).unwrap();
    let address: Address = address.parse().unwrap();
    let tree = ZkTree::connect(&address, Some(&credential)).await.unwrap();
    Environment::open(tree).await.unwrap()
}

/// A running controller, killed on drop.
pub(crate) struct Controller {
    child: Child,
    log: PathBuf,
}

impl Controller {
    pub(crate) fn start(mut command: Command, operator: &Operator, name: &str) -> Self {
        let log = operator.home().join(name);
        let child = command
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("portcullis starts");
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    #[track_caller]
    pub(crate) fn wait_for_log(&self, text: &str) {
        wait_for(text, DEADLINE, || self.log().contains(text).then_some(()));
    }

    pub(crate) fn kill9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(mut self) {
        let sent = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        let status = wait_for("end of the controller", DEADLINE, || self.child.try_wait().expect("wait"));
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("log of the controller:\n{}", self.log());
        }
        // In a test that passes, the process has already ended.
        let _ = (self.child.kill(), self.child.wait());
    }
}
