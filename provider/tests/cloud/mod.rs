//! The cloud of the tests: one LocalStack for all scenarios, and for each of them its own account
//! and proxy (`front`).

pub(crate) mod front;
pub(crate) mod localstack;
pub(crate) mod xml;

use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::Client;
use aws_sdk_ec2::config::{Credentials, SharedCredentialsProvider};
use aws_sdk_ec2::types::{IpPermission, IpRange, ResourceType, SecurityGroup, Tag, TagSpecification};
use front::Front;
use portcullis_provider::ec2::{Ec2, Ec2Settings, Environment, LaunchSettings, Timeouts};
use portcullis_provider::provider::{Instance, Launch, MachineNumber, Machines, UserData};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const REGION: &str = "us-east-1";
/// An image that LocalStack has in every account.
pub(crate) const IMAGE: &str = "ami-12c6146b";

/// The id of a store that does not exist.
pub(crate) const STORE: &str = "0123456789abcdef";

const WARM_UP_MAX: Duration = Duration::from_secs(300);

static ACCOUNTS: AtomicU64 = AtomicU64::new(100_000_000_000);

/// An unused account.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) front: Front,
    /// Another client of the same account, which bypasses the proxy: not counted and never refused.
    pub(crate) other: Client,
    /// The account number, which LocalStack derives from the access key.
    pub(crate) number: String,
    config: SdkConfig,
}

impl Account {
    pub(crate) async fn new(localstack: SocketAddr) -> Self {
        let front = Front::start(localstack).await;
        let number = ACCOUNTS.fetch_add(1, Ordering::Relaxed).to_string();
        let credentials = Credentials::new(number.clone(), "secret", None, None, "test");
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .region(Region::new(REGION))
            .build();
        let other = aws_sdk_ec2::config::Builder::from(&config).endpoint_url(format!("http://{localstack}"));
        Self { front, other: Client::from_conf(other.build()), number, config }
    }

    pub(crate) fn settings(&self, environment: &str) -> Ec2Settings {
        self.settings_of(environment, STORE)
    }

    pub(crate) fn settings_of(&self, environment: &str, store: &str) -> Ec2Settings {
        Ec2Settings {
            endpoint_url: Some(format!("http://{}", self.front.address)),
            launch: Some(LaunchSettings {
                image: IMAGE.to_owned(),
                instance_type: "t3.micro".to_owned(),
                subnet: None,
                key: None,
            }),
            timeouts: Timeouts { first_pause: Duration::from_millis(10), ..Timeouts::default() },
            ..Ec2Settings::new(Environment::new(environment, store).unwrap())
        }
    }

    pub(crate) fn ec2(&self, environment: &str) -> Ec2 {
        self.connect(self.settings(environment))
    }

    pub(crate) fn connect(&self, settings: Ec2Settings) -> Ec2 {
        Ec2::with_config(settings, &self.config).unwrap()
    }

    /// Connects with other credentials.
    pub(crate) fn connect_as(&self, settings: Ec2Settings, credentials: SharedCredentialsProvider) -> Ec2 {
        let config = self.config.to_builder().credentials_provider(credentials).build();
        Ec2::with_config(settings, &config).unwrap()
    }

    /// Returns all groups, ours and foreign.
    pub(crate) async fn groups(&self) -> Vec<SecurityGroup> {
        self.other.describe_security_groups().send().await.unwrap().security_groups.unwrap_or_default()
    }

    pub(crate) async fn group(&self, name: &str) -> Option<SecurityGroup> {
        self.groups().await.into_iter().find(|group| group.group_name() == Some(name))
    }

    pub(crate) async fn default_vpc(&self) -> String {
        let vpcs = self.other.describe_vpcs().send().await.unwrap().vpcs.unwrap();
        vpcs.iter().find(|vpc| vpc.is_default() == Some(true)).unwrap().vpc_id().unwrap().to_owned()
    }

    /// Creates a group without our tags.
    pub(crate) async fn make_group(&self, name: &str, vpc: &str) -> String {
        let made = self.other.create_security_group().group_name(name).description("theirs").vpc_id(vpc);
        made.send().await.unwrap().group_id.unwrap()
    }

    /// Opens a port as another client.
    pub(crate) async fn open(&self, group: &str, port: i32) {
        let permission = IpPermission::builder().ip_protocol("tcp").from_port(port).to_port(port);
        let permission = permission.ip_ranges(IpRange::builder().cidr_ip("0.0.0.0/0").build()).build();
        let request =
            self.other.authorize_security_group_ingress().group_id(group).ip_permissions(permission);
        request.send().await.unwrap();
    }

    pub(crate) async fn close(&self, group: &str, port: i32) {
        let permission = IpPermission::builder().ip_protocol("tcp").from_port(port).to_port(port);
        let permission = permission.ip_ranges(IpRange::builder().cidr_ip("0.0.0.0/0").build()).build();
        let request = self.other.revoke_security_group_ingress().group_id(group).ip_permissions(permission);
        request.send().await.unwrap();
    }

