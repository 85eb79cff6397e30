//! Tests of a policy file that is changed, broken and repaired while the agent runs.

use std::sync::Mutex;

use super::*;

#[tokio::test(start_paused = true)]
async fn a_policy_that_cannot_be_read_again_leaves_the_last_one_in_force() {
    let mut world = World::new().await;
    let text = Arc::new(Mutex::new("forbidden-ports: [80]"));
    let read = Arc::clone(&text);
    let reader =
        move || Policy::parse(*read.lock().unwrap(), [2181]).map_err(|error| format!("policy.yaml: {error}"));
    world.controller.policy.set_reader(Some(Box::new(reader)));
    let unit = world.deploy("web").await;
    world.expose("web").await;
    for port in ["80", "81"] {
        world.open(unit, port).await;
    }
    world.pass().await;
    assert_eq!((world.rules(0), world.problem(0)), (vec!["81/tcp".to_owned()], None));
    // A truncated file: forbidden ports stay forbidden, and open ports stay open.
    *text.lock().unwrap() = "";
    world.open(unit, "90").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["81/tcp", "90/tcp"]);
    let problem = world.problem(0).unwrap();
    assert!(
        problem.starts_with("the policy that was read last stays in force: policy.yaml: the file is empty"),
        "{problem}"
    );
    // The next valid policy replaces the current one, also for ports that are already open.
    *text.lock().unwrap() = "forbidden-ports: [81]";
    world.pass().await;
    world.pass().await;
    assert_eq!((world.rules(0), world.problem(0)), (vec!["80/tcp".to_owned(), "90/tcp".to_owned()], None));
}
