//! How long things take, and how many calls.

use std::process::Command;
use std::time::{Duration, Instant};

use aws_sdk_ec2::Client;
use aws_sdk_ec2::types::{ResourceType, Tag, TagSpecification};
use portcullis::store::{Credential, Environment, ZkTree};

use portcullis_provider::Machines as _;
use portcullis_provider::ec2::{Patience, Settings};

use crate::cloud::IMAGE;
use crate::cloud::front::Act;
use crate::harness::wait_for;
use crate::world::World;

const SAMPLES: usize = 60;
const MACHINES: usize = 1000;

/// What we add to the time of EC2's own call, from the moment that `open-port` has returned.
pub(crate) fn a_port_is_open_as_soon_as_ec2_can(world: &World) {
    let controller = world.controller("log", 3600);
    world.operator.does(&["add-machine"]);
    world.instance(0);
    world.deploy("wordpress", 0);
    world.operator.does(&["expose", "wordpress"]);
    let exports = world.operator.does(&["hook-env", "wordpress/0"]).stdout;
    let hook = |tool: &str| {
        let done = Command::new("sh").args(["-c", &format!("{exports}exec {tool}")]).status().unwrap();
        assert!(done.success());
        Instant::now()
    };
    let (mut added, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        world.account.front.take_spans();
        let returned = hook("open-port 80");
        let span = wait_for("authorize", Duration::from_secs(30), || {
            let spans = world.account.front.take_spans();
            spans.into_iter().find(|span| span.action == "AuthorizeSecurityGroupIngress")
        });
        // What is under way before the tool has ended counts as no time at all.
        added.push(span.came.saturating_duration_since(returned));
        calls.push(span.went - span.came);
        hook("close-port 80");
        world.has_ports(0, &[]);
    }
    added.sort_unstable();
    calls.sort_unstable();
    let at = |times: &[Duration], percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    let (p50, p99) = (at(&added, 50), at(&added, 99));
    println!(
        "added by us: p50 {p50:?}, p99 {p99:?}; EC2's own call: p50 {:?}, p99 {:?}",
        at(&calls, 50),
        at(&calls, 99)
    );
    assert!(p50 <= Duration::from_millis(20), "p50 {p50:?}");
    // The goal is 100 ms on a quiet machine; this one may have others on it.
    assert!(p99 <= Duration::from_millis(500), "p99 {p99:?}");
    controller.ends();
}

pub(crate) fn a_thousand_machines_cost_a_converged_controller_nothing(world: &World) {
    let began = Instant::now();
    let credential = std::fs::read_to_string(world.operator.config("local.json")).unwrap();
    let credential: serde_json::Value = serde_json::from_str(&credential).unwrap();
    let credential = Credential::parse(credential["auth"].as_str().unwrap()).unwrap();
    world.wait(async {
        let vpc = world.account.default_vpc().await;
        let address = world.site.connect_string().parse().unwrap();
        let tree = ZkTree::connect(&address, Some(&credential)).await.unwrap();
        let environment = Environment::open(tree).await.unwrap();
        for machine in 0..MACHINES {
            let instance = make_machine(&world.account.other, &vpc, machine).await;
            let added = environment.add_machine(Some(instance.parse().unwrap())).await.unwrap();
            assert_eq!(added.number() as usize, machine);
        }
        environment.into_tree().close().await;
    });
    println!("{MACHINES} machines made in {:?}", began.elapsed());
    // LocalStack takes seconds to write down a thousand of anything. It is asked once, patiently, and then quoted.
    world.wait(async {
        let patient = Duration::from_secs(300);
        let settings = world.account.settings("local");
        let patience = Patience { attempt: patient, call: patient, ..settings.patience };
        let ec2 = world.account.connect(Settings { patience, ..settings });
        let listed = ec2.list().await.unwrap();
        assert_eq!((listed.instances.len(), listed.groups.len()), (MACHINES, MACHINES));
    });
    println!("listed for the first time after {:?}", began.elapsed());
    for action in ["DescribeSecurityGroups", "DescribeInstances"] {
        world.account.front.always(action, Act::Remember);
    }
    world.requests();

    let recorded = || {
        let machines = world.operator.status()["machines"].clone();
        let known = |machine: &&serde_json::Value| machine["dns-name"].is_string();
        machines.as_object().unwrap().values().filter(known).count()
    };
    let first = world.controller("first", 3600);
    wait_for("all machines recorded", Duration::from_secs(120), || (recorded() == MACHINES).then_some(()));
    first.ends();
    let (changes, _) = world.requests();
    assert_eq!(changes, 0, "what others have tagged as ours needs no change");

    let began = Instant::now();
    let second = world.controller("second", 3600);
    second.says("leading");
    // Its passes are over when it has asked for nothing for a while.
    let looked = || Some(world.requests()).filter(|(_, reads)| *reads > 0);
    let first = wait_for("a look", Duration::from_secs(120), looked);
    let rest = world.quiet_for(Duration::from_secs(3));
    assert_eq!((first.0, rest.0), (0, 0), "a converged restart changes nothing");
    let reads = first.1 + rest.1;
    println!(
        "converged restart: {reads} describes for {MACHINES} groups, quiet within {:?}",
        began.elapsed()
    );
    assert!(reads * 200 <= MACHINES, "{reads} describes are more than one per 200 groups");
    second.ends();
}

/// A group and an instance with our tags, as a driver would have left them long ago.
async fn make_machine(ec2: &Client, vpc: &str, machine: usize) -> String {
    let tag = |key: &str, value: &str| Tag::builder().key(key).value(value).build();
    let tags = |kind, mark: &str| {
        TagSpecification::builder()
            .resource_type(kind)
            .tags(tag("portcullis", mark))
            .tags(tag("portcullis:environment", "local"))
            .tags(tag("portcullis:machine", &machine.to_string()))
            .build()
    };
    let group =
        ec2.create_security_group().group_name(format!("juju-local-{machine}")).description("d").vpc_id(vpc);
    let group = group.tag_specifications(tags(ResourceType::SecurityGroup, "group")).send().await.unwrap();
    let run = ec2.run_instances().image_id(IMAGE).min_count(1).max_count(1);
    let run = run.security_group_ids(group.group_id.unwrap());
    let run = run.tag_specifications(tags(ResourceType::Instance, "adopted")).send().await.unwrap();
    run.instances()[0].instance_id().unwrap().to_owned()
}
