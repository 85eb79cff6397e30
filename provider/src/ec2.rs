//! EC2: a security group for each machine, in which our rules carry our mark. Start with [`Access::find`].
//!
//! Decisions are in the pure files: `naming` (what is ours), `permission` (rules and EC2's permissions), `refusal`
//! (what errors mean), `budget` (how fast to call), `recent` (readers that lag). `api` has the calls and `meter` counts
//! them; `groups`, `rules` and `machines` put them together. Only files below here know the SDK.
//!
//! Nothing calls STS or IAM, and credentials come from the SDK's own chain alone: environment, profile, role.

mod api;
mod budget;
mod groups;
mod machines;
mod meter;
mod naming;
mod permission;
mod recent;
mod refusal;
mod rules;

use crate::error::{Error, Subject};
use crate::provider::{GroupId, MachineNumber};
use api::Api;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::config::retry::RetryConfig;
use aws_sdk_ec2::config::timeout::TimeoutConfig;
use meter::Meter;
pub use naming::{Environment, InvalidEnvironment};
use recent::Recent;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// EC2's limit for a group and address family, unless the account has another.
pub const RULES_PER_FAMILY: usize = 60;

/// Finding out the region may ask the instance that we run on, which is near or not there at all.
const START_MAX: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub environment: Environment,
    /// In place of what the environment, the profile or the instance says.
    pub region: Option<String>,
    /// In place of EC2's own for the region.
    pub endpoint_url: Option<String>,
    /// How new instances are made; without it none can be.
    pub launch: Option<LaunchSettings>,
    pub rules_per_family: usize,
    pub patience: Patience,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSettings {
    pub image: String,
    pub instance_type: String,
    /// Without it, one of the default VPC that EC2 chooses.
    pub subnet: Option<String>,
    pub key: Option<String>,
}

/// How long a request may take, and how often one that only reads is made before we hear of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    pub connect: Duration,
    /// One request, with what comes before it. A change that hangs for this long holds up the pass that it is part of,
    /// and the closes that come after that.
    pub request: Duration,
    /// One read. Under load EC2 may take half a minute to describe groups, and ports must close then, too.
    pub read: Duration,
    /// Changes are made once: the SDK repeats nothing, since the budget would not be asked.
    pub reads: u32,
    /// Between two reads; doubles with each.
    pub first_pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            request: Duration::from_secs(10),
            read: Duration::from_secs(40),
            reads: 3,
            first_pause: Duration::from_millis(500),
        }
    }
}

impl Settings {
    pub fn new(environment: Environment) -> Self {
        Self {
            environment,
            region: None,
            endpoint_url: None,
            launch: None,
            rules_per_family: RULES_PER_FAMILY,
            patience: Patience::default(),
        }
    }
}

/// Region and credentials, as every AWS program has them.
#[derive(Debug, Clone)]
pub struct Access(SdkConfig);

impl Access {
    /// Refuses to go on without a region. Credentials are looked for when they are needed: those of a role may come a
    /// little after the instance. No call is made to EC2.
    ///
    /// # Errors
    /// [`Error::Unusable`] if there is no region, or one that cannot be.
    pub async fn find() -> Result<Self, Error> {
        let slow = |_| unusable("finding out the region took too long");
        let loading = aws_config::defaults(BehaviorVersion::latest()).load();
        let config = tokio::time::timeout(START_MAX, loading).await.map_err(slow)?;
        region_of(None, &config)?;
        Ok(Self(config))
    }
}

/// All calls of one environment to one region of EC2 go through one of these, which shares its budget among them.
pub struct Ec2 {
    settings: Settings,
    api: Api,
    memory: Mutex<Memory>,
}

/// What need not be asked twice. All of it can be lost without harm.
#[derive(Debug, Default)]
struct Memory {
    recent: Recent,
    /// The group of each machine as last read, which saves a read before every change.
    groups: BTreeMap<MachineNumber, GroupId>,
    /// Whether a VPC has IPv6, and when that was asked.
    ipv6: BTreeMap<String, (bool, Instant)>,
    /// Where new instances go.
    home: Option<String>,
}

impl fmt::Debug for Ec2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ec2").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Ec2 {
    /// # Errors
    /// As for [`Ec2::with_config`].
    pub fn connect(settings: Settings, access: &Access) -> Result<Self, Error> {
        Self::with_config(settings, &access.0)
    }

    /// With everything that is not in `settings` from `config`.
    ///
    /// # Errors
    /// [`Error::Unusable`] if neither names a region, or one that cannot be.
    pub fn with_config(settings: Settings, config: &SdkConfig) -> Result<Self, Error> {
        let region = region_of(settings.region.as_deref(), config)?;
        let endpoint = settings.endpoint_url.clone().or_else(|| config.endpoint_url().map(str::to_owned));
        let patience = settings.patience;
        let timeouts = |operation| {
            TimeoutConfig::builder().connect_timeout(patience.connect).operation_timeout(operation).build()
        };
        let meter = Meter::new();
        let mut client = aws_sdk_ec2::config::Builder::from(config)
            .region(Region::new(region.clone()))
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts(patience.request))
            .interceptor(meter.clone());
        client.set_endpoint_url(endpoint.clone());
        let place = endpoint.map_or_else(
            || format!("EC2 in region '{region}' (is that the right one?)"),
            |endpoint| format!("EC2 at {endpoint}"),
        );
        let reader = client.clone().timeout_config(timeouts(patience.read));
        let [client, reader] = [client, reader].map(|config| aws_sdk_ec2::Client::from_conf(config.build()));
        Ok(Self { settings, api: Api::new(client, reader, meter, patience, place), memory: Mutex::default() })
    }

    /// How many requests went out, by the name of their action.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.api.meter.requests()
    }

    /// The share of EC2's published pace that is used now: less than 1 after it has throttled us.
    pub fn pace(&self) -> f64 {
        self.api.meter.pace()
    }

    fn environment(&self) -> &Environment {
        &self.settings.environment
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn region_of(chosen: Option<&str>, config: &SdkConfig) -> Result<String, Error> {
    let region = chosen.or_else(|| config.region().map(AsRef::as_ref));
    let region =
        region.ok_or_else(|| unusable("no region for EC2: set AWS_REGION, or one in the profile"))?;
    check_region(region)?;
    Ok(region.to_owned())
}

/// The region becomes part of a host name.
fn check_region(region: &str) -> Result<(), Error> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if region.is_empty() || region.len() > 63 || !region.bytes().all(allowed) {
        let shown: String = region.chars().take(63).collect();
        return Err(unusable(&format!("no region of EC2 is called {shown:?}")));
    }
    Ok(())
}

fn unusable(reason: &str) -> Error {
    Error::Unusable { what: Subject::Provider, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_part_of_a_host_name() {
        for good in ["us-east-1", "eu-central-2", "cn-north-1"] {
            assert_eq!(check_region(good), Ok(()));
        }
        for bad in ["", "us east", "US-EAST-1", "evil.example.com/", &"x".repeat(64)] {
            assert_eq!(check_region(bad).unwrap_err().kind(), "unusable", "{bad}");
        }
    }

    #[test]
    fn no_region_is_said() {
        let settings = Settings::new(Environment::new("prod", "6f1c").unwrap());
        let error = Ec2::with_config(settings, &SdkConfig::builder().build()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the provider cannot be used: no region for EC2: set AWS_REGION, or one in the profile"
        );
    }
}
