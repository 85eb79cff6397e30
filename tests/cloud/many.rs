//! Counts the calls of a converged controller for very many machines.

use std::time::{Duration, Instant};

use portcullis::model::ServiceName;
use portcullis::model::ports::parse_argument;
use portcullis::store::{Deploy, UnitPorts};
use portcullis_provider::Machines as _;
use portcullis_provider::ec2::{Ec2Settings, Timeouts};

use crate::cloud::front::Act;
use crate::controller::environment;
use crate::harness::{wait_for, wait_for_count};
use crate::world::World;

/// More than the 200 values that one filter of EC2 takes. LocalStack needs eleven minutes to create
/// a thousand machines if the cores are busy, and then more than five to list them.
const MACHINES: usize = 300;
/// Describe calls of a restart. A thousand machines did not need more either.
const MAX_READS: usize = 5;
/// Open on each machine.
const PORTS: [i32; 3] = [80, 443, 8080];

pub(crate) fn hundreds_of_machines_need_no_writes_when_converged(world: &World) {
    let began = Instant::now();
    let store = make_machines(world);
    println!("{MACHINES} machines made in {:?}", began.elapsed());
    // LocalStack takes seconds to list hundreds of objects, so the proxy caches the first listing.
    world.wait(async {
        let patient = Duration::from_secs(300);
        let settings = world.account.settings_of("local", &store);
        let timeouts = Timeouts { request: patient, read: patient, ..settings.timeouts };
        let ec2 = world.account.connect(Ec2Settings { timeouts, ..settings });
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
    wait_for_count("recorded machines", MACHINES, recorded);
    first.stop();
    let (changes, _) = world.requests();
    assert_eq!(changes, 0, "groups with our tags need no change");
    let units = world.operator.status()["services"]["web"]["units"].clone();
    let units = units.as_object().unwrap();
    let open = |unit: &&serde_json::Value| unit["open-ports"].as_array().is_some_and(|open| open.len() == 3);
    assert_eq!(units.values().filter(open).count(), MACHINES);
    let pending = units.values().find(|unit| !unit["firewall"].is_null());
    assert_eq!(pending, None, "all ports are reported as open");

    let began = Instant::now();
    let second = world.controller("second", 3600);
    second.wait_for_log("leading");
    // The passes are over once the controller sends no requests for a while.
    let looked = || Some(world.requests()).filter(|(_, reads)| *reads > 0);
    let first = wait_for("a look", Duration::from_secs(120), looked);
    let rest = world.quiet_for(Duration::from_secs(3));
    assert_eq!((first.0, rest.0), (0, 0), "a converged restart changes nothing");
    let reads = first.1 + rest.1;
    println!(
        "converged restart: {reads} describes for {MACHINES} groups, quiet within {:?}",
        began.elapsed()
    );
    assert!(reads <= MAX_READS, "{reads} describes for {MACHINES} groups");
    second.stop();
}

/// Makes machines in EC2 and in the store, as if a controller had opened their ports. Returns the
/// id of the store.
fn make_machines(world: &World) -> String {
    world.wait(async {
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
    })
}
