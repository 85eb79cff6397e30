//! How long things take, and how many calls.

use std::process::Command;
use std::time::{Duration, Instant};

use portcullis::model::ServiceName;
use portcullis::model::ports::parse_argument;
use portcullis::store::{Deploy, UnitPorts};
use portcullis_provider::Machines as _;
use portcullis_provider::ec2::{Patience, Settings};

use crate::cloud::front::Act;
use crate::controller::environment;
use crate::harness::wait_for;
use crate::world::World;

/// Each with a new controller, which may make 50 such requests at once before it spares EC2 the rest.
const ROUNDS: usize = 3;
const SAMPLES: usize = 40;
const MACHINES: usize = 1000;
/// Open on each of them.
const PORTS: [i32; 3] = [80, 443, 8080];

/// What we add to the time of EC2's own call, from the moment that `open-port` has returned.
pub(crate) fn a_port_is_open_as_soon_as_ec2_can(world: &World) {
    let mut controller = world.controller("log", 3600);
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
    for sample in 0..ROUNDS * SAMPLES {
        if sample > 0 && sample.is_multiple_of(SAMPLES) {
            controller.ends();
            controller = world.controller("log", 3600);
        }
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
    controller.ends();
    added.sort_unstable();
    calls.sort_unstable();
    let [p50, p99] = [50, 99].map(|percent| at(&added, percent));
    println!("added by us: p50 {p50:?}, p99 {p99:?}, longest {:?}", added[added.len() - 1]);
    println!("EC2's own call: p50 {:?}, p99 {:?}", at(&calls, 50), at(&calls, 99));
    assert!(p50 <= Duration::from_millis(20), "p50 {p50:?}");
    assert!(p99 <= Duration::from_millis(100), "p99 {p99:?}");
}

/// Of sorted times, the one that so many percent are not above.
fn at(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() * percent).div_ceil(100) - 1]
}

pub(crate) fn a_thousand_machines_cost_a_converged_controller_nothing(world: &World) {
    let began = Instant::now();
    let store = world.wait(async {
        let vpc = world.account.default_vpc().await;
        let environment = environment(&world.operator, &world.site.connect_string()).await;
        let store = environment.info().cluster_id.clone();
        let service: ServiceName = "web".parse().unwrap();
        let deploy = Deploy {
            service: service.clone(),
            charm: "local:web-1".parse().unwrap(),
            metadata: serde_json::Map::new(),
            units: 0,
            to: None,
        };
        environment.deploy(&deploy).await.unwrap();
        environment.expose(&service).await.unwrap();
        for machine in 0..MACHINES as u32 {
            let instance = world.account.make_machine(&store, &vpc, machine).await;
            let added = environment.add_machine(Some(instance.parse().unwrap())).await.unwrap();
            assert_eq!(added.number(), machine);
            world.account.open_as_ours(machine, &PORTS).await;
            let unit = environment.add_units(&service, 1, Some(added)).await.unwrap()[0].id;
            for port in PORTS {
                let port = parse_argument(&port.to_string()).unwrap();
                UnitPorts::new(environment.tree(), unit).open(port).await.unwrap();
            }
        }
        environment.into_tree().close().await;
        store
    });
    println!("{MACHINES} machines made in {:?}", began.elapsed());
    // LocalStack takes seconds to write down a thousand of anything. It is asked once, patiently, and then quoted.
    world.wait(async {
        let patient = Duration::from_secs(300);
        let settings = world.account.settings_of("local", &store);
        let patience = Patience { request: patient, ..settings.patience };
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
    let units = world.operator.status()["services"]["web"]["units"].clone();
    let units = units.as_object().unwrap();
    let open = |unit: &&serde_json::Value| unit["open-ports"].as_array().is_some_and(|open| open.len() == 3);
    assert_eq!(units.values().filter(open).count(), MACHINES);
    let pending = units.values().find(|unit| !unit["firewall"].is_null());
    assert_eq!(pending, None, "and all of it is seen to be open");

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