    /// Launches a foreign instance in the default group.
    pub(crate) async fn make_instance(&self) -> String {
        let request = self.other.run_instances().image_id(IMAGE).min_count(1).max_count(1);
        let run = request.send().await.unwrap();
        run.instances()[0].instance_id().unwrap().to_owned()
    }

    /// Creates a group and an instance with our tags, as if a driver had created them long ago.
    pub(crate) async fn make_machine(&self, store: &str, vpc: &str, machine: u32) -> String {
        let name = format!("juju-local-{machine}");
        let tags = |kind, mark| tags(kind, mark, ("local", store), machine);
        let group = self.other.create_security_group().group_name(name).description("d").vpc_id(vpc);
        let group = group.tag_specifications(tags(ResourceType::SecurityGroup, "group"));
        let group = group.send().await.unwrap().group_id.unwrap();
        let run = self.other.run_instances().image_id(IMAGE).min_count(1).max_count(1);
        let run = run.security_group_ids(group).tag_specifications(tags(ResourceType::Instance, "adopted"));
        run.send().await.unwrap().instances()[0].instance_id().unwrap().to_owned()
    }

    /// Opens ports of a machine in the default VPC, as if a driver had opened them long ago.
    pub(crate) async fn open_as_ours(&self, machine: u32, ports: &[i32]) {
        let world = IpRange::builder().cidr_ip("0.0.0.0/0").description("opened by portcullis").build();
        let permission = |&port| {
            let ports = IpPermission::builder().ip_protocol("tcp").from_port(port).to_port(port);
            ports.ip_ranges(world.clone()).build()
        };
        let request =
            self.other.authorize_security_group_ingress().group_name(format!("juju-local-{machine}"));
        request.set_ip_permissions(Some(ports.iter().map(permission).collect())).send().await.unwrap();
    }

    /// Removes all groups but this one from an instance, as another client.
    pub(crate) async fn leave_only(&self, group: &str, instance: &str) {
        let shown = self.other.describe_instances().instance_ids(instance).send().await.unwrap();
        let interface = &shown.reservations()[0].instances()[0].network_interfaces()[0];
        let group = self.group(group).await.unwrap().group_id.unwrap();
        let request = self.other.modify_network_interface_attribute().groups(group);
        request.network_interface_id(interface.network_interface_id().unwrap()).send().await.unwrap();
    }

    /// Copies a group of ours with its tags into another VPC, as another client.
    pub(crate) async fn copy_group(&self, name: &str) {
        let original = self.group(name).await.unwrap();
        let vpc = self.other.create_vpc().cidr_block("10.0.0.0/16").send().await.unwrap();
        let tags = TagSpecification::builder().resource_type(ResourceType::SecurityGroup);
        let tags = tags.set_tags(original.tags.clone()).build();
        let request = self.other.create_security_group().group_name(name).description("a copy");
        let request = request.vpc_id(vpc.vpc.unwrap().vpc_id.unwrap()).tag_specifications(tags);
        request.send().await.unwrap();
    }

    pub(crate) async fn groups_of(&self, instance: &str) -> Vec<String> {
        let request = self.other.describe_instances().instance_ids(instance);
        let shown = request.send().await.unwrap();
        let shown = &shown.reservations()[0].instances()[0];
        let interface = &shown.network_interfaces()[0];
        let names = interface.groups().iter().map(|group| group.group_name().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

/// Returns the tags that the driver gives to the objects of a machine.
pub(crate) fn tags(
    kind: ResourceType,
    mark: &str,
    (environment, store): (&str, &str),
    machine: u32,
) -> TagSpecification {
    let tag = |key: &str, value: &str| Tag::builder().key(key).value(value).build();
    TagSpecification::builder()
        .resource_type(kind)
        .tags(tag("portcullis", mark))
        .tags(tag("portcullis:environment", environment))
        .tags(tag("portcullis:store", store))
        .tags(tag("portcullis:machine", &machine.to_string()))
        .build()
}

/// Waits until LocalStack serves requests. It reports that it runs before its operations are
/// loaded, and the first concurrent requests may fail as unknown operations.
pub(crate) async fn warm_up(localstack: SocketAddr) {
    let account = Account::new(localstack).await;
    let deadline = Instant::now() + WARM_UP_MAX;
    while let Err(error) = account.other.describe_instances().send().await {
        assert!(Instant::now() < deadline, "LocalStack is up and does not work: {error:?}");
    }
}

pub(crate) async fn launch(ec2: &Ec2, machine: u32) -> Instance {
    ec2.launch(&request(machine)).await.unwrap()
}

pub(crate) fn request(machine: u32) -> Launch {
    Launch { machine: MachineNumber::new(machine), user_data: UserData::new("#!/bin/sh\ntrue") }
}
